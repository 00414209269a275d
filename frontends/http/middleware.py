"""The ASGI middleware around the routes, from the outermost to the innermost.

- `AliasMiddleware` replaces other spellings of a path, before anything is decided by the path.
- `ProxyMiddleware` takes the client's scheme from what a trusted proxy says.
- `DialectMiddleware` writes errors in the format of Anthropic's and Ollama's clients.
- `RequestMiddleware` assigns request ids, writes the access log, and records metrics and spans.
- `AuthMiddleware`, between CORS and the routes, checks API keys. It decides by the ASGI path, never by a URL made of
  headers. If there are keys, every route needs one, except health, the list of routes and the API pages. Admin routes
  need an admin's key, and are closed without keys.

None of them adds a coroutine to the path of a chunk (`plain_send`).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from frontends.common.auth import ANYBODY, ApiKey, KeyRing, Quotas
from frontends.common.errors import dialect_of, error_body, in_dialect, retry_after
from frontends.common.json import LARGE
from frontends.http.routes.pages import PREFIX
from frontends.http.telemetry import OTHER, HttpMetrics, begin_request, end_request
from inferengine.errors import ConfigError, InferEngineError
from inferengine.observability.tracing import Tracing
from inferengine.wire.messages import MAX_NAME_CHARACTERS

logger = logging.getLogger("inferengine.access")

QUIET_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})  # asked every few seconds by monitors
WITHOUT_VERSION = ("/tokenize", "/detokenize", "/health")  # routes that others serve under /v1
_GOOD_ID = re.compile(rb"[\w.:-]{1,128}")


class AliasMiddleware:
    """Serves every route with a slash at its end, too, those of /v1 without `/v1`, and some others with it.

    Keys and admin paths are checked after this, by the route's own path.
    """

    def __init__(self, app: ASGIApp, paths: Iterable[str]) -> None:
        """`paths`: the paths of all routes."""
        self._app = app
        known = [path for path in paths if path != "/"]
        self._tops = frozenset(_top(path) for path in known if not path.startswith("/v1/"))
        self._versioned = frozenset(_top(path[3:]) for path in known if path.startswith("/v1/")) - self._tops

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace the request's path by its route's own, and pass it on."""
        if scope["type"] == "http" and (path := self._named(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)

    def _named(self, path: str) -> str:
        if path.endswith("/") and len(path) > 1:
            path = path.rstrip("/") or "/"
        if path.startswith("/v1/"):
            return path[3:] if path[3:] in WITHOUT_VERSION else path
        return f"/v1{path}" if _top(path) in self._versioned else path


def _top(path: str) -> str:
    """Return the first segment of a path."""
    return path[1:].partition("/")[0]


class ProxyMiddleware:
    """Takes the scheme of a request from the X-Forwarded-Proto of a trusted proxy, for addresses that an answer names.

    Nothing else is read from such headers: fair shares and the limits of connections go by the connection's address,
    because most proxies pass on the X-Forwarded-For that a client wrote."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request its scheme, and pass it on."""
        if scope["type"] == "http":
            values = (value for name, value in scope["headers"] if name == b"x-forwarded-proto")
            scheme = next(values, b"").partition(b",")[0].strip().lower()  # of a chain, that which the client reached
            if scheme in (b"http", b"https") and self._proxies.include(scope.get("client")):
                scope["scheme"] = scheme.decode()
        await self._app(scope, receive, send)


class TrustedProxies:
    """The addresses of http.trusted_proxies."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for what is no address and no network."""
        items = [item.strip() for item in text.split(",") if item.strip()]
        self._includes_unix = "unix" in items
        try:
            self._networks = [ipaddress.ip_network(item) for item in items if item != "unix"]
        except ValueError as error:
            raise ConfigError(
                "http.trusted_proxies", f"{str(error)[:200]}: write addresses, networks such as 10.0.0.0/8, or unix"
            ) from None

    def include(self, client: tuple[str, int] | None) -> bool:
        """Return whether the other end of a connection is a trusted proxy. `client`: as ASGI has it; None for a unix
        socket."""
        if client is None:
            return self._includes_unix
        try:
            address = ipaddress.ip_address(client[0].partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


class DialectMiddleware:
    """Rewrites errors in the format of Anthropic's and Ollama's APIs, whichever layer they come from.

    Answers to Anthropic's clients also get the header `request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and rewrite the errors of its answer."""
        dialect = dialect_of(scope["path"], scope["headers"]) if scope["type"] == "http" else "openai"
        if dialect == "openai":
            await self._app(scope, receive, send)
            return
        refusal: MutableMapping[str, Any] | None = None

        async def send_refusal(message: MutableMapping[str, Any]) -> None:
            nonlocal refusal
            assert refusal is not None
            start, refusal = refusal, None
            headers = dict(start["headers"])
            request_id = headers.get(b"x-request-id", b"").decode()
            body = in_dialect(dialect, start["status"], message.get("body", b""), request_id)
            headers[b"content-length"] = str(len(body)).encode()
            await send({**start, "headers": list(headers.items())})
            await send({**message, "body": body})

        async def hold(message: MutableMapping[str, Any]) -> None:
            nonlocal refusal
            refusal = message

        def send_as(message: MutableMapping[str, Any]) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                if dialect == "anthropic":
                    ids = [(b"request-id", value) for name, value in message["headers"] if name == b"x-request-id"]
                    message["headers"] = [*message["headers"], *ids]
                return hold(message) if message["status"] >= 400 else send(message)
            return send(message) if refusal is None else send_refusal(message)

        await self._app(scope, receive, send_as)


class RequestMiddleware:
    """Assigns request ids, writes the access log, and records metrics and spans.

    It sets `request_id` and `plain_send` in the scope, and reads `route` and `status` from it.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        max_header_bytes: int = 64 * 1024,
        tracing: Tracing | None = None,
        after_large_body: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_large_body` is called when a request ends whose body had LARGE bytes or more."""
        self._app = app
        self._metrics = metrics
        self._max_header_bytes = max_header_bytes
        self._tracing = tracing
        self._after_large_body = after_large_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request its id, log and count it, and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope["request_id"] = request_id.decode()
        scope["plain_send"] = send  # for chunks of a body, to which no other layer adds anything
        status = 0
        span = None
        if self._tracing is not None and scope["path"] not in QUIET_PATHS:
            span = begin_request(self._tracing, scope)

        def send_named(message: MutableMapping[str, Any]) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if (stream := scope.get("stream")) is not None:
                    headers.append((b"x-stream-id", stream.id.hex().encode()))
            return send(message)

        self._metrics.request_started()
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
                await _headers_too_large(send_named, self._max_header_bytes)
            else:
                await self._app(scope, receive, send_named)
        except Exception:
            status = status or 500
            logger.exception("a request failed", extra={"fields": {"request_id": scope["request_id"]}})
        finally:
            seconds = time.monotonic() - started
            status = scope.get("status") or status or 499
            route = scope.get("route")
            self._metrics.request_ended(getattr(route, "path", OTHER), status, seconds)
            if span is not None:
                end_request(span, scope, status)
            self._log(scope, status, seconds)
            # The server keeps the scope as long as the connection.
            scope.pop("document", None)
            scope.pop("plain_send", None)  # it refers to the server's object that holds the scope: a cycle
            if len(scope.pop("body", b"")) >= LARGE:
                self._after_large_body()

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client, key = scope.get("client"), scope.get("api_key")
        logger.log(
            level,
            "request",
            extra={
                "fields": {
                    "request_id": scope["request_id"],
                    **_label(scope),
                    "client": client[0] if client else "-",
                    "method": scope["method"],
                    "path": scope["path"][:200].encode("unicode_escape").decode(),
                    "status": status,
                    "ms": round(seconds * 1000, 1),
                    **({"key": key.name} if key is not None and key.name else {}),
                    **({"trace_id": scope["span"].trace_id} if "span" in scope else {}),
                }
            },
        )


def _label(scope: Scope) -> dict[str, str]:
    """Return the body's own `request_id`, which the answer's id and the engine's log have, as `label`; without one,
    nothing."""
    label = (scope.get("document") or {}).get("request_id")
    if not isinstance(label, str) or not label.isprintable() or not 0 < len(label) <= MAX_NAME_CHARACTERS // 2:
        return {}
    return {"label": label} if label != scope["request_id"] else {}


async def _headers_too_large(send: Send, most_bytes: int) -> None:
    body = error_body(InferEngineError("request_too_large", f"The headers must have at most {most_bytes} bytes."))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 431, "headers": headers})
    await send({"type": "http.response.body", "body": body})


OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/docs", "/redoc"})


def is_open(path: str) -> bool:
    """Return whether a path needs no key: health shows nothing of requests, and /docs is the same on every server."""
    return path in OPEN_PATHS or path.startswith(PREFIX)


class AuthMiddleware:
    """Checks API keys and sets `api_key` in the scope. Only POST requests count towards their key's limits."""

    def __init__(self, app: ASGIApp, keys: KeyRing, quotas: Quotas, admin_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._quotas = quotas
        self._admin_paths = frozenset(admin_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the API key and its quota, then pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        try:
            key = ANYBODY if is_open(path) or method == "OPTIONS" else self._keys.identify(_presented(scope))
            is_admin = path in self._admin_paths
            if is_admin:
                self._check_admin(key)
            scope["api_key"] = key
            counts = method == "POST" and not is_admin and not is_open(path)
            if counts:
                self._quotas.enter(key)
        except InferEngineError as error:
            await _refuse(error, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if counts:
                self._quotas.leave(key)

    def _check_admin(self, key: ApiKey) -> None:
        if not self._keys.required:
            raise InferEngineError("forbidden", "This path needs an admin's key, and auth.keys_file names no keys.")
        if not key.admin:
            raise InferEngineError("forbidden", "This path needs an admin's key.")


def _presented(scope: Scope) -> str | None:
    """Return the key of `Authorization: Bearer` or, as some SDKs send it, of `x-api-key`; None without either."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    other = headers.get(b"x-api-key")
    return None if other is None else other.decode("latin-1")


async def _refuse(error: InferEngineError, send: Send) -> None:
    body = error_body(error)
    headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    if (wait := retry_after(error)) is not None:
        headers.append((b"retry-after", wait.encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    start: dict[str, Any] = {"type": "http.response.start", "status": error.http_status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
