"""The handshake of a socket: who may open it, with which API key and subprotocol.

Programs send the key in a header. Browsers cannot, and send it as a subprotocol: a page offers `inferengine.v1.json`
and `inferengine.key.<KEY>`, and the answer names the first only. Keys consist of the characters of a token (RFC 6455).
A subprotocol appears in no log and no address bar, unlike a query.

Browsers let any page of any site open a socket, and name the page's site in `Origin`. A page is accepted when this
server served it (same host and port) under a name that nobody else's DNS can point to this machine: an IP address,
localhost, or a name that ws.allowed_hosts lists. Every other origin must be listed in ws.origins. Programs send no
Origin, and are accepted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Address, Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from frontends.common.auth import KeyRing
from frontends.common.hosts import is_named, read_names
from frontends.common.quotas import Quotas
from frontends.websocket.codec import JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL, Codec, choose_codec
from frontends.websocket.connection import SocketConnection
from frontends.websocket.engine_state import EngineState
from frontends.websocket.metrics import SocketMetrics
from frontends.websocket.socket_request import Caller, Services
from inferengine.errors import InferEngineError

SOCKET_PATH = "/v1/ws"
KEY_SUBPROTOCOL = "inferengine.key."
ANY = "*"
_ORIGIN = re.compile(r"https?://[\w.:\[\]-]+", re.ASCII)


class SocketEndpoint:
    """The ASGI endpoint of the socket: checks the handshake, then runs a SocketConnection until it closes."""

    def __init__(
        self, services: Services, engine_state: EngineState, keys: KeyRing, quotas: Quotas, metrics: SocketMetrics
    ) -> None:
        config = services.config
        self.connections: set[SocketConnection] = set()
        self._services = services
        self._engine_state = engine_state
        self._keys, self._quotas, self._metrics = keys, quotas, metrics
        self._max_sockets = config.ws.max_sockets
        self._origins = read_origins(config.ws.origins)
        self._host_names = read_names("ws", config.ws.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket."""
        websocket = WebSocket(scope, receive, send)
        checked = self._check(websocket.headers, scope["subprotocols"], websocket.client)
        if isinstance(checked, Response):
            await websocket.send_denial_response(checked)
            return
        codec, caller = checked
        await websocket.accept(subprotocol=codec.subprotocol if scope["subprotocols"] else None)
        # The server's own channels: Starlette's would check every message.
        connection = SocketConnection(receive, send, codec, self._services, self._engine_state, caller)
        self.connections.add(connection)
        opened_s = self._metrics.opened()
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)
            self._metrics.closed(opened_s)

    async def explain(self, request: Request) -> Response:
        """Answer a POST to the socket's path with why a page's socket is refused: browsers hide that from the page."""
        checked = self._check(request.headers, (JSON_SUBPROTOCOL,), request.client)
        if not isinstance(checked, Response):
            return JSONResponse({"may_connect": True, "reason": ""})
        reason = bytes(checked.body).decode()
        return JSONResponse({"may_connect": False, "reason": reason}, checked.status_code)

    def _check(
        self, headers: Headers, subprotocols: Sequence[str], client: Address | None
    ) -> Response | tuple[Codec, Caller]:
        """Return the refusal, or how the accepted socket is served."""
        origin = headers.get("origin")
        if not may_connect(origin, headers.get("host"), self._origins, self._host_names):
            return PlainTextResponse(_refused_origin(origin or ""), 403)
        try:
            key = self._keys.identify(presented_key(headers, subprotocols))
        except InferEngineError as error:
            self._metrics.refused()
            return PlainTextResponse(error.message, error.http_status)
        if self._metrics.num_open >= self._max_sockets:
            self._metrics.refused()
            text = f"{self._metrics.num_open} sockets are open, the most that may be."
            return PlainTextResponse(text, 503, {"Retry-After": "1"})
        codec = choose_codec(without_key_subprotocols(subprotocols))
        if codec is None:
            text = f"Speak one of the subprotocols {JSON_SUBPROTOCOL} and {MSGPACK_SUBPROTOCOL}, or name none for JSON."
            return PlainTextResponse(text, 400)
        address = None if client is None else client.host
        return codec, Caller(key, self._quotas, SOCKET_PATH, address, headers.get("traceparent", ""))


def presented_key(headers: Mapping[str, str], subprotocols: Sequence[str]) -> str | None:
    """Return the API key that the client sends, if any."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if "x-api-key" in headers:
        return headers["x-api-key"]
    return next((name.removeprefix(KEY_SUBPROTOCOL) for name in subprotocols if name.startswith(KEY_SUBPROTOCOL)), None)


def without_key_subprotocols(subprotocols: Sequence[str]) -> list[str]:
    """Return the subprotocols that name a protocol."""
    return [name for name in subprotocols if not name.startswith(KEY_SUBPROTOCOL)]


def read_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a comma-separated list."""
    return tuple(item.strip().rstrip("/").lower() for item in text.split(",") if item.strip())


def may_connect(origin: str | None, host: str | None, listed: Sequence[str], names: Sequence[str] = ()) -> bool:
    """Return whether a page may open the socket. `origin` and `host`: the request's headers, None where absent.
    `listed`: the origins of ws.origins. `names`: further names of this server."""
    if origin is None or ANY in listed or origin.lower() in listed:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or name is None or host is None:
        return False
    return parts.netloc.lower() == host.lower() and (is_named(name, names) or _is_local_name(name))


def _refused_origin(origin: str) -> str:
    shown = origin[:200] if _ORIGIN.fullmatch(origin) else "of this page"
    return (
        f"The origin {shown} may not open this server's socket. Open the page under an IP address or localhost, or "
        f"start the server with --ws.origins {shown} (for the server's own host names also --ws.allowed_hosts)."
    )


def _is_local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
