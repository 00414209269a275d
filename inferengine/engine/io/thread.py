"""IOThread: the thread that owns the sockets, and with them the connections, the intake and the publisher.

It sleeps until a message, a call from another thread (the output of a step, for one) or a timer is there. Calls go
before messages, and both are bounded in each turn: a flood of messages delays no tokens, and a flood of steps delays no
answers.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import zmq

from inferengine.engine.io.connection import SendResult
from inferengine.engine.io.connections import TICK_S
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.state import Lifecycle
from inferengine.wire import sockets
from inferengine.wire.codec import Frames

logger = logging.getLogger(__name__)

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
ReplayBatches = Callable[[int], list[tuple[int, bytes]]]


class IOThread:
    """Runs calls given to `call` and the handlers given to `start`, all in one thread."""

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
        """Have this called in the I/O thread, soon. Does not block; from any thread."""
        self._calls.append(function)
        if self._woken:
            return
        with self._lock:
            if self._wake_fd >= 0:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    def ask(self, question: Callable[[], T]) -> T | None:
        """Have `question` answered in this thread, which owns what it reads; None when that takes too long."""
        answer: list[T] = []
        asked = threading.Event()

        def ask() -> None:
            answer.append(question())
            asked.set()

        self.call(ask)
        return answer[0] if asked.wait(ANSWER_S) else None

    def catch_up(self, most: int) -> None:
        """Wait while this thread is more than `most` calls behind, so that a faster poster gives it the interpreter.
        For a second at most: a failed I/O thread must not stop the loop."""
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

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after what it was called for so far, and close the sockets."""
        if self._thread is None:
            self._endpoint.close(0)
            self._close_wake_fd()
            return
        self.call(self._stop)
        self._thread.join(timeout_s)

    def _replay(self, replay: zmq.Socket[bytes]) -> None:
        """`[connection, empty, first number]`: the batches of KV events from there on, then the number -1."""
        frames = replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        batches = self._replay_batches(int.from_bytes(frames[2], "big", signed=True))
        try:
            for number, payload in [*batches, (-1, b"")]:
                answer = [frames[0], b"", number.to_bytes(8, "big", signed=True), payload]
                replay.send_multipart(answer, zmq.NOBLOCK)
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
