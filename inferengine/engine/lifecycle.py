"""The state of the engine process, whether it still makes progress, and when and with which exit code it ends.

Lifecycle has the state, the loading progress and the signs of life, which the threads share. Each attribute is written
by one thread and read by the others as it is; none needs a lock.

Shutdown ends the engine: drained, timed out, aborted, failed or frozen. Any thread may ask for the end; the
supervisor's thread waits for it in `wait`.

StepWatchdog is a thread that notices a step which takes far longer than such steps take, and logs what ran. A kernel
that never ends, a deadlock between threads, a lost interrupt: the loop would wait for the device for ever. While there
is work this thread looks four times a second at the oldest step under way; while there is none it sleeps. It counts
only time in which it was itself running (UnchangedTimer), so a stopped process, a suspended machine or a starved core
is no stall. Time in which the loop's thread compiles a kernel, or the process reads its memory back from a disk, does
not count either, up to EXCUSED_S for each step. How long a step may take: core/step_time.py. A step below `min_s` is
never looked at closely, so being watched costs the loop a few attributes a step.

StallRecord keeps the number of stalls and the last one in a file beside the engine's socket: the process that saw a
stall ends within a second, so its successor reports it.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from inferengine.config import Config, EngineConfig, engine_address, runtime_directory
from inferengine.core.scheduler.planner import ScheduledStep
from inferengine.core.step_time import Prediction, StallRule, StepTimes, phase_of
from inferengine.engine.core import EngineCore
from inferengine.errors import ConfigError, ExitCode
from inferengine.wire.messages import DRAINING, READY, STARTING, STOPPING

logger = logging.getLogger(__name__)

CHECK_S = 0.02  # between two checks whether a draining engine is done


class Lifecycle:
    """State, progress and signs of life of the engine process."""

    def __init__(
        self,
        *,
        engine: str,
        epoch: bytes,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        num_stalled_steps: int = 0,
        last_error: str | None = None,
    ) -> None:
        """`on_change` is called, from whichever thread, after the state or the progress changed. `num_stalled_steps`
        and `last_error` come from earlier processes of this engine."""
        self.engine = engine
        self.epoch = epoch  # random for each start
        self.clock = clock
        self.started_s = clock()
        self.state = STARTING
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.last_error = last_error
        self.turned_s: float | None = None  # when the loop last came round; None before its first turn
        self.step_seen_s = 0.0  # when a step under way was last seen to be within its time
        self.io_turned_s: float | None = None  # when the I/O thread last came round; None before it began
        self.num_stalled_steps = num_stalled_steps  # with those of this engine's earlier processes
        self.phases: dict[str, float] = {}  # seconds that each phase of starting took
        self._on_change = on_change
        self._marked_s = self.started_s

    def enter(self, state: str) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self._on_change()

    def report(self, phase: str, share: float) -> None:
        """Set the loading progress: `share`, in [0, 1], of a phase."""
        self.mark(phase)
        self.progress = (phase, share)
        self._on_change()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to this phase of starting. In the loop's thread."""
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def loop_age_s(self) -> float:
        """Return the seconds since the loop turned, or was last seen in a step within its time. A waiting loop turns
        once a second."""
        if self.turned_s is None:
            return 0.0
        return max(0.0, self.clock() - max(self.turned_s, self.step_seen_s))


