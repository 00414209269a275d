"""Who may come in: the layer between CORS and the routes. Decides on the ASGI path, never on a URL made of headers.

Every route but health and the list of routes asks for a key where there are keys; admin routes ask for an admin's, and
are closed without any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from frontends.common.errors import error_body, retry_after
from frontends.common.keys import ANYBODY, ApiKey, KeyRing
from frontends.common.quotas import Quotas
from inferengine.errors import InferEngineError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})


class Gate:
    """Sets `api_key` in the scope. Requests that do something (POST) count towards their key's limits."""

    def __init__(self, app: ASGIApp, keys: KeyRing, quotas: Quotas, admin_paths: Iterable[str]) -> None:
        self._app = app
        self._keys = keys
        self._quotas = quotas
        self._admin_paths = frozenset(admin_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        try:
            key = ANYBODY if path in OPEN_PATHS or method == "OPTIONS" else self._keys.identify(_presented(scope))
            is_admin = path in self._admin_paths
            if is_admin:
                self._check_admin(key)
            scope["api_key"] = key
            counts = method == "POST" and not is_admin and path not in OPEN_PATHS
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
    """The key of `Authorization: Bearer` or, as some SDKs send it, of `x-api-key`."""
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
