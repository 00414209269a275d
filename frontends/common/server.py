"""The server of one worker: uvicorn with its own acceptor and limits of connections.

libuv accepts one connection in each round of the event loop. That is too few on a busy loop: behind 500 simultaneous
clients and streams written in every round, the next client waited five seconds. `Acceptor` accepts many in a round, and
leaves connections to workers that have fewer: the first one to wake would take a whole burst.

`Acceptor` is put into uvicorn's list of servers. `HttpProtocol` overrides the parser's callbacks, which record the
state of the connection (connection_limits.py), and reads `cycle`. Neither is public API: pyproject.toml bounds
uvicorn's version, and tests/frontends/common/test_uvicorn_internals.py checks what is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import math
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
from frontends.common.piece_reader import PIECE, PieceReader
from inferengine.errors import InferEngineError
from inferengine.process.system import missed_s

logger = logging.getLogger(__name__)

ACCEPTS_PER_ROUND = 16
MOST_AHEAD = 4  # connections more than the worker with the fewest has, beyond which the others come first
OTHERS_FIRST_S = 0.001  # for them to take the next connection; where none does, it is taken here
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NO_ROOM_WAIT_S = 1.0
TICK_S = 0.1  # uvicorn's
TICKS_PER_SWEEP = 10
MOST_HEAD_BYTES = 64 * 1024  # of a request's head, and of trailers: as http.max_header_bytes unless it is set
MOST_BEHIND = 8  # requests behind the one that is answered, beyond which nothing is read from a connection
MOST_IGNORED_BYTES = 64 * 1024 * 1024  # of a body that come behind its request's answer before the connection is closed
OFFER = (b"upgrade", b"http2-settings")  # headers of an offer to speak another protocol
PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})  # what monitoring requests


class FrontendServer(uvicorn.Server):
    """uvicorn's server for listening sockets, with its own way to accept and end connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits | None = None,
        refusals: RefusalMetrics | None = None,
        *,
        max_head_bytes: int = MOST_HEAD_BYTES,
    ) -> None:
        """`max_head_bytes`: of a request's head, beyond which the rest is not read."""
        config.http = HttpProtocol
        super().__init__(config)
        self._limits = limits or ConnectionLimits()
        self.max_head_bytes = max_head_bytes
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

    def __init__(self, server: FrontendServer, listener: socket.socket, connections: ConnectionTracker) -> None:
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

    def _listen_after_others(self) -> None:
        """Listen again, and take a connection that no other worker took meanwhile."""
        if not self._is_closed:
            self._listen()
            self._accept(num_left=1)

    def _accept(self, num_left: int = 0) -> None:
        """Accept what waits. `num_left`: how many of it other workers had time to take."""
        for number in range(ACCEPTS_PER_ROUND):
            if number >= num_left and self._connections.refusals.num_ahead() >= MOST_AHEAD:
                self._loop.remove_reader(self._listener)
                self._loop.call_later(OTHERS_FIRST_S, self._listen_after_others)
                return
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
        protocol.max_head_bytes = server.max_head_bytes
        return protocol


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which records the state of its connection for the tracker."""

    connection: TrackedConnection
    tracker: ConnectionTracker
    max_head_bytes: int

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unanswered: list[RequestResponseCycle] = []  # in the order of their requests
        self._pieces = PieceReader(self._parse, self._may_parse)
        self._num_head_bytes = 0  # received since the last body or end of a head, at most: of a head, or of trailers
        self._num_ignored_bytes = 0  # of a body whose request has been answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Record the transport. A connection admitted as a probe gets ProbesOnly."""
        super().connection_made(transport)
        self.flow = PieceFlow(transport, self._pieces.go_on)
        self._pieces.begin(transport)
        if self.connection.is_probe:
            self.app: Any = ProbesOnly(self.app)
        self.connection.answer = self._answer
        self.tracker.made(self.connection, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop tracking the connection, and tell every request that its client has gone. uvicorn tells the last one
        alone: of two that came at once the first, which is being answered, would go on for nobody."""
        self._pieces.end()
        self.tracker.lost(self.connection)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.release()

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to the websocket protocol; not behind a request whose answer it would write into."""
        if self._unanswered:
            self.transport.close()
        else:
            super().handle_websocket_upgrade()

    def release(self) -> None:
        """Drop everything that refers back to this protocol: HTTP is over on this connection.

        Without this each connection would be a cycle of some 20 objects and 4 KiB, which only the garbage collector
        frees, and after a reset the timer of uvicorn's keep-alive would hold it for that time. The collector runs
        rarely here: a storm of connections would stay in memory."""
        self._unset_keepalive_if_required()
        self._pieces.end()
        self.connection.answer = None
        self.connection.close = None
        self.parser = None  # type: ignore[assignment]  # uvicorn does so too
        self.cycle = None  # type: ignore[assignment]  # its task, if it still runs, has its own reference
        self.pipeline.clear()  # uvicorn starts nothing more on a closed connection
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, or a first piece of it."""
        self._pieces.take(data)

    def _may_parse(self) -> bool:
        return not self.flow.read_paused and len(self.pipeline) <= MOST_BEHIND

    def _parse(self, data: bytes) -> None:
        """Parse a piece, and refuse a head or trailers that have become too large. A head that is a little too large is
        refused once it is whole."""
        self._num_head_bytes += len(data)
        self._parse_http(data)
        if self._num_head_bytes > self.max_head_bytes + PIECE and not self.transport.is_closing():
            error = InferEngineError("request_too_large", f"The headers must have at most {self.max_head_bytes} bytes.")
            self._answer(error, http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            self.transport.close()

    def _parse_http(self, data: bytes) -> None:
        """Parse a piece. An offer to speak another protocol than websockets (Java's client offers HTTP/2 with its
        first request) is not taken: the request is parsed again without it, because the parser drops its body."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if not self._is_declined:
                        self.handle_upgrade()
                        return
                    data = self._head_without_offer() + data[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)  # the old one takes nothing behind "close"
                    with contextlib.suppress(AttributeError):  # of httptools before 0.6.3; as uvicorn sets it
                        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def handle_upgrade(self) -> None:
        """Give the connection to the websocket protocol, or end it where there is none, as for CONNECT."""
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self.transport.close()

    @property
    def _is_declined(self) -> bool:
        """Whether the head that was just read offers a protocol that this server does not speak."""
        offers = any(name == b"upgrade" for name, _ in self.headers)
        return offers and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _head_without_offer(self) -> bytes:
        """Return the head that was just read, without the offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(word for word in value.split(b",") if word.strip().lower() not in OFFER)
            if name not in OFFER:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Record that the head of a request is being received."""
        self.connection.phase = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Count the request, and record that its body is being received."""
        if self.parser.should_upgrade() and self._is_declined:
            return  # it comes again
        self._num_head_bytes = self._num_ignored_bytes = 0
        connection = self.connection
        connection.phase = BODY
        connection.num_waiting += 1
        connection.num_requests += 1
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)
            if self.parser.get_http_version() == "1.0":
                self.cycle.__class__ = UnchunkedCycle  # uvicorn asks nobody which class to make
            elif not self.cycle.keep_alive:
                self.cycle.__class__ = LastCycle
            if isinstance(self.cycle, LastCycle):
                self.cycle.may_read_on = not connection.is_probe
        if 0 < len(self.pipeline) <= MOST_BEHIND:  # uvicorn has stopped to read, and would not see the client leave
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Count the bytes received of the body. Behind an early answer they are read, so that the answer arrives; not
        without end."""
        self._num_head_bytes = 0
        self.connection.num_bytes += len(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._num_ignored_bytes += len(body)
            if self._num_ignored_bytes > MOST_IGNORED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request has been received in full."""
        if self.parser.should_upgrade() and self._is_declined:
            return
        self._num_head_bytes = 0
        self.connection.phase = IDLE
        super().on_message_complete()
        if self._is_over:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Count one request fewer that waits for its answer."""
        self.connection.num_waiting -= 1
        if self._unanswered:  # empty where the connection has ended
            del self._unanswered[0]
        super().on_response_complete()
        self._pieces.go_on()  # the queue is shorter than when uvicorn asked for it

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as every other error is written."""
        if not self._is_over:
            self._write(InferEngineError("invalid_request", msg))
        self.transport.close()

    @property
    def _is_over(self) -> bool:
        """Whether the last answer has been written and the rest of its request's body is only read."""
        return isinstance(self.cycle, LastCycle) and self.cycle.reads_on

    def _answer(self, error: InferEngineError, status: http.HTTPStatus | None = None) -> None:
        """Write a last answer, unless another one is being written. `status`: in place of the error's."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self.connection.phase == HEAD):
            self._write(error, status)

    def _write(self, error: InferEngineError, status: http.HTTPStatus | None = None) -> None:
        """Write an error in the shape of the path's API, as far as the path has arrived. `status`: in place of the
        error's."""
        path, headers = "", self.headers or []
        with contextlib.suppress(httptools.HttpParserError, AttributeError, UnicodeDecodeError):
            path = httptools.parse_url(self.url).path.decode("ascii")  # no url: nothing of the request was read
        answer, body = early_refusal(error, path, headers)
        status = status or http.HTTPStatus(error.http_status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in answer)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))