class UnchangedTimer:
    """Measures how long a value has not changed, in time in which this process ran.

    While the process is stopped or the machine suspended, nothing looks and nothing could have changed the value: of
    the time between two looks at most `most_s` counts."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._mark: object = None
        self._looked_s: float | None = None
        self.waited_s = 0.0

    def look(self, mark: object, now: float) -> float:
        """Return for how many seconds the value has been `mark`."""
        if self._looked_s is None or mark != self._mark:
            self.waited_s = 0.0
        else:
            self.waited_s += min(max(0.0, now - self._looked_s), self._most_s)
        self._mark, self._looked_s = mark, now
        return self.waited_s


class Shutdown:
    """Decides when the engine ends, and with which exit code. `exit_code`: as far as it is known."""

    def __init__(self, config: EngineConfig, lifecycle: Lifecycle) -> None:
        self.exit_code: int = ExitCode.OK
        self._config = config
        self._lifecycle = lifecycle
        self._drain_by_s: float | None = None
        self._aborting = threading.Event()
        self._failed = threading.Event()
        self._changed = threading.Event()  # something for the supervisor
        self._on_failure: Callable[[], None] = lambda: None

    @property
    def begun(self) -> bool:
        """Whether the engine has been told to drain or to abort."""
        return self._drain_by_s is not None

    @property
    def failed(self) -> bool:
        """Whether it ends because it cannot go on."""
        return self._failed.is_set()

    def drain(self) -> None:
        """End the engine after running requests, within the drain timeout. May be called repeatedly."""
        if self._drain_by_s is None:
            self._drain_by_s = self._lifecycle.clock() + self._config.drain_timeout_s
        if self._lifecycle.state != STOPPING:
            self._lifecycle.enter(DRAINING if self._lifecycle.state in (READY, DRAINING) else STOPPING)
        self._changed.set()

    def abort(self) -> None:
        """End the engine without waiting for running requests."""
        self.exit_code = ExitCode.ABORTED
        self._aborting.set()
        self.drain()

    def fail(self, exit_code: int, error: BaseException | None = None) -> None:
        """End the engine: it cannot go on. Only the first failure counts."""
        if error is not None and not self._failed.is_set():
            self._lifecycle.last_error = f"{type(error).__name__}: {error}"
        if self._failed.is_set():
            return
        self.exit_code = exit_code
        self._failed.set()
        self._changed.set()
        self._on_failure()

    def crash(self, error: BaseException) -> None:
        """End the engine: a thread that it needs has failed."""
        self.fail(ExitCode.CRASH, error)

    def notify_failure(self, function: Callable[[], None]) -> None:
        """Call `function` once when the engine has failed, in the thread that found the failure."""
        self._on_failure = function

    def wait(self, is_drained: Callable[[], bool]) -> None:
        """Wait until the engine must end."""
        look_s = min(1.0, self._config.frozen_after_s / 4)
        loop, io = UnchangedTimer(2 * look_s), UnchangedTimer(2 * look_s)
        while not self._failed.is_set() and not self._aborting.is_set():
            if self._is_frozen(loop, io):
                return
            drain_by_s = self._drain_by_s
            if drain_by_s is None:
                self._changed.wait(look_s)
                self._changed.clear()
                continue
            if self._lifecycle.state == STOPPING or self._lifecycle.clock() >= drain_by_s or is_drained():
                return
            time.sleep(CHECK_S)

    def _is_frozen(self, loop: UnchangedTimer, io: UnchangedTimer) -> bool:
        """Return whether the loop or the I/O thread has not turned for too long; if so, the end has begun.

        A step that the device computes is judged by the step watchdog, if there is one.
        """
        lifecycle, frozen_after_s = self._lifecycle, self._config.frozen_after_s
        now = lifecycle.clock()
        loop_s = loop.look((lifecycle.turned_s, lifecycle.step_seen_s), now) if lifecycle.turned_s is not None else 0.0
        io_s = io.look(lifecycle.io_turned_s, now) if lifecycle.io_turned_s is not None else 0.0
        if max(loop_s, io_s) <= frozen_after_s:
            return False
        message = f"the {'loop' if loop_s >= io_s else 'I/O thread'} has not turned for {frozen_after_s:g} s"
        self.fail(ExitCode.FROZEN, RuntimeError(message))
        logger.critical(message)
        logger.critical("where its threads are:\n%s", all_tracebacks())
        return True


def all_tracebacks() -> str:
    """Return the stacks of all threads. As text, because writing to standard error may block."""
    with os.fdopen(os.memfd_create("tracebacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")


# -- steps that do not end ---------------------------------------------------------------------------------------------


TICK_S = 0.25
MOST_TICKS = 2  # of which one look at a step may count
EXCUSED_S = 60.0  # time of one step that may go uncounted
LOOK_FOR_EXCUSES_S = 0.5  # a step below this needs none
FAULTS_PER_TICK = 25  # pages read from a disk: memory was swapped out, or weights are mapped and not in memory
COMPILERS = ("triton.compiler", "triton.backends", "torch._inductor", "torch.utils.cpp_extension")
MIN_S = {"cuda": 2.0, "cpu": 30.0}  # a CPU is shared with others: an alarm too early is worse there than one too late
NEW_KIND_S = 10.0  # a step of a new kind may load kernels and set up workspaces; at least twice the minimum
MOST_NAMED = 64  # requests of a stalled step that the log names
STACK_FRAMES = 6


MAX_BYTES = 4096
MAX_SUMMARY = 500


class Stall(NamedTuple):
    """A step that did not end. `uids`: the requests with a row in it."""

    uids: frozenset[int]
    summary: str  # one line, without a word about who asked
    fields: dict[str, Any]  # for the log


def stall_rule(factor: float, min_s: float, device: str) -> StallRule | None:
    """Return the configured rule for a kind of device (`cuda`, `cpu`); None: steps are not watched."""
    if not factor:
        return None
    least_s = min_s or MIN_S.get(device, MIN_S["cpu"])
    return StallRule(factor, least_s, max(NEW_KIND_S, 2 * least_s) if not min_s else 2 * least_s)


class StepWatchdog:
    """Watches the steps of one core. The loop calls `busy`; `run` is the watching thread."""

    def __init__(
        self,
        core: EngineCore,
        rule: StallRule,
        *,
        clock: Callable[[], float],
        on_alive: Callable[[float], None],
        on_stall: Callable[[Stall], None],
        excuse: Callable[[], str] | None = None,
        is_profiled: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_alive` is called with the time at each look that finds a step within its time, `on_stall` once, both in
        the watching thread. `excuse` says why time goes by without the step's fault, or nothing; default: looks at
        the thread that made this watchdog, the loop's. `is_profiled`: whether steps are being profiled, which slows
        them."""
        self._core = core
        self._rule = rule
        self._clock = clock
        self._on_alive = on_alive
        self._on_stall = on_stall
        self._is_profiled = is_profiled
        self._loop_ident = threading.get_ident()
        self._excuse = excuse or _Excuses(self._loop_ident)
        roofline = core.roofline
        self.times = StepTimes(None if roofline is None else roofline.least_s)
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._patience = UnchangedTimer(MOST_TICKS * TICK_S)
        self._step: ScheduledStep | None = None
        self._looked_s = 0.0  # of the step's waiting, as far as excuses were looked for
        self._excused_s = 0.0
        self._limit: tuple[Prediction, float] | None = None  # of the step, once it is late

    def busy(self, is_busy: bool) -> None:
        """Record that the loop has work, or none any more."""
        if is_busy:
            self._busy.set()
        else:
            self._busy.clear()

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()
        self._busy.set()

    def run(self) -> None:
        """Watch until closed, or until a step has stalled."""
        try:
            while not self._closed.is_set():
                self._busy.wait()
                if self.look(self._clock()):
                    return
                self._closed.wait(TICK_S)
        except Exception:  # the engine serves without: a step counts as a turn of the loop then (engine/lifecycle.py)
            logger.exception("steps are not watched any more")

    def look(self, now: float) -> bool:
        """Return whether the oldest step in flight has stalled; if so, `on_stall` has been called."""
        step = self._core.under_way
        is_same = step is not None and step is self._step
        waited_s = self._patience.look(0 if step is None else id(step), now)
        if not is_same:
            if self._excused_s or self._is_profiled():
                self._core.finished.clear()  # the compiler's time, or the profiler's, and not the step's
            self._step, self._limit, self._looked_s, self._excused_s = step, None, 0.0, 0.0
            self._learn()
        elif step is not None:
            self._excuse_some(waited_s)
            counted_s = waited_s - self._excused_s
            if counted_s >= self._rule.min_s and self._is_stalled(step, counted_s):
                return True
        if step is not None:  # a loop that does not turn and computes nothing is not alive
            self._on_alive(now)
        return False

    def _excuse_some(self, waited_s: float) -> None:
        since_s, self._looked_s = waited_s - self._looked_s, waited_s
        if waited_s >= LOOK_FOR_EXCUSES_S and self._excused_s < EXCUSED_S and self._excuse():
            self._excused_s += since_s

    def _is_stalled(self, step: ScheduledStep, waited_s: float) -> bool:
        if self._limit is None:
            size = self.times.size(step)
            if self._is_profiled():
                size = size._replace(features=size.features | {"profile"})
            prediction = self.times.predict(size)
            self._limit = prediction, self._rule.limit_s(prediction)
        prediction, limit_s = self._limit
        if waited_s <= limit_s:
            return False
        self._on_stall(self._describe(step, waited_s, prediction, limit_s))
        return True

    def _learn(self) -> None:
        """Learn from the latest finished steps. Steps between two looks are not measured; that is no loss."""
        finished = self._core.finished
        for kind in tuple(finished):
            item = finished.pop(kind, None)
            if item is not None:
                step, seconds = item
                self.times.observe(self.times.size(step), seconds)

    def _describe(self, step: ScheduledStep, waited_s: float, prediction: Prediction, limit_s: float) -> Stall:
        core, plan = self._core, step.plan
        launching = core.launching
        rows = {sequence.uid: sequence for sequence in step.rows}
        if launching is not None:  # it may be what hangs, in its launch or in its masks
            rows |= {sequence.uid: sequence for sequence in launching.rows}
        phase = phase_of(plan)
        expected = "nothing known" if prediction.seconds is None else f"expected {prediction.seconds:.3g} s"
        launched = str(getattr(core.executor, "launched", "") or "")
        features = sorted(self.times.size(step).features)
        summary = (
            f"step {plan.step} ({phase}, {len(plan.slots)} rows, {plan.num_tokens} tokens"
            f"{', ' + ' '.join(features) if features else ''}) is not done after {waited_s:.1f} s, {expected}"
        )
        names = [sequence.request.request_id or str(sequence.uid) for sequence in rows.values()]
        frame = sys._current_frames().get(self._loop_ident)
        return Stall(
            frozenset(rows),
            summary,
            {
                "step": plan.step,
                "phase": phase,
                "waited_s": round(waited_s, 3),
                "expected_s": None if prediction.seconds is None else round(prediction.seconds, 6),
                "known_kind": prediction.known,
                "limit_s": round(limit_s, 3),
                "rows": len(plan.slots),
                "decodes": plan.num_decodes,
                "tokens": plan.num_tokens,
                "draws": plan.num_sampled,
                "draft_tokens": sum(plan.num_drafts),
                "chunks": plan.counts[plan.num_decodes :][:MOST_NAMED],
                "longest_context": max((s + c for s, c in zip(plan.starts, plan.counts, strict=True)), default=0),
                "features": features,
                "launched": launched,
                "steps_in_flight": core.num_in_flight,
                "requests": names[:MOST_NAMED],
                "num_requests": len(names),
                "at": [] if frame is None else _where(frame),
            },
        )


