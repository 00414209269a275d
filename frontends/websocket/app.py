"""The ASGI application: the socket at /v1/ws, the chat page at /, and /health, /ready, /stats and /metrics.

The chat page's files are served from memory, with headers that forbid everything else. The content security policy
allows this server's own scripts, styles, fonts and socket: no inline script or style, no other host, no frame around
the page. Only DOMPurify may turn text into HTML (trusted types).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from frontends.common.auth import (
    AllowedHosts,
    HostMiddleware,
    KeyRing,
    Quotas,
    public_ports,
    read_keys,
    read_names,
    read_origins,
)
from frontends.common.engine_stats import CONTENT_TYPE, metrics_text, stats_document
from frontends.common.errors import error_object
from frontends.common.model import ModelContext
from frontends.common.resumable import Registry
from frontends.websocket.connection import SOCKET_PATH, SocketEndpoint, SocketMetrics, presented_key
from frontends.websocket.engine_state import EngineState
from frontends.websocket.socket_request import Services
from inferengine.client import EnginePool
from inferengine.config import Config, engine_addresses, load_balancing
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Tracing, make_tracing
from inferengine.wire.curve import client_keys

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
_FIRST_CONNECT_S = 0.5  # for a connection to the engine before the first socket is accepted
_READY_WAIT_S, _RETRY_S = 3600.0, 0.5


class SharedState(NamedTuple):
    """State that all workers of this front end share, made before the first worker."""

    keys: KeyRing
    quotas: Quotas
    metrics: SocketMetrics

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork."""
        self.quotas.choose_worker(worker)
        self.metrics.choose_worker(worker)


def make_shared(config: Config) -> SharedState:
    """Read the API keys and make the shared counters."""
    keys = read_keys(config.auth.keys_file)
    return SharedState(keys, Quotas(keys.keys, num_workers=config.ws.workers), SocketMetrics(config.ws.workers))


class WebsocketFrontEnd:
    """All sockets of this process and the engine behind them. `lifespan` must run around everything."""

    def __init__(
        self,
        config: Config,
        addresses: Sequence[str] = (),
        *,
        shared: SharedState | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`addresses`: of the engines, empty for those of the configuration. `shared`: None for a single worker.
        `tracing`: None for that of the configuration."""
        shared = shared or make_shared(config)
        self._config = config
        self._engine = EnginePool(
            list(addresses) or engine_addresses(config),
            role="ws",
            policy=load_balancing(config),
            curve=client_keys(config),
            resume_wait_s=config.wire.resume_wait_s,
            discovery_s=config.wire.discovery_s,
            hedge_share=config.wire.hedge_share,
        )
        self.keys, quotas, self._metrics = shared
        self._engine.on_resumed = self._metrics.resumed.observe
        self._engine.on_event = self._metrics.resumed.count
        models = ModelContext(self._engine)
        registry = Registry(self._engine, config.wire.resume_ttl_s)
        self._tracing = tracing or make_tracing(config.trace, "inferengine-ws")
        self._services = Services(self._engine, models, registry, config, self._tracing)
        self.engine_state = EngineState(self._engine, config, models)
        self._socket = SocketEndpoint(self._services, self.engine_state, self.keys, quotas, self._metrics)

    def app(self, listeners: Sequence[socket.socket] = ()) -> ASGIApp:
        """Return the ASGI application. `listeners`: the sockets that it is served on."""
        static_files = StaticFiles()
        app = Starlette(
            routes=[
                WebSocketRoute(SOCKET_PATH, self._socket),
                Route(SOCKET_PATH, self._socket.explain, methods=["POST"]),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/stats", self.stats),
                Route("/metrics", self.metrics),
                Route("/", static_files.serve),
                Route("/{path:path}", static_files.serve),
            ],
            lifespan=self.lifespan,
        )
        ws = self._config.ws
        names, origins = read_names("ws", ws.allowed_hosts), read_origins("ws.origins", ws.origins)
        hosts = AllowedHosts("ws", names, origins, public_ports(listeners))
        return HostMiddleware(app, hosts, self.keys, self._metrics.refusals)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Connect to the engines, and close everything at the end."""
        self._engine.start()  # in the background: the front end may start before its engine
        with contextlib.suppress(InferEngineError):  # the first sockets find a running engine connected
            await self._engine.connect(_FIRST_CONNECT_S)
        tasks = [
            asyncio.create_task(self.engine_state.watch(self._send_state)),
            asyncio.create_task(self._fetch_model()),
        ]
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
        """Record that the event loop runs."""
        self._metrics.cells.beat(time.monotonic())

    @property
    def num_requests(self) -> int:
        """Open requests of all sockets."""
        return sum(connection.num_requests for connection in self._socket.connections)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let the open ones end, at most for `timeout_s`."""
        self.engine_state.draining = True
        self._send_state()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_requests:
                    await asyncio.sleep(_DRAIN_POLL_S)

    # -- routes ------------------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> JSONResponse:
        """Answer 200 while this process answers, with the engine's state and the open sockets of all workers."""
        return JSONResponse({"status": "ok", "engine": self.engine_state.state, "sockets": self._metrics.num_open})

    async def stats(self, request: Request) -> JSONResponse:
        """Answer with the engine's live statistics as over HTTP, and the sockets of all workers and of this one."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        own = {"sockets": len(self._socket.connections), "worker": self._metrics.cells.worker}
        return JSONResponse({**await stats_document(self._engine), "sockets": self._metrics.num_open, "ws": own})

    async def metrics(self, request: Request) -> Response:
        """Answer with the Prometheus text of the engine and of the sockets of all workers."""
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
        """Answer 200 only while an engine takes requests, however long its queue is."""
        state = self.engine_state.state
        return JSONResponse({"ready": state == "READY", "engine": state}, 200 if state == "READY" else 503)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _fetch_model(self) -> None:
        """Fetch the tokenizer before the first request needs it."""
        while self._services.models.served is None:
            try:
                await self._engine.wait_ready(_READY_WAIT_S)
                await self._services.models.get()
            except InferEngineError as error:
                logger.debug("the model is not available yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    def _send_state(self) -> None:
        state = self.engine_state.describe()
        for connection in self._socket.connections:
            connection.update_state(state)


# -- the chat page -----------------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parent / "static"
CLIENT = tuple(Path(__file__).parent / "client" / name for name in ("client.js", "client.d.ts"))  # of the npm package
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ts": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class _File(NamedTuple):
    content: bytes
    zipped: bytes | None  # None where gzip makes it no smaller: fonts
    media_type: str
    etag: str


class StaticFiles:
    """Serves GET / and GET /<path>. Browsers revalidate each time and get a 304 for a current copy."""

    def __init__(self, folder: Path = FOLDER) -> None:
        paths = [path for path in sorted(folder.rglob("*")) if path.suffix in _TYPES]
        self._files = {path.relative_to(folder).as_posix(): _read(path) for path in paths}
        self._files |= {path.name: _read(path) for path in CLIENT}

    async def serve(self, request: Request) -> Response:
        """Serve one file by its path in the folder; nothing is looked up on disk."""
        file = self._files.get(request.path_params.get("path") or INDEX)
        if file is None:
            return PlainTextResponse("There is no such page.", 404, headers=SECURITY_HEADERS)
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": file.etag, "vary": "accept-encoding"}
        if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        content = file.content
        if file.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = file.zipped, "gzip"
        return Response(content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    zipped = gzip.compress(content, mtime=0)
    return _File(content, zipped if len(zipped) < len(content) else None, _TYPES[path.suffix], etag)
