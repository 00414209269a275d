"""EngineIO: the I/O thread with its parts, constructed in the order in which they need each other.

The thread owns the sockets. It sleeps until a message, a call from another thread (the output of a step, for one) or a
timer is there. Calls go before messages, and both are bounded in each turn: a flood of messages delays no tokens, and a
flood of steps delays no answers.

endpoint, IOThread                 sockets, and the thread that owns them
text, grammars, replay             work in threads of their own; results come back to the I/O thread
publisher                          output logs, and one STEP message per connection and step
adapters, profiler                 operations that take longer than an answer
intake                             SUBMIT, ATTACH, CANCEL
connections                        every message of every client, leases, credit
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, TypeVar

import zmq

from inferengine.config import Config
from inferengine.core.executor import AdapterStore
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.engine.counters import Counters
from inferengine.engine.io.connections import TICK_S, Connections
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.intake import Intake
from inferengine.engine.io.lost_connections import LostConnections
from inferengine.engine.io.publisher import Publisher, SendResult, record_choice
from inferengine.engine.io.socket_files import SocketFiles
from inferengine.engine.kv_events import KVEventPublisher
from inferengine.engine.lifecycle import Lifecycle, Shutdown
from inferengine.engine.loop import EngineRef, Loop, LoopOutput
from inferengine.engine.model_info import ModelCard
from inferengine.engine.services.adapters import AdapterService
from inferengine.engine.services.admin import AdminOperations
from inferengine.engine.services.preparation import GrammarReplay, GrammarService, TextService
from inferengine.engine.services.profiler import MakeRecorder, Profiler
from inferengine.engine.stats import StatsReporter
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Tracing
from inferengine.process import stdio
from inferengine.wire import messages, sockets
from inferengine.wire.messages import Frames, ModelInfo, Status

logger = logging.getLogger(__name__)

MAX_CALLS_BEHIND = 32  # steps that the I/O thread may be behind before the loop waits for it
MESSAGES_PER_TURN = 128
MESSAGES_BESIDE_CALLS = 16  # of them while calls wait: tokens must not wait for every message
RETRY_S = 0.02  # while a full pipe keeps an answer waiting
LINGER_MS = 1000
ANSWER_S = 1.0
CATCH_UP_S = 1.0
SHARED_BYTES = 65_536  # frames from this size on go out as they lie in memory: for smaller ones a copy is quicker
NOW = int(zmq.NOBLOCK)
NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

T = TypeVar("T")
ReplayBatches = Callable[[int], list[Frames]]
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class IOThread:
    """A thread that owns the sockets, and runs the handlers of `start` and the functions passed to `call`."""

    def __init__(
        self,
        endpoint: Endpoint,
        lifecycle: Lifecycle,
        *,
        on_crash: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`on_crash` is called in the thread with the error that ends it."""
        self._endpoint = endpoint
        self._lifecycle = lifecycle
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._woken = False  # the descriptor is written and not read yet: whoever calls now need not write again
        self._lock = threading.Lock()  # guards the descriptor, which other threads write to
        self._receive: Callable[[list[bytes], float], None] = lambda frames, now: None
        self._tick: Callable[[float], float] = lambda now: now + TICK_S
        self._replay_batches: ReplayBatches = lambda start: []
        self._on_crash = on_crash

    def start(
        self,
        receive: Callable[[list[bytes], float], None],
        tick: Callable[[float], float],
        replay_batches: ReplayBatches = lambda start: [],
    ) -> None:
        """Start the thread. `receive` gets each message and the time; `tick` does what is due and returns when it is to
        be called next; `replay_batches` gives the numbered batches of KV events from a number on."""
        self._receive, self._tick, self._replay_batches = receive, tick, replay_batches
        self._thread = threading.Thread(target=self._run, name="inferengine-wire", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the I/O thread, soon. Does not block. In any thread."""
        self._calls.append(function)
        if self._woken:
            return
        with self._lock:
            if self._wake_fd >= 0:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def ask(self, question: Callable[[], T]) -> T | None:
        """Return the result of `question`, run in the I/O thread, which owns what it reads; None after a timeout."""
        answer: list[T] = []
        asked = threading.Event()

        def ask() -> None:
            answer.append(question())
            asked.set()

        self.call(ask)
        return answer[0] if asked.wait(ANSWER_S) else None

    def catch_up(self, most: int) -> None:
        """Wait while the I/O thread is more than `most` calls behind, so that it gets the interpreter.

        At most a second: a failed I/O thread must not stop the loop.
        """
        if len(self._calls) > most:
            done = threading.Event()
            self.call(done.set)
            done.wait(CATCH_UP_S)

    def send(self, routing_id: bytes, frames: Frames) -> SendResult:
        """Send a message to one client. Only in the I/O thread.

        Frame by frame: `send_multipart` looks at each of them twice. A ROUTER refuses a message at its first frame or
        not at all. Large frames are not copied: a client that reads nothing may ask for the model's files again and
        again, and thousands of answers may wait in its pipe."""
        send = self._endpoint.router.send
        try:
            send(routing_id, NOW_AND_MORE)
            for index in range(len(frames) - 1):
                send(frames[index], NOW_AND_MORE, len(frames[index]) < SHARED_BYTES)
            send(frames[-1], NOW, len(frames[-1]) < SHARED_BYTES)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return SendResult.GONE
            raise
        return SendResult.OK

    def publish(self, frames: Frames) -> None:
        """Send to all subscribers of the PUB socket. Only in the I/O thread."""
        self._endpoint.pub.send_multipart(frames, zmq.NOBLOCK)

    def publish_events(self, frames: Frames) -> None:
        """Send to all subscribers of KV events. Only in the I/O thread."""
        self._endpoint.events.send_multipart(frames, zmq.NOBLOCK)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after all calls so far, and close the sockets."""
        if self._thread is None:
            self._endpoint.close(0)
            self._close_wake_fd()
            return
        self.call(self._stop)
        self._thread.join(timeout_s)

    def _replay(self, replay: zmq.Socket[bytes]) -> None:
        """Answer requests `[connection, empty, first number]`: the batches of KV events from that number on, as they
        were published, then one with the number -1 and without topic and payload."""
        frames = replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        batches = self._replay_batches(int.from_bytes(frames[2], "big", signed=True))
        try:
            for batch in [*batches, [b"", END_OF_REPLAY, b""]]:
                replay.send_multipart([frames[0], b"", *batch], zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.warning("a router that asked for KV events does not read them")

    def _stop(self) -> None:
        self._stopping = True

    def _close_wake_fd(self) -> None:
        with self._lock:
            descriptor, self._wake_fd = self._wake_fd, -1
        os.close(descriptor)

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except BaseException as error:
            logger.critical("the I/O thread failed", exc_info=error)
            self._on_crash(error)
        finally:
            self._endpoint.close(LINGER_MS)
            self._close_wake_fd()

    def _turn_until_stopped(self) -> None:
        clock, router = self._lifecycle.clock, self._endpoint.router
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        replay = self._endpoint.replay
        if replay is not None:
            poller.register(replay, zmq.POLLIN)
        zap = self._endpoint.zap
        if zap is not None:
            poller.register(zap, zmq.POLLIN)
        due_s = clock()
        waiting = False
        while not self._stopping:
            wait_s = 0.0 if waiting or self._calls else max(0.0, due_s - clock())
            ready = dict(poller.poll(math.ceil(wait_s * 1e3)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._woken = False  # before the calls are taken: one that comes after them wakes this thread again
            for _ in range(len(self._calls)):  # what they post waits for the next turn
                self._calls.popleft()()
            if replay is not None and replay in ready:
                self._replay(replay)
            if zap is not None and zap in ready:
                self._endpoint.answer_zap()
            waiting = router in ready
            for number in range(MESSAGES_PER_TURN if waiting else 0):
                if not sockets.readable(router):
                    waiting = False
                    break
                self._receive(router.recv_multipart(zmq.NOBLOCK), clock())
                if self._calls and number + 1 >= MESSAGES_BESIDE_CALLS:
                    break
            self._lifecycle.io_turned_s = now = clock()
            if now >= due_s:
                due_s = self._tick(now)


class Termination(NamedTuple):
    """How open choices end when the engine ends.

    `suspects` end with `engine_stalled` and `suspicion`: a client that sends one again must know that it may be the
    cause.
    """

    reason: str
    code: str
    message: str
    suspects: Collection[int] = ()
    suspicion: str = ""


class EngineIO:
    """The I/O thread and its parts. Methods may be called from any thread unless they say otherwise."""

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
        self._placed_topic = messages.PLACED_TOPIC + lifecycle.engine.encode()
        self._status_due_s = 0.0
        self._ended = False  # every choice was ended: what the loop still posts comes too late
        self.counters = Counters()
        endpoint = Endpoint(config)
        self._thread = IOThread(endpoint, lifecycle, on_crash=shutdown.crash)
        call = self._thread.call
        self.lost_connections = LostConnections(endpoint)
        self.socket_files = SocketFiles(endpoint)
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
        self._kv_events = KVEventPublisher(
            config.engine.name,
            card.name,
            self._thread.publish_events,
            self._adapters.names,
            topic=config.cache.events_topic,
        )
        self._stats = StatsReporter(
            config, lifecycle, card, engine, self.publisher, self.counters, self._adapters.names
        )
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
        """Start the I/O thread: messages are answered from now on."""
        self._thread.start(self.connections.receive, self._tick, self._kv_events.replay)

    def prepare_grammars(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Start what grammars over a large vocabulary need first. Call it in the loop's thread, while loading."""
        self._grammars.prepare(vocab_size, eos_token_ids)

    def wait_for_text(self) -> None:
        """Return when the tokenizer and the engine's part of the grammars are ready, or have failed."""
        self._texts.wait()
        self._grammars.wait()

    def call_loaded(
        self,
        info: ModelInfo,
        loop: Loop,
        adapters: AdapterStore | None,
        make_recorder: MakeRecorder | None,
        on_ready: Callable[[], None],
    ) -> None:
        """Announce the loaded model to clients, then call `on_ready`, both in the I/O thread."""

        def on_loaded() -> None:
            self._adapters.begin(adapters, loop)
            self._profiler.begin(make_recorder, loop)
            self.connections.announce(info)
            on_ready()

        self._thread.call(on_loaded)

    def post(self, output: LoopOutput) -> None:
        """Publish the output of a step in the I/O thread. Waits while that thread is far behind."""
        self._thread.call(lambda: self._publish(output))
        self._thread.catch_up(MAX_CALLS_BEHIND)

    def broadcast_state(self) -> None:
        """Send the state and the loading progress to every connection."""
        now = self._lifecycle.clock()
        self._thread.call(lambda: self.connections.broadcast_state(now))

    def read_stats(self) -> dict[str, Any] | None:
        """Return the statistics; None if the I/O thread does not answer in time."""
        return self._thread.ask(self._stats.stats)

    def is_drained(self) -> bool:
        """Return whether every choice has ended and every reachable client has been sent everything."""
        return bool(self._thread.ask(lambda: self._all_ended and self.connections.all_sent))

    def is_delivered(self) -> bool:
        """Return whether every reachable client has acknowledged everything, after `is_drained`."""
        return bool(self._thread.ask(lambda: self._all_ended and self.connections.all_handled))

    def is_alone(self) -> bool:
        """Return whether no client is reachable: each has sent BYE, or its connection is lost."""
        return bool(self._thread.ask(lambda: self.connections.all_gone))

    def terminate(self, termination: Termination) -> None:
        """End every open choice, without the loop."""
        self._thread.call(lambda: self._terminate(termination))

    def goodbye(self, reason: str) -> None:
        """Send GOODBYE to every connection."""
        self._thread.call(lambda: self.connections.goodbye(reason, self._lifecycle.clock()))

    def close(self, timeout_s: float) -> None:
        """End the threads of all parts and the I/O thread, and close the sockets."""
        self._texts.close()
        self._grammars.close()
        self._replay.close()
        self._thread.stop(timeout_s)

    # -- in the I/O thread -------------------------------------------------------------------------------------------

    @property
    def _all_ended(self) -> bool:
        return not self.publisher.num_open and not self.intake.has_unanswered

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
        self.socket_files.tick(now)
        if now >= self._status_due_s:
            self._status_due_s = now + self._status_interval_s
            self._thread.publish([self._status_topic, *messages.encode(Status(self._stats.status()))])
            placed = self.intake.placements.take()
            if placed and self.counters.num_connections > 1:  # a single front end knows what it has sent
                self._thread.publish([self._placed_topic, *placed])
        return min(self._status_due_s, now + (RETRY_S if self.connections.has_backlog else TICK_S))

    def _terminate(self, termination: Termination) -> None:
        self._ended = True
        now = self._lifecycle.clock()
        error = InferEngineError(termination.code, termination.message)
        self.intake.refuse_waiting(error)
        rows = [
            log.row_without_core(
                termination.reason,
                (
                    ("engine_stalled", termination.suspicion)
                    if log.uid in termination.suspects
                    else (termination.code, termination.message)
                ),
                now,
            )
            for log in self.publisher.open_logs()
        ]
        self.publisher.publish(StepOutput(0, [], [], rows, -1), now)
