"""The ASGI application: its routes, and its errors as `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
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
from frontends.common.errors import error_object, report, retry_after, unexpected
from frontends.http import ollama
from frontends.http.anthropic import count_tokens, messages
from frontends.http.middleware import (
    AliasMiddleware,
    AuthMiddleware,
    DialectMiddleware,
    ProxyMiddleware,
    RequestMiddleware,
    TrustedProxies,
)
from frontends.http.openai import batch_routes, conversations, responses, stored_chat
from frontends.http.openai.completions import chat_completions, completions
from frontends.http.openai.embeddings import embeddings
from frontends.http.openapi import openapi
from frontends.http.respond import JsonBytes
from frontends.http.routes import admin, health, pages, rerank
from frontends.http.routes.generate import generate, generate_text, infer
from frontends.http.routes.pages import index
from frontends.http.routes.resume import cancel_stream, read_stream
from frontends.http.routes.tokenize import detokenize, tokenize
from frontends.http.state import HttpState
from frontends.http.telemetry import HttpMetrics
from inferengine.client import EnginePool
from inferengine.config import Config, engine_addresses, load_balancing
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Tracing, make_tracing
from inferengine.wire.curve import client_keys

logger = logging.getLogger(__name__)

FIRST_CONNECT_S = 0.5  # that a new front end waits for an engine before it accepts connections
UNOFFERED = ("/v1/responses/compact",)  # OpenAI's, with a last part that would pass for an id
ROUTES = (
    Route("/", index),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/chat/completions", stored_chat.listing),
    Route("/v1/chat/completions/{id}", stored_chat.get),
    Route("/v1/chat/completions/{id}", stored_chat.update, methods=["POST"]),
    Route("/v1/chat/completions/{id}", stored_chat.delete, methods=["DELETE"]),
    Route("/v1/chat/completions/{id}/messages", stored_chat.messages),
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", responses.get),
    Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", responses.input_items),
    Route("/v1/conversations", conversations.create, methods=["POST"]),
    Route("/v1/conversations/{id}", conversations.get),
    Route("/v1/conversations/{id}", conversations.update, methods=["POST"]),
    Route("/v1/conversations/{id}", conversations.delete, methods=["DELETE"]),
    Route("/v1/conversations/{id}/items", conversations.items),
    Route("/v1/conversations/{id}/items", conversations.add_items, methods=["POST"]),
    Route("/v1/conversations/{id}/items/{item}", conversations.item),
    Route("/v1/conversations/{id}/items/{item}", conversations.delete_item, methods=["DELETE"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/rerank", rerank.rerank, methods=["POST"]),
    Route("/v2/rerank", rerank.rerank, methods=["POST"], include_in_schema=False),
    Route("/v1/score", rerank.score, methods=["POST"]),
    Route("/v1/generate", generate, methods=["POST"]),
    Route("/generate", generate_text, methods=["POST"]),
    Route("/infer/v1/completions", infer, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/streams/{id}", read_stream),
    Route("/v1/streams/{id}", cancel_stream, methods=["DELETE"]),
    *batch_routes.ROUTES,
    *ollama.ROUTES,
    Route("/v1/models", health.models),
    Route("/v1/models/{model:path}", health.model),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/ping", health.ping, methods=["GET", "POST"]),
    Route("/version", health.version),
    Route("/openapi.json", openapi),
    Route("/docs", pages.swagger, include_in_schema=False),
    Route("/redoc", pages.redoc, include_in_schema=False),
    Route("/docs/{file}", pages.file, include_in_schema=False),
    Route("/load", health.load),
    Route("/stats", health.stats),
    Route("/metrics", health.metrics),
    *admin.ROUTES,
)


def make_metrics(num_workers: int = 1) -> HttpMetrics:
    """Make the HTTP metrics of all workers, with one label value for each route's path."""
    return HttpMetrics(list(dict.fromkeys(route.path for route in ROUTES)), num_workers)


def make_quotas(config: Config, keys: KeyRing) -> Quotas:
    """Make the request quotas that all workers share, from these keys and the limits and workers in `config.http`."""
    http = config.http
    return Quotas(keys.keys, max_in_flight=http.max_in_flight, num_workers=http.workers or 1)


def make_service(
    config: Config,
    metrics: HttpMetrics | None = None,
    keys: KeyRing | None = None,
    quotas: Quotas | None = None,
    responses_path: Path | None = None,
    tracing: Tracing | None = None,
) -> HttpState:
    """Make one worker's state. The arguments are shared by all workers of the process, and made before their fork."""
    engines = EnginePool(
        engine_addresses(config),
        role="http",
        policy=load_balancing(config),
        curve=client_keys(config),
        resume_wait_s=config.wire.resume_wait_s,
        discovery_s=config.wire.discovery_s,
        hedge_share=config.wire.hedge_share,
    )
    metrics = metrics or make_metrics()
    engines.on_resumed = metrics.resumed.observe
    engines.on_event = metrics.resumed.count
    tracing = tracing or make_tracing(config.trace, "inferengine-http")
    keys = keys or read_keys(config.auth.keys_file)
    return HttpState(config, engines, metrics, keys, quotas or make_quotas(config, keys), responses_path, tracing)


def make_app(service: HttpState, listeners: Sequence[socket.socket] = ()) -> ASGIApp:
    """Make the ASGI application of one worker. `listeners`: the sockets that it is served on."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        service.batches.start(app)
        with contextlib.suppress(InferEngineError):  # so that the first requests find an engine that already runs
            await service.engines.connect(FIRST_CONNECT_S)
        yield
        await service.close()

    app = Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        middleware=[*_cors(service.config), Middleware(AuthMiddleware, service.keys, service.quotas, admin.PATHS)],
        exception_handlers={InferEngineError: _refused, HTTPException: _no_route, Exception: _failed},
    )
    app.state.service = service
    app.router.redirect_slashes = False  # a redirected POST loses its body in many clients
    http = service.config.http
    origins = read_origins("http.cors_origins", http.cors_origins)
    hosts = AllowedHosts("http", read_names("http", http.allowed_hosts), origins, public_ports(listeners))
    guarded = HostMiddleware(app, hosts, service.keys, service.metrics.refusals)
    counted = RequestMiddleware(
        guarded, service.metrics, service.config.http.max_header_bytes, service.tracing, service.off_loop.give_back_soon
    )
    proxied = ProxyMiddleware(DialectMiddleware(counted), TrustedProxies(http.trusted_proxies))
    return AliasMiddleware(proxied, [route.path for route in ROUTES])


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, InferEngineError):
        raise error
    report(error, request.scope["request_id"])
    response = JsonBytes({"error": error_object(error)}, error.http_status)
    if (wait := retry_after(error)) is not None:
        response.headers["Retry-After"] = wait
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405 and request.scope["path"] in UNOFFERED:
        status, error = 404, HTTPException(404)
    if status == 405:
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
        remedy = f": use {allowed}" if allowed else ""
        message, code = f"{request.method} is not allowed on this path{remedy}.", "method_not_allowed"
    elif status == 404:
        message, code = "There is no such path. GET / lists those that there are.", "not_found"
    else:
        message, code = str(getattr(error, "detail", "The request cannot be served."))[:200], "invalid_request"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    response = JsonBytes({"error": body}, status)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return JsonBytes({"error": error_object(unexpected())}, 500)


def _cors(config: Config) -> list[Middleware]:
    origins = read_origins("http.cors_origins", config.http.cors_origins)
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "x-stream-id", "retry-after"],
        )
    ]
