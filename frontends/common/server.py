"""uvicorn's server with its own acceptor, and a protocol that records the state of each connection.

libuv accepts one connection in each round of the event loop. That is too few on a busy loop: behind 500 simultaneous
clients and streams written in every round, the next client waited five seconds. `Acceptor` accepts many in a round.
`ConnectionTracker` counts each connection from its acceptance and closes it at its time limits; the callbacks of
uvicorn's HTTP parser record its state, with one assignment each.

`Acceptor` is put into uvicorn's list of servers, and `HttpProtocol` overrides the parser's callbacks and reads `cycle`.
Neither is public API: pyproject.toml bounds uvicorn's version, and tests/frontends/common/test_uvicorn_internals.py
checks what is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import math
import socket
import time
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontends.common.connection_limits import (
    BODY,
    HEAD,
    IDLE,
    ConnectionLimits,
    ConnectionTracker,
    RefusalMetrics,
    TrackedConnection,
)
from frontends.common.errors import early_refusal
from inferengine.errors import InferEngineError
from inferengine.process.system import missed_s

logger = logging.getLogger(__name__)

ACCEPTS_PER_ROUND = 16  # with more, one worker would take all connections of the shared socket
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NO_ROOM_WAIT_S = 1.0
TICK_S = 0.1  # uvicorn's
TICKS_PER_SWEEP = 10
PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})  # what monitoring requests


class Server(uvicorn.Server):
    """uvicorn's server for listening sockets, with its own way to accept and end connections."""

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
        """Start as uvicorn does, but accept connections from `sockets` under the connection limits."""
        await super().startup([])
        self.connections = ConnectionTracker(self._limits, self._refusals, time.monotonic)
        acceptors = [Acceptor(self, listener, self.connections) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # closed as theirs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down, as uvicorn does, and count the signal."""
        self.num_signals += 1
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Sweep connections once a second. uvicorn calls this ten times a second.

        After a time in which this process did not run (SIGSTOP) timers come before the data that clients sent
        meanwhile is read, so the sweep waits for the next tick."""
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
    """Accepts connections from one socket until `close`. Has the methods of asyncio.Server that uvicorn calls."""

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
        """Stop accepting connections. The socket and accepted connections stay open."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once: nothing runs after `close`."""

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
        """Give a connection to its protocol, after the TLS handshake if there is one."""
        config = self._server.config
        timeout = self._connections.limits.header_s if config.ssl else None
        try:
            with contextlib.suppress(OSError):  # it was closed already, or does not speak TLS
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(connection), accepted, ssl=config.ssl, ssl_handshake_timeout=timeout
                )
        finally:
            if connection.transport is None:  # no protocol was made, so `connection_lost` is never called
                accepted.close()
                self._connections.lost(connection)

    def _protocol(self, connection: TrackedConnection) -> asyncio.Protocol:
        server = self._server
        protocol = HttpProtocol(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)
        protocol.connection, protocol.tracker = connection, self._connections
        return protocol


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which records the state of its connection for the tracker."""

    connection: TrackedConnection
    tracker: ConnectionTracker

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Record the transport. A connection admitted as a probe gets ProbesOnly."""
        super().connection_made(transport)
        if self.connection.is_probe:
            self.app: Any = ProbesOnly(self.app)
        self.connection.answer = self._answer
        self.tracker.made(self.connection, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop tracking the connection."""
        self.tracker.lost(self.connection)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Record that the head of a request is being received."""
        self.connection.phase = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Count the request, and record that its body is being received."""
        connection = self.connection
        connection.phase = BODY
        connection.num_waiting += 1
        connection.num_requests += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the bytes received of the body."""
        self.connection.num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request has been received in full."""
        self.connection.phase = IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count one request fewer that waits for its answer."""
        self.connection.num_waiting -= 1
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as every other error is written."""
        self._write(InferEngineError("invalid_request", msg))
        self.transport.close()

    def _answer(self, error: InferEngineError) -> None:
        """Write a last answer, unless another one is being written."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self.connection.phase == HEAD):
            self._write(error)

    def _write(self, error: InferEngineError) -> None:
        """Write an error in the shape of the path's API, as far as the path has arrived."""
        path, headers = "", self.headers or []
        with contextlib.suppress(httptools.HttpParserError, AttributeError, UnicodeDecodeError):
            path = httptools.parse_url(self.url).path.decode("ascii")  # no url: nothing of the request was read
        answer, body = early_refusal(error, path, headers)
        status = http.HTTPStatus(error.http_status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in answer)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))


class ProbesOnly:
    """The application for connections above the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer probes, and refuse everything else with `overloaded`."""
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        error = InferEngineError("overloaded", "This server has as many connections as it may.", retry_after_s=1.0)
        headers, body = early_refusal(error, scope["path"], scope["headers"])
        await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
