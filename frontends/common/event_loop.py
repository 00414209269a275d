"""What has news, taken together when the event loop comes round: one callback of the loop instead of one for each.

Requests that begin: a few in each round of the event loop, in the order of their coming.

Beginning costs more than anything later (a template, a prompt to tokenize, a stream to open). A thousand requests that
come at once would have the loop to themselves for seconds; like this the streams, the figures and whoever asks
whether the process is alive come in between.

uvicorn's server, with its own way to accept connections: many in a round of the event loop.

libuv accepts one connection in a round, which on a quiet loop is right and on a busy one is not: behind 500 clients
that came at once, with streams being written in every round, the next one waited five seconds to be seen.

Every connection is counted from the moment it is accepted, and closed when its time is over: `connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn

from frontends.common.connection_limits import ConnectionLimits, ConnectionTracker, RefusalMetrics, TrackedConnection
from frontends.common.http_protocol import HttpProtocol
from inferengine.process.system import missed_s

SLICE_S = 0.005


class Reader(Protocol):
    """Something whose news waits to be taken."""

    def take_news(self) -> None:
        """Take the news. Raises nothing."""


class Coalescer:
    """While a message of the engine is read, streams are noted; when it is done, each has its turn. A turn in which
    much is to be said is cut: connections, requests and figures come in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._is_planned = False

    def add(self, reader: Reader) -> None:
        self._readers.append(reader)
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_planned = False
        readers, self._readers = self._readers, []
        clock = self._clock
        end_s = clock() + SLICE_S
        for number, reader in enumerate(readers, 1):
            reader.take_news()
            if clock() > end_s and number < len(readers):
                self._readers = readers[number:] + self._readers
                self._plan()
                return


MOST_PER_ROUND = 4


class AdmissionThrottle:
    """Requests wait in it for their beginning."""

    def __init__(self, most_per_round: int = MOST_PER_ROUND) -> None:
        self._most = most_per_round
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_planned = False

    async def wait(self) -> None:
        """Return when it is this request's turn; at once where there is no crowd."""
        self._plan()
        if self._num_begun < self._most and not self._waiting:
            self._num_begun += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._num_begun = 0
        while self._waiting and self._num_begun < self._most:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its client has gone
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            self._plan()


logger = logging.getLogger(__name__)

ACCEPTS_PER_ROUND = 16  # more would leave nothing to the other workers of the same socket
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NO_ROOM_WAIT_S = 1.0
TICK_S = 0.1  # uvicorn's
TICKS_PER_SWEEP = 10


class Server(uvicorn.Server):
    """For listening sockets only. Everything but accepting and ending connections is uvicorn's."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits | None = None, refusals: RefusalMetrics | None = None
    ) -> None:
        config.http = HttpProtocol
        super().__init__(config)
        self._limits = limits or ConnectionLimits()
        self._refusals = refusals or RefusalMetrics("inferengine_http")
        self.num_signals = 0  # SIGTERM and SIGINT since `serve` began
        self._next_tick_s = math.inf
        self._is_sweep_due = self._is_sweep_postponed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.connections = ConnectionTracker(self._limits, self._refusals, time.monotonic)
        acceptors = [Acceptor(self, listener, self.connections) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # closed as theirs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down, as uvicorn does, and count the signal."""
        self.num_signals += 1
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second.

        After a time in which this process did not run (SIGSTOP), what clients sent meanwhile has not been read when
        the first timers come: connections are judged at the next tick."""
        now = time.monotonic()
        paused_s = missed_s(now, self._next_tick_s)
        self._next_tick_s = now + TICK_S
        self._is_sweep_due = self._is_sweep_due or counter % TICKS_PER_SWEEP == 0
        if self._is_sweep_due and paused_s and not self._is_sweep_postponed:
            self._is_sweep_postponed = True
        elif self._is_sweep_due:
            self._is_sweep_due = self._is_sweep_postponed = False
            self.connections.sweep()
        return await super().on_tick(counter)


class Acceptor:
    """Accepts from one socket until it is closed. What uvicorn needs of an asyncio.Server."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, connections: ConnectionTracker) -> None:
        self._server = server
        self._listener = listener
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(server.config.backlog)
        self._listen()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Nothing of it goes on by itself."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                logger.error("no connection can be accepted: %s", error.strerror)
                has_room = self._connections.make_room(ACCEPTS_PER_ROUND)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.0 if has_room else NO_ROOM_WAIT_S, self._listen)
                return
            accepted.setblocking(False)
            connection = self._connections.admit(address)
            task = self._loop.create_task(self._serve(accepted, connection))
            connection.close = task.cancel
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, connection: TrackedConnection) -> None:
        """Hand it to its protocol, after the handshake of TLS where there is one."""
        config = self._server.config
        timeout = self._connections.limits.header_s if config.ssl else None
        try:
            with contextlib.suppress(OSError):  # it has gone already, or speaks no TLS
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(connection), accepted, ssl=config.ssl, ssl_handshake_timeout=timeout
                )
        finally:
            if connection.transport is None:  # there was no connection, so none is lost later
                accepted.close()
                self._connections.lost(connection)

    def _protocol(self, connection: TrackedConnection) -> asyncio.Protocol:
        server = self._server
        protocol = HttpProtocol(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)
        protocol.connection, protocol.tracker = connection, self._connections
        return protocol
