"""EngineService: the engine process without its signals. It runs four threads:

    I/O thread    sockets, connections, intake, publisher (EngineIO): answers at once, whatever the loop does
    loop thread   loads the model, then turns: commands in, steps, output out
    step watchdog looks at the step under way while there is one, and finds the one that does not end
    supervisor    states: STARTING -> READY -> DRAINING -> STOPPING, frozen loops, the exit code

Sockets answer from the first moment, with state STARTING and the loading progress.
"""

from __future__ import annotations

import gc
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from inferengine.config import Config
from inferengine.core.executor import AdapterStore, Capacity, Executor, Progress
from inferengine.core.speculation import build_proposer, speculation_method
from inferengine.core.step_time import Roofline
from inferengine.engine.core import EngineCore
from inferengine.engine.io.engine_io import EngineIO, Termination
from inferengine.engine.lifecycle import (
    CHECK_S,
    Lifecycle,
    Shutdown,
    Stall,
    StallHistory,
    StallRecord,
    StepWatchdog,
    all_tracebacks,
    record_path,
    stall_rule,
)
from inferengine.engine.loop import EngineLoop, EngineRef, LoadedEngine, Loop, RelayLoop, accept_any
from inferengine.engine.model_info import ModelCard
from inferengine.engine.options import admission_limits, scheduler_options, unused_features
from inferengine.engine.services.profiler import MakeRecorder
from inferengine.errors import ExitCode, InferEngineError
from inferengine.observability.tracing import Tracing, make_tracing
from inferengine.process.listen import AddressTaken
from inferengine.process.system import Notifier, Watchdog
from inferengine.wire.messages import EPOCH_BYTES, READY, STOPPING, ModelInfo

if TYPE_CHECKING:
    from inferengine.engine.stats import MetricsServer

logger = logging.getLogger(__name__)

LOOP_STOP_S = 2.0  # for the loop to end
DELIVERY_S = 5.0  # for clients to handle the last messages: they acknowledge them within 50 ms
FAILED_DELIVERY_S = 2.0  # the same, in an engine that failed
FAREWELL_S = 1.0  # for clients to answer GOODBYE; one that has not read it yet takes the end for a lost connection
IO_STOP_S = 5.0  # for the I/O thread to end
FAILED_STOP_S = 2.0  # the same, in an engine that failed
STALL_LOG_S = 2.0  # for a stall to be in the log; writing there may block
# The I/O thread and the loop's thread wait for each other so long at most, for each message and each token: a loop that
# plans and launches in Python makes every first token up to that much later.
SWITCH_INTERVAL_S = 0.0002

Build = Callable[[], Executor | RelayLoop]
ExitCodeOf = Callable[[BaseException], int]
OnLost = Callable[[Callable[[BaseException], None]], None]


