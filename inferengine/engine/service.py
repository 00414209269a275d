"""EngineService: the engine process without its signals. Four threads and what passes between them.

    I/O thread    sockets, connections, intake, publisher: answers at once, whatever the loop does
    loop thread   loads the model, then turns: commands in, steps, news out
    step watch    looks at the step under way while there is one, and finds the one that does not end
    main thread   states: STARTING -> READY -> DRAINING -> STOPPING, frozen loops, the exit code

Sockets answer from the first moment, with state STARTING and the loading progress.
"""

from __future__ import annotations

import gc
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from inferengine.config import Config
from inferengine.core.executor import AdapterStore, Capacity, Executor
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.core.speculation.proposers import build_proposer, speculation_method
from inferengine.core.step_roofline import Roofline
from inferengine.engine.admin import AdminOperations
from inferengine.engine.core import EngineCore
from inferengine.engine.io.connections import TICK_S, Connections
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.intake import Intake, LoadedEngine
from inferengine.engine.io.lost_connections import LostConnections
from inferengine.engine.io.publisher import Publisher
from inferengine.engine.io.resume import GrammarReplay
from inferengine.engine.io.thread import RETRY_S, IOThread
from inferengine.engine.loop import EngineLoop, LoopOutput
from inferengine.engine.metrics.counters import Counters
from inferengine.engine.metrics.kv_events import KVEventPublisher
from inferengine.engine.metrics.spans import record_choice
from inferengine.engine.metrics.stats import StatsReporter
from inferengine.engine.model_info import ModelCard
from inferengine.engine.options import admission_limits, scheduler_options
from inferengine.engine.services.adapters import AdapterService
from inferengine.engine.services.grammars import GrammarService
from inferengine.engine.services.profiler import MakeRecorder, Profiler
from inferengine.engine.services.tokenization import TextService
from inferengine.engine.shutdown import CHECK_S, Shutdown, all_tracebacks
from inferengine.engine.state import Lifecycle
from inferengine.engine.step_watchdog import Stall, StallHistory, StallRecord, StepWatchdog, record_path, stall_rule
from inferengine.errors import ExitCode, InferEngineError
from inferengine.observability.tracing import Tracing, make_tracing
from inferengine.process import stdio as output
from inferengine.process.sd_notify import Notifier, Watchdog
from inferengine.wire import codec
from inferengine.wire.messages import EPOCH_BYTES, READY, STOPPING, ModelInfo, Status

if TYPE_CHECKING:
    from inferengine.engine.metrics.server import MetricsServer

logger = logging.getLogger(__name__)

DELIVERY_S = 2.0  # for the last messages to reach their readers
FAILED_STOP_S = 2.0  # for the I/O thread to end in an engine that failed
NEWS_BEHIND = 32  # steps that the I/O thread may be behind before the loop waits for it
SWITCH_INTERVAL_S = 0.001  # the I/O thread must not wait long for a loop that computes in Python

