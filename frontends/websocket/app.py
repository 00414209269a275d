"""The ASGI application: the socket at /v1/ws, the chat page at /, and /health and /ready for whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from frontends.common.auth import KeyRing, read_keys
from frontends.common.engine_stats import CONTENT_TYPE, metrics_text, stats_document
from frontends.common.errors import error_object
from frontends.common.hosts import AllowedHosts, HostMiddleware, public_ports, read_names
from frontends.common.model import ModelContext
from frontends.common.quotas import Quotas
from frontends.common.resumable.registry import Registry
from frontends.websocket.codec import JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL, choose_codec
from frontends.websocket.connection import Connection
from frontends.websocket.engine_state import EngineState
from frontends.websocket.handshake import may_connect, presented_key, read_origins, without_keys
from frontends.websocket.metrics import SocketMetrics
from frontends.websocket.request import Caller, Services
from frontends.websocket.static_files import Pages
from inferengine.client import EnginePool
from inferengine.config import Config, engine_addresses
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Tracing, make_tracing
from inferengine.wire.curve import client_keys

logger = logging.getLogger(__name__)

SOCKET_PATH = "/v1/ws"
_IDLE_LOOK_S = 0.05
_FIRST_WORD_S = 0.5  # that a new front end waits for an engine before it opens
_READY_WAIT_S, _RETRY_S = 3600.0, 0.5


class Shared(NamedTuple):
    """What all workers of a front end have in common, made before the first of them."""

    keys: KeyRing
    quotas: Quotas
    metrics: SocketMetrics

    def choose_worker(self, worker: int) -> None:
        """After the fork: count as this one."""
        self.quotas.choose_worker(worker)
        self.metrics.choose_worker(worker)


def make_shared(config: Config) -> Shared:
    keys = read_keys(config.auth.keys_file)
    return Shared(keys, Quotas(keys.keys, num_workers=config.ws.workers), SocketMetrics(config.ws.workers))


class WebsocketFrontEnd:
    """All sockets of this process and the engine behind them. `lifespan` must run around everything."""

    def __init__(
        self,
        config: Config,
        addresses: Sequence[str] = (),
        *,
        shared: Shared | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`addresses` of the engines; empty: those of the configuration. `shared`: with the other workers, where there
        are any. `tracing` None: as the configuration says."""
        shared = shared or make_shared(config)
        self._config = config
        self._origins = read_origins(config.ws.origins)
        self._hosts = read_names("ws", config.ws.allowed_hosts)
        self._engine = EnginePool(
            list(addresses) or engine_addresses(config),
            role="ws",
            policy=config.wire.load_balancing,
            curve=client_keys(config),
            resume_wait_s=config.wire.resume_wait_s,
        )
        self.keys, self._quotas, self._metrics = shared
        self._engine.on_resumed = self._metrics.resumed.observe
        models = ModelContext(self._engine)
        registry = Registry(self._engine, config.wire.resume_ttl_s)
        self._tracing = tracing or make_tracing(config.trace, "inferengine-ws")
        self._services = Services(self._engine, models, registry, config, self._tracing)
        self.view = EngineState(self._engine, config, models)
        self._connections: set[Connection] = set()

    def app(self, listeners: Sequence[socket.socket] = ()) -> ASGIApp:
        """`listeners`: what it is served on."""
        pages = Pages()
        app = Starlette(
            routes=[
                WebSocketRoute(SOCKET_PATH, self.socket),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/stats", self.stats),
                Route("/metrics", self.metrics),
                Route("/", pages.serve),
                Route("/{path:path}", pages.serve),
            ],
            lifespan=self.lifespan,
        )
        hosts = AllowedHosts("ws", self._hosts, self._origins, public_ports(listeners))
        return HostMiddleware(app, hosts, self.keys, self._metrics.refusals)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        for client in self._engine.clients:
            client.start()  # in the background: this front end may start before its engine
        with contextlib.suppress(InferEngineError):  # who has waited at the door finds the engine that is there
            await self._engine.connect(_FIRST_WORD_S)
        tasks = [asyncio.create_task(self.view.watch(self._tell_state)), asyncio.create_task(self._fetch_model())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._services.registry.close()
            await self._engine.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    def beat(self) -> None:
        """The event loop turns."""
        self._metrics.cells.beat(time.monotonic())

    @property
    def num_requests(self) -> int:
        """Requests that some socket is reading."""
        return sum(connection.num_requests for connection in self._connections)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let the open ones end, at most for `timeout_s`."""
        self.view.draining = True
        for connection in self._connections:
            connection.draining = True
        self._tell_state()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_requests:
                    await asyncio.sleep(_IDLE_LOOK_S)

    # -- routes ------------------------------------------------------------------------------------------------------

    async def socket(self, websocket: WebSocket) -> None:
        headers = websocket.headers
        if not may_connect(headers.get("origin"), headers.get("host"), self._origins, self._hosts):
            text = "This page's origin may not open the socket. The operator can list it in ws.origins."
            await websocket.send_denial_response(PlainTextResponse(text, 403))
            return
        try:
            key = self.keys.identify(presented_key(headers, websocket.scope["subprotocols"]))
        except InferEngineError as error:
            self._metrics.refused()
            await websocket.send_denial_response(PlainTextResponse(error.message, error.http_status))
            return
        if self._metrics.num_open >= self._config.ws.max_sockets:
            text = f"{self._metrics.num_open} sockets are open, the most that may be."
            self._metrics.refused()
            await websocket.send_denial_response(PlainTextResponse(text, 503, {"Retry-After": "1"}))
            return
        codec = choose_codec(without_keys(websocket.scope["subprotocols"]))
        if codec is None:
            text = f"Speak one of the subprotocols {JSON_SUBPROTOCOL} and {MSGPACK_SUBPROTOCOL}, or name none for JSON."
            await websocket.send_denial_response(PlainTextResponse(text, 400))
            return
        await websocket.accept(subprotocol=codec.subprotocol if websocket.scope["subprotocols"] else None)
        receive, send = websocket._receive, websocket._send  # without Starlette's checks on each message
        address = None if websocket.client is None else websocket.client.host
        caller = Caller(key, self._quotas, SOCKET_PATH, address, headers.get("traceparent", ""))
        connection = Connection(receive, send, codec, self._services, self.view, self._config, caller)
        connection.draining = self.view.draining
        self._connections.add(connection)
        opened_s = self._metrics.opened()
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._metrics.closed(opened_s)

    async def health(self, _: Request) -> JSONResponse:
        """This process answers; what the engine does is told beside it, and the sockets of all workers."""
        return JSONResponse({"status": "ok", "engine": self.view.engine_state, "sockets": self._metrics.num_open})

    async def stats(self, request: Request) -> JSONResponse:
        """The engine's live figures, as the HTTP front end gives them, and the sockets of all workers and of this."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        own = {"sockets": len(self._connections), "worker": self._metrics.cells.worker}
        return JSONResponse({**await stats_document(self._engine), "sockets": self._metrics.num_open, "ws": own})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: the engine's figures and those of all workers' sockets."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        text = await metrics_text(self._engine, self._metrics)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _refusal(self, request: Request) -> JSONResponse | None:
        try:
            self.keys.identify(presented_key(request.headers, ()))
        except InferEngineError as error:
            return JSONResponse({"error": error_object(error)}, error.http_status, {"WWW-Authenticate": "Bearer"})
        return None

    async def ready(self, _: Request) -> JSONResponse:
        """200 only when a request sent now would be taken."""
        state = self.view.engine_state
        return JSONResponse({"ready": state == "READY", "engine": state}, 200 if state == "READY" else 503)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _fetch_model(self) -> None:
        """Have the tokenizer at hand before the first request asks for it."""
        while self._services.models.served is None:
            try:
                await self._engine.wait_ready(_READY_WAIT_S)
                await self._services.models.get()
            except InferEngineError as error:
                logger.debug("the model is not at hand yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    def _tell_state(self) -> None:
        facts = self.view.facts()
        for connection in self._connections:
            connection.tell(facts)