class EngineService:
    """One engine. `start`, then `wait` for the exit code; `drain` and `abort` from any thread end it."""

    def __init__(
        self,
        config: Config,
        card: ModelCard,
        build: Build,
        *,
        notifier: Notifier | None = None,
        watchdog: Watchdog | None = None,
        exit_code_of: ExitCodeOf = lambda error: ExitCode.CRASH,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        """`build` makes the executor, in the loop's thread: it may import what takes long. `exit_code_of` gives the
        exit code for an error of `build` or of loading. Raises AddressTaken and ConfigError: the sockets are bound
        here."""
        self.config = config
        self.core: EngineCore | None = None  # once loaded; belongs to the loop's thread
        self._card = card
        self._build = build
        self._exit_code_of = exit_code_of
        self._notifier = notifier or Notifier(None)
        self._watchdog = watchdog or Watchdog(self._notifier, None, clock)
        self._tracing = tracing or make_tracing(config.trace, "inferengine-engine")
        self._engine = EngineRef()
        self._stall_record = StallRecord(record_path(config))
        stalls = self._stall_record.read()
        self.lifecycle = Lifecycle(
            engine=config.engine.name,
            epoch=secrets.token_bytes(EPOCH_BYTES),
            clock=clock,
            on_change=self._on_change,
            num_stalled_steps=stalls.number,
            last_error=stalls.last or None,
        )
        self._stall: Stall | None = None
        self._stall_logged = threading.Event()
        self._step_watchdog: StepWatchdog | None = None
        self._shutdown = Shutdown(config.engine, self.lifecycle)
        self.io = EngineIO(config, self.lifecycle, card, self._engine, self._shutdown, self._tracing)
        self._metrics = self._make_metrics(config.engine.metrics_port)
        self._ended = threading.Event()
        self._on_end: Callable[[], None] = lambda: None
        self._loop_thread = threading.Thread(target=self._run_loop, name="inferengine-loop", daemon=True)
        self._main_thread = threading.Thread(target=self._supervise, name="inferengine-supervisor", daemon=True)

    # -- from outside ------------------------------------------------------------------------------------------------

    def start(
        self, *, on_end: Callable[[], None] = lambda: None, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to answer and to load.

        `on_end` is called once, when the exit code is known; `on_failure` once, when the engine cannot go on and is
        about to end what it has. Both from any thread."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._on_end = on_end
        self._shutdown.notify_failure(on_failure)
        self.io.start()
        if self._metrics is not None:
            self._metrics.start()
        self._loop_thread.start()
        self._main_thread.start()

    @property
    def loaded(self) -> LoadedEngine:
        """The loop and its limits. Raises InferEngineError before the model is loaded."""
        return self._engine.require()

    def drain(self) -> None:
        """Finish what runs, reject what comes, then end with exit code 0. Any number of times."""
        self._shutdown.drain()

    def abort(self) -> None:
        """End now: what runs ends with `abort`. Exit code 130."""
        self._shutdown.abort()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end and return the exit code, or None when it has not ended in time."""
        return self._shutdown.exit_code if self._ended.wait(timeout_s) else None

    def _make_metrics(self, port: int) -> MetricsServer | None:
        if not port:
            return None
        from inferengine.engine.stats import MetricsServer  # an HTTP server and Prometheus' library

        try:
            return MetricsServer(port, self.io.read_stats)
        except AddressTaken:
            self.io.close(0.0)  # its sockets are bound already
            raise

    # -- the loop's thread -------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        executor: Executor | RelayLoop | None = None
        try:
            self.lifecycle.report("importing", 0.0)  # torch: seconds, on a cold disk half a minute
            executor = self._build()
            on_lost: OnLost | None = getattr(executor, "on_lost", None)
            if on_lost is not None:
                on_lost(self._on_device_lost)
            self.lifecycle.mark("importing")
            capacity = executor.load(self.lifecycle.report)
            self.lifecycle.mark("allocating the cache")
            self.io.prepare_grammars(capacity.vocab_size, sorted(self._card.eos_token_ids))
            loop: Loop
            if isinstance(executor, RelayLoop):
                loop = executor
                loop.begin(self.lifecycle, self.io.post, self._watchdog.feed)
            else:
                warm_up: Callable[[Progress], None] = getattr(executor, "begin_warm_up", executor.warm_up)
                warm_up(self.lifecycle.report)
                loop = self._make_loop(executor, capacity)
            self._announce(executor, loop, capacity)
            gc.collect()
            gc.freeze()
            gc.enable()  # `run_engine` has switched it off
            loop.run()
        except BaseException as error:
            self._on_failure(error)
        finally:
            if executor is not None and not self._shutdown.failed:
                executor.close()

    def _make_loop(self, executor: Executor, capacity: Capacity) -> EngineLoop:
        core = EngineCore(
            executor,
            capacity,
            scheduler_options(self.config, capacity),
            clock=self.lifecycle.clock,
            thread_clock=time.thread_time,
            proposer=build_proposer(self.config.speculation.method, capacity),
            on_failure=lambda error: loop.observe_failure(error),
            roofline=_roofline_of(executor),
        )
        watchdog = self._make_step_watchdog(core, executor, is_profiled=lambda: loop.observer is not None)
        loop = EngineLoop(
            core,
            self.lifecycle,
            post=self.io.post,
            on_turn=self._watchdog.feed,
            on_busy=(lambda busy: None) if watchdog is None else watchdog.busy,
        )
        if watchdog is not None:
            threading.Thread(target=watchdog.run, name="inferengine-steps", daemon=True).start()
        self.core = core
        self._step_watchdog = watchdog
        return loop

    def _announce(self, executor: Executor | RelayLoop, loop: Loop, capacity: Capacity) -> None:
        """Have the loaded model announced: from now on requests are taken."""
        limits = admission_limits(self.config, capacity)
        self.io.wait_for_text()
        info = ModelInfo(
            self._card.name,
            self._card.fingerprint,
            capacity.vocab_size,
            capacity.max_model_len,
            self._card.eos_token_ids,
            capacity.block_size,
            limits.num_kv_tokens,
            str(getattr(executor, "dtype", self.config.model.dtype)).removeprefix("torch."),
            embedding_size=capacity.embedding_size,
            pooling=self._card.pooling if capacity.embedding_size else "",
            implementation=getattr(executor, "implementation", ""),
            without=unused_features(capacity),
        )
        self.lifecycle.mark("measuring the device")
        method = speculation_method(self.config.speculation.method, capacity)
        check = executor.check if isinstance(executor, RelayLoop) else accept_any
        makes = capacity.is_causal, capacity.scores, capacity.embedding_size
        self._engine.set(LoadedEngine(loop, limits, capacity.vocab_size, *makes, method, check))
        adapters: AdapterStore | None = getattr(executor, "adapters", None)
        make_recorder: MakeRecorder | None = getattr(executor, "recorder", None)
        self.io.call_loaded(info, loop, adapters, make_recorder, self._on_ready)

    def _make_step_watchdog(
        self, core: EngineCore, executor: Executor, is_profiled: Callable[[], bool]
    ) -> StepWatchdog | None:
        """Return the watchdog of this thread's steps; None where they are not watched."""
        config = self.config.engine
        device = str(getattr(getattr(executor, "device", None), "type", "cpu"))
        rule = stall_rule(config.stall_factor, config.stall_min_s, device)
        if rule is None:
            return None
        return StepWatchdog(
            core,
            rule,
            clock=self.lifecycle.clock,
            on_alive=self._on_step_alive,
            on_stall=self._on_stall,
            is_profiled=is_profiled,
        )

    def _on_failure(self, error: BaseException) -> None:
        """End the engine after loading, or the loop, has failed."""
        loading = self._engine.engine is None
        if loading and isinstance(error, InferEngineError):
            logger.critical("%s", error)
        else:
            logger.critical("the engine %s", "cannot load the model" if loading else "loop failed", exc_info=error)
        self._shutdown.fail(self._exit_code_of(error) if loading else ExitCode.CRASH, error)

    # -- a thread of the executor's ----------------------------------------------------------------------------------

    def _on_device_lost(self, error: BaseException) -> None:
        """End the engine after a part of the executor is gone: the step under way may never end."""
        logger.critical("the engine ends: %s", error)
        self._shutdown.fail(ExitCode.CRASH, error)

    # -- the step watchdog's thread ----------------------------------------------------------------------------------

    def _on_step_alive(self, now: float) -> None:
        self.lifecycle.step_seen_s = now
        self._watchdog.feed()

    def _on_stall(self, stall: Stall) -> None:
        """End the engine, then log why: writing to a log may block."""
        self._stall = stall
        self.lifecycle.num_stalled_steps += 1
        self._shutdown.fail(ExitCode.STALLED, StepStalled(stall.summary))
        self._stall_record.write(StallHistory(self.lifecycle.num_stalled_steps, str(self.lifecycle.last_error)))
        try:
            logger.critical("a step stalled, the engine ends: %s", stall.summary, extra={"fields": stall.fields})
            logger.critical("where its threads are:\n%s", all_tracebacks())
        finally:
            self._stall_logged.set()

    # -- the I/O thread ----------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        self.lifecycle.progress = ("ready", 1.0)
        if not self._shutdown.begun:
            self.lifecycle.enter(READY)
            self._notifier.send("READY=1", f"STATUS=serving {self._card.name}")
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.lifecycle.phases.items())
            seconds = self.lifecycle.clock() - self.lifecycle.started_s
            logger.info("ready: %s after %.1f s: %s", self._card.name, seconds, phases)

    # -- the supervisor's thread -------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._shutdown.wait(self.io.is_drained)
            self._shut_down()
        except BaseException:
            logger.critical("the supervisor failed", exc_info=True)
            self._shutdown.exit_code = ExitCode.CRASH
        finally:
            if self._stall is not None:
                self._stall_logged.wait(STALL_LOG_S)
            self._ended.set()
            self._on_end()

    def _shut_down(self) -> None:
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        failed = self._shutdown.failed
        self.lifecycle.enter(STOPPING)
        if self._engine.engine is not None and not failed:
            self._engine.engine.loop.stop()
            self._loop_thread.join(LOOP_STOP_S)
        termination = self._termination(failed)
        self.io.terminate(termination)
        deadline_s = self.lifecycle.clock() + (FAILED_DELIVERY_S if failed else DELIVERY_S)
        while self.lifecycle.clock() < deadline_s and not self.io.is_delivered():
            time.sleep(CHECK_S)
        self.io.goodbye(termination.message)
        deadline_s = self.lifecycle.clock() + FAREWELL_S
        while self.lifecycle.clock() < deadline_s and not self.io.is_alone():
            time.sleep(CHECK_S)
        if self._metrics is not None:
            self._metrics.close()
        if self._step_watchdog is not None:
            self._step_watchdog.close()
        self.io.close(FAILED_STOP_S if failed else IO_STOP_S)
        if not failed:
            self._stall_record.clear()
        if self._tracing is not None:
            self._tracing.close()
        if self._shutdown.exit_code in (ExitCode.STALLED, ExitCode.FROZEN):
            self._notifier.send("WATCHDOG=trigger")  # whoever supervises kills what cannot leave
        self._notifier.close()

    def _termination(self, failed: bool) -> Termination:
        """Return how the open choices end."""
        if not failed:
            return Termination("abort", "draining", "The engine is shutting down.")
        code, message = "engine_restarted", "The engine restarts because a step of other requests did not end."
        match self._shutdown.exit_code:
            case ExitCode.STALLED if self._stall is not None:
                suspicion = "A step that computed this request did not end; the engine restarts."
                return Termination("error", code, message, self._stall.uids, suspicion)
            case ExitCode.FROZEN:  # the cause is unknown, so every request may be it
                return Termination("error", "engine_stalled", "The engine stopped working and restarts.")
        return Termination("error", "engine_restarted", "The engine failed.")

    # -- any thread --------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """Announce a change of the state or of the progress."""
        phase, share = self.lifecycle.progress
        state = self.lifecycle.state
        if state == READY:
            self._notifier.status(f"serving {self._card.name}")
        else:
            self._notifier.status(state.lower() if state != "STARTING" else f"{phase} {share:.0%}")
        self.io.broadcast_state()


class StepStalled(RuntimeError):
    """A step took far longer than such steps take."""


def _roofline_of(executor: Executor) -> Roofline | None:
    """Return the roofline of the executor's device; None where it has none or cannot describe it."""
    describe: Callable[[], Roofline | None] | None = getattr(executor, "roofline", None)
    try:
        return describe() if describe is not None else None
    except Exception as error:
        logger.warning("no share of the roofline: %s: %s", type(error).__name__, error)
        return None
