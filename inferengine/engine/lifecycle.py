"""Lifecycle and Shutdown: what state the engine process is in, and when and with which exit code it ends.

Lifecycle has the state, the loading progress and the signs of life, which the threads share. Each attribute is written
by one thread and read by the others as it is; none needs a lock.

Shutdown ends the engine: drained, timed out, aborted, failed or frozen. Any thread may ask for the end; the
supervisor's thread waits for it in `wait`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from inferengine.config import EngineConfig
from inferengine.errors import ExitCode
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
        """Loading progress: `share` in [0, 1] of the phase."""
        self.mark(phase)
        self.progress = (phase, share)
        self._on_change()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to this phase of starting. In the loop's thread."""
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def loop_age_s(self) -> float:
        """Seconds since the loop turned, or was last seen in a step within its time. A waiting loop turns once a
        second."""
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
        """Seconds for which the value has been `mark`."""
        if self._looked_s is None or mark != self._mark:
            self.waited_s = 0.0
        else:
            self.waited_s += min(max(0.0, now - self._looked_s), self._most_s)
        self._mark, self._looked_s = mark, now
        return self.waited_s


class Shutdown:
    """Decides that the engine ends. `exit_code` is the process's exit code, as far as is known."""

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
        """Finish what runs, within the drain time. Any number of times."""
        if self._drain_by_s is None:
            self._drain_by_s = self._lifecycle.clock() + self._config.drain_timeout_s
        if self._lifecycle.state != STOPPING:
            self._lifecycle.enter(DRAINING if self._lifecycle.state in (READY, DRAINING) else STOPPING)
        self._changed.set()

    def abort(self) -> None:
        """Do not wait for what runs."""
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
        """Have `function` called once, when the engine cannot go on, in the thread that found out."""
        self._on_failure = function

    def wait(self, is_drained: Callable[[], bool]) -> None:
        """Return when the engine is to end now."""
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
        """Whether the loop or the I/O thread has not turned for too long; the end has begun then. A step that the
        device computes is judged by the step watchdog, as long as there is one."""
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
    """The stacks of all threads, whichever holds the interpreter. As text: writing to standard error may block."""
    with os.fdopen(os.memfd_create("tracebacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