class PieceFlow(FlowControl):
    """uvicorn's flow control, which parses what is left of the last read before it reads more."""

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def resume_reading(self) -> None:
        """Go on."""
        if self.read_paused:
            self.read_paused = False
            self._go_on()


class LastCycle(RequestResponseCycle):
    """The answer behind which the connection ends. One that comes before the whole body (401, 413) is lost where the
    connection is closed at once: the system resets it, and many clients read nothing before they have sent all. So the
    rest of the body is read first: up to MOST_IGNORED_BYTES, and while it makes the progress that bodies must make."""

    may_read_on = True
    reads_on = False

    async def send(self, message: Any) -> None:
        """Send as uvicorn does, which would close the connection, but end only what is sent if the body still comes."""
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last and self.more_body and self.may_read_on and not self.keep_alive and not self.disconnected:
            self.keep_alive = self.reads_on = True
        await super().send(message)
        if self.reads_on and self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()


class UnchunkedCycle(LastCycle):
    """The answer to a request of HTTP/1.0, which has no chunks: a body of unknown length ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send as uvicorn does, which would send chunks, but the bytes alone."""
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self._has_length = False
        elif message["type"] == "http.response.body" and not self._has_length:
            is_last = not message.get("more_body", False)
            self.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        await super().send(message)


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
