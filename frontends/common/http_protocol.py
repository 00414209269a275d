"""uvicorn's HTTP protocol, which tells what its connection does: the parser's own callbacks, an assignment each."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontends.common.connection_limits import BODY, HEAD, IDLE, ConnectionTracker, TrackedConnection
from frontends.common.hosts import refuse
from inferengine.errors import InferEngineError

PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})  # what whoever watches asks


class HttpProtocol(HttpToolsProtocol):
    """For uvicorn's `http` setting, behind `frontends.common.event_loop`."""

    connection: TrackedConnection
    tracker: ConnectionTracker

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.connection.is_probe:
            self.app: Any = ProbesOnly(self.app)
        self.connection.answer = self._answer
        self.tracker.made(self.connection, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.tracker.lost(self.connection)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self.connection.phase = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        connection = self.connection
        connection.phase = BODY
        connection.num_waiting += 1
        connection.num_requests += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.connection.num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.connection.phase = IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.connection.num_waiting -= 1
        super().on_response_complete()

    def _answer(self, answer: bytes) -> None:
        """Say why it ends, where that is not in the middle of another answer."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self.connection.phase == HEAD):
            self.transport.write(answer)


class ProbesOnly:
    """What is left of an application for connections that there is no room for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        error = InferEngineError("overloaded", "This server has as many connections as it may.", retry_after_s=1.0)
        await refuse(scope, send, error, [(b"retry-after", b"1"), (b"connection", b"close")])