class _Excuses:
    """Finds reasons why time passes without the step's fault: compilation, and page faults."""

    def __init__(self, loop_ident: int) -> None:
        self._loop_ident = loop_ident
        self._faults = _major_faults()

    def __call__(self) -> str:
        before, self._faults = self._faults, _major_faults()
        if self._faults - before >= FAULTS_PER_TICK:
            return "paging"
        frame = sys._current_frames().get(self._loop_ident)
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).startswith(COMPILERS):
                return "compiling"
            frame = frame.f_back
        return ""


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _where(frame: FrameType) -> list[str]:
    """Return the innermost frames as text, with paths relative to the packages."""
    found = traceback.extract_stack(frame)[-STACK_FRAMES:]
    return [f"{'/'.join(item.filename.split('/')[-3:])}:{item.lineno} {item.name}" for item in reversed(found)]


class StallHistory(NamedTuple):
    """The number of stalls so far, and the error of the latest."""

    number: int = 0
    last: str = ""


def record_path(config: Config) -> Path | None:
    """Return the file's path: beside the engine's unix socket, else in the runtime directory; None without either."""
    address = engine_address(config)
    if address.startswith("ipc://"):
        return Path(address.removeprefix("ipc://") + ".stalls")
    try:
        return runtime_directory() / f"{config.engine.name}.stalls"
    except ConfigError:
        return None


class StallRecord:
    """Keeps the history in a file. Errors of reading and writing are ignored: the engine serves without it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> StallHistory:
        """Return the history in the file; an empty one if it cannot be read."""
        if self._path is None:
            return StallHistory()
        try:
            with self._path.open("rb") as file:
                values = json.loads(file.read(MAX_BYTES))
            return StallHistory(max(0, int(values["count"])), str(values["last"])[:MAX_SUMMARY])
        except FileNotFoundError:
            return StallHistory()
        except (OSError, ValueError, TypeError, KeyError):
            logger.warning("the record of stalls cannot be read: counting begins anew")
            return StallHistory()

    def write(self, stalls: StallHistory) -> None:
        """Write the history, replacing the file."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(beside, flags, 0o600), "w") as file:
                json.dump({"count": stalls.number, "last": stalls.last[:MAX_SUMMARY]}, file)
            os.replace(beside, self._path)
        except OSError as error:
            logger.warning("the record of stalls cannot be written: %s", error.strerror)

    def clear(self) -> None:
        """Remove the file, because the engine ends as requested."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