Build = Callable[[], Executor]
ExitCodeOf = Callable[[BaseException], int]


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
        """`build` makes the executor, in the loop's thread: it may import what takes long. `exit_code_of` an error of
        `build` or loading. Raises AddressTaken and ConfigError: the sockets are bound here."""
        self.config = config
        self.core: EngineCore | None = None  # once loaded; belongs to the loop's thread
        self.lifecycle = Lifecycle(engine=config.engine.name, epoch=secrets.token_bytes(EPOCH_BYTES), clock=clock)
        self._stall_record = StallRecord(record_path(config))
        stalls = self._stall_record.read()
        self.lifecycle.num_stalled_steps, self.lifecycle.last_error = stalls.number, stalls.last or None
        self._stall: Stall | None = None
        self._step_watch: StepWatchdog | None = None
        self.counters = Counters()
        self._card = card
        self._build = build
        self._notifier = notifier or Notifier(None)
        self._watchdog = watchdog or Watchdog(self._notifier, None, clock)
        self._exit_code_of = exit_code_of
        self._engine: LoadedEngine | None = None
        self._ended = threading.Event()
        self._shutdown = Shutdown(config.engine, self.lifecycle)
        self._over = False  # the I/O thread has ended everything: what the loop still posts is too late
        self._tracing = tracing or make_tracing(config.trace, "inferengine-engine")
        self._endpoint = Endpoint(config)
        self._wire = IOThread(self._endpoint, self.lifecycle)
        self.lost_connections = LostConnections(self._endpoint)
        self._wire.on_crash = self._on_wire_crash
        self._texts = TextService(card.files, self._wire.call)
        self._grammars = GrammarService(card.files, self._wire.call, config.limits)
        self._replay = GrammarReplay(self._wire.call)
        self.publisher = Publisher(
            counters=self.counters,
            make_text=self._texts.stream,
            stop=self._stop_choice,
            resume_ttl_s=config.wire.resume_ttl_s,
            log_requests=config.log.requests,
            on_end=None if self._tracing is None else partial(record_choice, self._tracing, card.name),
        )
        self.connections = Connections(config, self.lifecycle, card, self.publisher, self.counters, self._wire.send)
        self._adapters = AdapterService(self.publisher, self._wire.call, self._on_adapters)
        self._profiling = Profiler(clock, self._wire.call)
        self.intake = Intake(
            config,
            self.lifecycle,
            card,
            self.publisher,
            self.counters,
            self._texts,
            self._grammars,
            self._replay,
            self.connections.alive,
            self._adapters,
        )
        self.connections.intake = self.intake
        self._reports = StatsReporter(config, self.lifecycle, card, self.publisher, self.counters)
        self._kv_events = KVEventPublisher(config.engine.name, card.name, self._wire.publish)
        self._kv_events.adapters = lambda: self._adapters.names
        self._wire.replay_batches = self._kv_events.replay
        self.connections.admin_ops = AdminOperations(
            self.lifecycle,
            self._shutdown,
            self.intake,
            self.publisher,
            self._adapters,
            self._profiling,
            stats=self._stats,
            config=self._reports.config,
            call=self._wire.call,
        ).table
        self._metrics = self._make_metrics(config.engine.metrics_port)
        self._status_due_s = 0.0
        self._loop_thread = threading.Thread(target=self._run_loop, name="inferengine-loop", daemon=True)
        self._main_thread = threading.Thread(target=self._supervise, name="inferengine-supervisor", daemon=True)
        self.on_end: Callable[[], None] = lambda: None  # called once, when the exit code is known

    # -- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer and to load."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.lifecycle.on_change = self._on_change
        self._wire.start(self.connections.receive, self._tick)
        if self._metrics is not None:
            self._metrics.start()
        self._loop_thread.start()
        self._main_thread.start()

    @property
    def on_failure(self) -> Callable[[], None]:
        """Called once, when the engine cannot go on and is about to end what it has."""
        return self._shutdown.on_failure

    @on_failure.setter
    def on_failure(self, function: Callable[[], None]) -> None:
        self._shutdown.on_failure = function

    def drain(self) -> None:
        """Finish what runs, reject what comes, then end with exit code 0. Any number of times."""
        self._shutdown.drain()

    def abort(self) -> None:
        """End now: what runs ends with `abort`. Exit code 130."""
        self._shutdown.abort()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None when it has not ended in time."""
        return self._shutdown.exit_code if self._ended.wait(timeout_s) else None

    def _make_metrics(self, port: int) -> MetricsServer | None:
        if not port:
            return None
        from inferengine.engine.metrics.server import MetricsServer  # an HTTP server and Prometheus' library

        return MetricsServer(port, self._read_stats)

    # -- the loop's thread -------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        executor: Executor | None = None
        try:
            self.lifecycle.report("importing torch", 0.0)  # seconds, on a cold disk half a minute
            executor = self._build()
            self.lifecycle.mark("importing torch")
            capacity = executor.load(self.lifecycle.report)
            self.lifecycle.mark("allocating the cache")
            self._grammars.prepare(capacity.vocab_size, sorted(self._card.eos_token_ids))
            executor.warm_up(self.lifecycle.report)
            loop = self._make_loop(executor, capacity)
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
            proposer=build_proposer(self.config.speculation.method, capacity),
            on_failure=lambda error: loop.observe_failure(error),
        )
        core.roofline = _roofline_of(executor)
        self._step_watch = watch = self._make_step_watch(core, executor)
        loop = EngineLoop(
            core,
            self.lifecycle,
            post=self._post,
            on_turn=self._watchdog.feed,
            on_busy=(lambda busy: None) if watch is None else watch.busy,
        )
        if watch is not None:
            watch.is_recorded = lambda: loop.watcher is not None
        limits = admission_limits(self.config, capacity)
        self._texts.wait()
        self._grammars.wait()
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
            pooling=self.config.model.pooling if capacity.embedding_size else "",
        )
        self.lifecycle.mark("measuring the device")
        self.core = core
        self._engine = engine = LoadedEngine(
            loop,
            limits,
            capacity.vocab_size,
            capacity.embedding_size,
            speculation_method(self.config.speculation.method, capacity),
        )
        store: AdapterStore | None = getattr(executor, "adapters", None)
        make: MakeRecorder | None = getattr(executor, "recorder", None)
        self._wire.call(lambda: self._on_loaded(info, engine, store, make))
        return loop

    def _make_step_watch(self, core: EngineCore, executor: Executor) -> StepWatchdog | None:
        """In the loop's thread, which it is to watch."""
        config = self.config.engine
        device = str(getattr(getattr(executor, "device", None), "type", "cpu"))
        rule = stall_rule(config.stall_factor, config.stall_min_s, device)
        if rule is None:
            return None
        watch = StepWatchdog(
            core, rule, clock=self.lifecycle.clock, on_alive=self._on_step_alive, on_stall=self._on_stall
        )
        threading.Thread(target=watch.run, name="inferengine-steps", daemon=True).start()
        return watch

    def _post(self, news: LoopOutput) -> None:
        self._wire.call(lambda: self._publish(news))
        self._wire.catch_up(NEWS_BEHIND)

    def _on_failure(self, error: BaseException) -> None:
        """Loading failed, or the loop: the engine cannot go on."""
        loading = self._engine is None
        if loading and isinstance(error, InferEngineError):
            logger.critical("%s", error)
        else:
            logger.critical("the engine %s", "cannot load the model" if loading else "loop failed", exc_info=error)
        self._shutdown.fail(self._exit_code_of(error) if loading else ExitCode.CRASH, error)

    # -- the step watch's thread -------------------------------------------------------------------------------------

    def _on_step_alive(self, now: float) -> None:
        self.lifecycle.step_seen_s = now
        self._watchdog.feed()

    def _on_stall(self, stall: Stall) -> None:
        """The end first: writing to a log may block."""
        self._stall = stall
        self.lifecycle.num_stalled_steps += 1
        self._shutdown.fail(ExitCode.STALLED, StepStalled(stall.summary))
        self._stall_record.write(StallHistory(self.lifecycle.num_stalled_steps, str(self.lifecycle.last_error)))
        logger.critical("a step stalled, the engine ends: %s", stall.summary, extra={"fields": stall.fields})
        logger.critical("where its threads are:\n%s", all_tracebacks())

    # -- the I/O thread ----------------------------------------------------------------------------------------------

    def _on_loaded(
        self, info: ModelInfo, engine: LoadedEngine, adapters: AdapterStore | None, make: MakeRecorder | None
    ) -> None:
        self.connections.model = info
        self.intake.engine = engine
        self._adapters.begin(adapters, engine.loop)
        self._profiling.begin(make, engine.loop)
        self._on_adapters()
        self.lifecycle.progress = ("ready", 1.0)
        if not self._shutdown.begun:
            self.lifecycle.enter(READY)
            self._notifier.send("READY=1", f"STATUS=serving {info.name}")
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.lifecycle.phases.items())
            seconds = self.lifecycle.clock() - self.lifecycle.started_s
            logger.info("ready: %s after %.1f s: %s", info.name, seconds, phases)

    def _on_adapters(self) -> None:
        """Tell every connection which adapters there are."""
        if self.connections.model is not None:
            names = tuple(sorted(self._adapters.names))
            self.connections.model = self.connections.model.replace(adapters=names)

    def _publish(self, news: LoopOutput) -> None:
        if self._over:
            return
        self.publisher.publish(news.output, news.time_s)
        if news.num_scheduled_tokens:
            self.counters.step_tokens.observe(news.num_scheduled_tokens)
        if news.kv_events:
            self._kv_events.publish(news.kv_events)

    def _tick(self, now: float) -> float:
        output.retry()
        self.connections.tell_state(now)
        self.connections.tick(now)
        self._adapters.tick()
        self._profiling.tick(now)
        self.lost_connections.tick(now, busy=self.publisher.num_open > 0)
        if now >= self._status_due_s:
            self._status_due_s = now + self.config.wire.status_interval_s
            values = self._reports.status(self._engine, len(self.connections.by_routing_id))
            self._wire.publish([b"status." + self.lifecycle.engine.encode(), *codec.encode(Status(values))])
        retry = any(connection.backlog for connection in self.connections.by_routing_id.values())
        return min(self._status_due_s, now + (RETRY_S if retry else TICK_S))

    def _stop_choice(self, uid: int) -> None:
        if self._engine is not None:
            self._engine.loop.cancel([uid], "stop", None)

    def _stats(self) -> dict[str, Any]:
        return self._reports.stats(self._engine, len(self.connections.by_routing_id))

    def _end_everything(
        self, reason: str, code: str, message: str, suspects: Collection[int] = (), suspicion: str = ""
    ) -> None:
        """Terminal rows for all that is open, without the loop's help. `suspects` end with `engine_stalled`: who sends
        one of them again must know that it may be the cause."""
        self._over = True
        now = self.lifecycle.clock()
        self.intake.refuse_waiting(InferEngineError(code, message))
        rows = [
            Finished(
                uid=log.uid,
                reason=reason,
                detail=("engine_stalled", suspicion) if log.uid in suspects else (code, message),
                num_prompt=log.submission.num_prompt,
                num_cached=0,
                num_output=len(log.tokens),
                queued_s=None,
                first_token_s=None,
                total_s=now - log.arrival_s,
                tenant=log.submission.tenant,
                num_preemptions=0,
            )
            for log in self.publisher.open_logs()
        ]
        self.publisher.publish(StepOutput(0, [], [], rows, -1), now)

    # -- the supervisor's thread -------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        phase, share = self.lifecycle.progress
        state = self.lifecycle.state
        if state == READY:
            self._notifier.status(f"serving {self._card.name}")
        else:
            self._notifier.status(state.lower() if state != "STARTING" else f"{phase} {share:.0%}")
        now = self.lifecycle.clock()
        self._wire.call(lambda: self.connections.tell_state(now))

    def _supervise(self) -> None:
        try:
            self._shutdown.wait(self._is_drained)
            self._shut_down()
        except BaseException:
            logger.critical("the supervisor failed", exc_info=True)
            self._shutdown.exit_code = ExitCode.CRASH
        finally:
            self._ended.set()
            self.on_end()

    def _is_drained(self) -> bool:
        def is_drained() -> bool:
            return not self.publisher.num_open and not self.intake.has_unanswered and self.connections.all_sent

        return bool(self._wire.ask(is_drained))

    def _read_stats(self) -> dict[str, Any] | None:
        """From any thread; None when the I/O thread does not answer."""
        return self._wire.ask(self._stats)

    def _shut_down(self) -> None:
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        failed = self._shutdown.failed
        self.lifecycle.enter(STOPPING)
        if self._engine is not None and not failed:
            self._engine.loop.stop()
            self._loop_thread.join(DELIVERY_S)
        last_words = self._last_words(failed)
        self._wire.call(lambda: self._end_everything(*last_words))
        deadline_s = self.lifecycle.clock() + DELIVERY_S
        while self.lifecycle.clock() < deadline_s and not self._is_drained():
            time.sleep(CHECK_S)
        self._wire.call(lambda: self.connections.goodbye(last_words.message, self.lifecycle.clock()))
        if self._metrics is not None:
            self._metrics.close()
        if self._step_watch is not None:
            self._step_watch.close()
        self._texts.close()
        self._grammars.close()
        self._replay.close()
        if failed:
            self._wire.stop(FAILED_STOP_S)
        else:
            self._wire.stop()
            self._stall_record.clear()
        if self._tracing is not None:
            self._tracing.close()
        if self._shutdown.exit_code in (ExitCode.STALLED, ExitCode.FROZEN):
            self._notifier.send("WATCHDOG=trigger")  # whoever supervises kills what cannot leave
        self._notifier.close()

    def _last_words(self, failed: bool) -> _LastWords:
        """How what is open ends."""
        if not failed:
            return _LastWords("abort", "draining", "The engine is shutting down.")
        code, message = "engine_restarted", "The engine restarts because a step of other requests did not end."
        match self._shutdown.exit_code:
            case ExitCode.STALLED if self._stall is not None:
                suspicion = "A step that computed this request did not end; the engine restarts."
                return _LastWords("error", code, message, self._stall.uids, suspicion)
            case ExitCode.FROZEN:  # nobody knows what it hangs on, so all of them may be the cause
                return _LastWords("error", "engine_stalled", "The engine stopped working and restarts.")
        return _LastWords("error", "engine_restarted", "The engine failed.")

    def _on_wire_crash(self, error: BaseException) -> None:
        self._shutdown.fail(ExitCode.CRASH, error)


class StepStalled(RuntimeError):
    """A step took far longer than such steps take."""


class _LastWords(NamedTuple):
    """What everything that is open ends with, and, for `suspects`, the message beside `engine_stalled`."""

    reason: str
    code: str
    message: str
    suspects: Collection[int] = ()
    suspicion: str = ""


def _roofline_of(executor: Executor) -> Roofline | None:
    """A device that cannot be held against its peaks serves all the same."""
    describe: Callable[[], Roofline | None] | None = getattr(executor, "roofline", None)
    try:
        return describe() if describe is not None else None
    except Exception as error:
        logger.warning("no share of the roofline: %s: %s", type(error).__name__, error)
        return None
