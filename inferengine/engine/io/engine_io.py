"""EngineIO: everything that belongs to the I/O thread, constructed in the order in which the parts need each other.

endpoint, thread                   sockets, and the thread that owns them
text, grammars, replay             work in threads of their own; results come back to the I/O thread
publisher                          output logs, and one STEP message per connection and step
adapters, profiler                 operations that take longer than an answer
intake                             SUBMIT, ATTACH, CANCEL
connections                        every message of every client, leases, credit
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from inferengine.config import Config
from inferengine.core.executor import AdapterStore
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.engine.io.connections import TICK_S, Connections
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.intake import Intake
from inferengine.engine.io.lost_connections import LostConnections
from inferengine.engine.io.publisher import Publisher
from inferengine.engine.io.resume import GrammarReplay
from inferengine.engine.io.thread import RETRY_S, IOThread
from inferengine.engine.loaded import EngineRef
from inferengine.engine.loop import EngineLoop, LoopOutput
from inferengine.engine.metrics.counters import Counters
from inferengine.engine.metrics.kv_events import KVEventPublisher
from inferengine.engine.metrics.spans import record_choice
from inferengine.engine.metrics.stats import StatsReporter
from inferengine.engine.model_info import ModelCard
from inferengine.engine.services.adapters import AdapterService
from inferengine.engine.services.admin import AdminOperations
from inferengine.engine.services.grammars import GrammarService
from inferengine.engine.services.profiler import MakeRecorder, Profiler
from inferengine.engine.services.tokenization import TextService
from inferengine.engine.shutdown import Shutdown
from inferengine.engine.state import Lifecycle
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Tracing
from inferengine.process import stdio
from inferengine.wire import codec
from inferengine.wire.messages import ModelInfo, Status

MAX_CALLS_BEHIND = 32  # steps that the I/O thread may be behind before the loop waits for it


class Termination(NamedTuple):
    """How every open choice ends when the engine does. `suspects` end with `engine_stalled` and `suspicion`: a client
    that sends one of them again must know that it may be the cause."""

    reason: str
    code: str
    message: str
    suspects: Collection[int] = ()
    suspicion: str = ""


class EngineIO:
    """The parts of the I/O thread. Methods may be called from any thread unless they say otherwise."""

    def __init__(
        self,
        config: Config,
        lifecycle: Lifecycle,
        card: ModelCard,
        engine: EngineRef,
        shutdown: Shutdown,
        tracing: Tracing | None,
    ) -> None:
        """Raises AddressTaken and ConfigError: the sockets are bound here."""
        self._lifecycle = lifecycle
        self._status_interval_s = config.wire.status_interval_s
        self._status_topic = b"status." + lifecycle.engine.encode()
        self._status_due_s = 0.0
        self._ended = False  # every choice was ended: what the loop still posts comes too late
        self.counters = Counters()
        endpoint = Endpoint(config)
        self._thread = IOThread(endpoint, lifecycle, on_crash=shutdown.crash)
        call = self._thread.call
        self.lost_connections = LostConnections(endpoint)
        self._texts = TextService(card.files, call)
        self._grammars = GrammarService(card.files, call, config.limits)
        self._replay = GrammarReplay(call)
        self.publisher = Publisher(
            counters=self.counters,
            make_text=self._texts.stream,
            stop=engine.stop_choice,
            resume_ttl_s=config.wire.resume_ttl_s,
            log_requests=config.log.requests,
            on_end=None if tracing is None else partial(record_choice, tracing, card.name),
        )
        self._adapters = AdapterService(self.publisher, call)
        self._profiler = Profiler(lifecycle.clock, call)
        self._kv_events = KVEventPublisher(config.engine.name, card.name, self._thread.publish, self._adapters.names)
        self._stats = StatsReporter(config, lifecycle, card, engine, self.publisher, self.counters)
        self.intake = Intake(
            config,
            lifecycle,
            card,
            engine,
            self.publisher,
            self.counters,
            self._texts,
            self._grammars,
            self._replay,
            self._adapters,
        )
        operations = AdminOperations(
            lifecycle,
            shutdown,
            engine,
            self.publisher,
            self._adapters,
            self._grammars,
            self._profiler,
            self._stats,
            call,
        )
        self.connections = Connections(
            config,
            lifecycle,
            card,
            self.intake,
            self.publisher,
            self.counters,
            self._adapters.names,
            operations.table,
            self._thread.send,
        )

    # -- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start(self.connections.receive, self._tick, self._kv_events.replay)

    def prepare_grammars(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Begin with what a large vocabulary needs before its first grammar. In the loop's thread, while loading."""
        self._grammars.prepare(vocab_size, eos_token_ids)

    def wait_for_text(self) -> None:
        """Return when the tokenizer and the engine's part of the grammars are ready, or have failed."""
        self._texts.wait()
        self._grammars.wait()

    def call_loaded(
        self,
        info: ModelInfo,
        loop: EngineLoop,
        adapters: AdapterStore | None,
        make_recorder: MakeRecorder | None,
        on_ready: Callable[[], None],
    ) -> None:
        """Have the loaded model announced to clients, then `on_ready` called in the I/O thread."""

        def on_loaded() -> None:
            self._adapters.begin(adapters, loop)
            self._profiler.begin(make_recorder, loop)
            self.connections.announce(info)
            on_ready()

        self._thread.call(on_loaded)

    def post(self, output: LoopOutput) -> None:
        """Have the output of a step published. Waits while the I/O thread is far behind."""
        self._thread.call(lambda: self._publish(output))
        self._thread.catch_up(MAX_CALLS_BEHIND)

    def broadcast_state(self) -> None:
        """Have the state and the progress sent to every connection."""
        now = self._lifecycle.clock()
        self._thread.call(lambda: self.connections.broadcast_state(now))

    def read_stats(self) -> dict[str, Any] | None:
        """The statistics; None when the I/O thread does not answer in time."""
        return self._thread.ask(self._stats.stats)

    def is_drained(self) -> bool:
        """Whether every choice has ended and every reachable client has got everything."""

        def is_drained() -> bool:
            return not self.publisher.num_open and not self.intake.has_unanswered and self.connections.all_sent

        return bool(self._thread.ask(is_drained))

    def terminate(self, termination: Termination) -> None:
        """Have every open choice ended, without the loop's help."""
        self._thread.call(lambda: self._terminate(termination))

    def goodbye(self, reason: str) -> None:
        """Have GOODBYE sent to every connection."""
        self._thread.call(lambda: self.connections.goodbye(reason, self._lifecycle.clock()))

    def close(self, timeout_s: float) -> None:
        """End the helpers' threads and the I/O thread, and close the sockets."""
        self._texts.close()
        self._grammars.close()
        self._replay.close()
        self._thread.stop(timeout_s)

    # -- in the I/O thread -------------------------------------------------------------------------------------------

    def _publish(self, output: LoopOutput) -> None:
        if self._ended:
            return
        self.publisher.publish(output.output, output.time_s)
        if output.num_scheduled_tokens:
            self.counters.step_tokens.observe(output.num_scheduled_tokens)
        if output.kv_events:
            self._kv_events.publish(output.kv_events)

    def _tick(self, now: float) -> float:
        stdio.retry()
        self.connections.broadcast_state(now)
        self.connections.tick(now)
        self._adapters.tick()
        self._profiler.tick(now)
        self.lost_connections.tick(now, busy=self.publisher.num_open > 0)
        if now >= self._status_due_s:
            self._status_due_s = now + self._status_interval_s
            self._thread.publish([self._status_topic, *codec.encode(Status(self._stats.status()))])
        return min(self._status_due_s, now + (RETRY_S if self.connections.has_backlog else TICK_S))

    def _terminate(self, termination: Termination) -> None:
        self._ended = True
        now = self._lifecycle.clock()
        error = InferEngineError(termination.code, termination.message)
        self.intake.refuse_waiting(error)
        rows = [
            Finished(
                uid=log.uid,
                reason=termination.reason,
                detail=(
                    ("engine_stalled", termination.suspicion)
                    if log.uid in termination.suspects
                    else (termination.code, termination.message)
                ),
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
