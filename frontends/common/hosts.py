"""Check the Host and Origin headers of requests to a front end without API keys.

A web page can make its own host name resolve to 127.0.0.1 (DNS rebinding). The browser then treats this server as the
page's own, and only the Host header shows the difference. So a server without keys on a loopback address answers
requests for loopback addresses, localhost and the names that the operator lists, and refuses all others. On an address
that other machines can reach (http.allow_public) names are checked only if some are listed. With keys nothing is
checked, because a foreign page has no key.

A request without a Host header does not come from a browser and is accepted.
"""

from __future__ import annotations

import html
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from frontends.common.auth import KeyRing, is_public
from frontends.common.connection_limits import RefusalMetrics
from frontends.common.errors import error_body
from inferengine.errors import ConfigError, InferEngineError

ANY = "*"
_NAME = re.compile(r"[a-z0-9_.-]{1,253}")
_PORT = re.compile(r":\d{0,5}")
_PAGE_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Not allowed · InferEngine</title>
<style>body { max-width: 36rem; margin: 16vh auto; padding: 0 1.5rem; font: 16px/1.6 system-ui, sans-serif }</style>
"""


class AllowedHosts:
    """The host names and origins that one front end accepts."""

    def __init__(self, section: str, names: Sequence[str], origins: Sequence[str], public_ports: Iterable[int]) -> None:
        """`section`: "http" or "ws", for error messages. `names`: further host names, `*.example.com` for all below a
        domain, `*` for any. `origins`: web origins whose pages may call, by CORS or by the websocket's list; their
        hosts are accepted as names, too. `public_ports`: ports that other machines can reach."""
        self._section = section
        self._origins = frozenset(origins)
        self._takes_any_origin = ANY in origins
        names = [*names, *(name for name in map(_host_of_origin, origins) if name is not None)]
        self._takes_any = ANY in names or self._takes_any_origin
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._public_ports = frozenset(public_ports)
        self._is_listed = bool(names)

    def check(self, scope: Scope) -> None:
        """Raise `forbidden` for a host or an origin that may not use a server without keys."""
        if not self._guards(scope.get("server")):
            return
        for name, value in scope["headers"]:
            if name == b"host":
                self._check_host(value.decode("latin-1"))
            elif name == b"origin":
                self._check_origin(value.decode("latin-1"))

    def _guards(self, server: tuple[str, int | None] | None) -> bool:
        """Return whether names are checked on the address of a connection. Web pages cannot reach a unix socket."""
        if server is None or server[1] is None or self._takes_any:
            return False
        if server[1] in self._public_ports:
            return self._is_listed
        return _is_loopback(server[0])

    def _check_host(self, value: str) -> None:
        host = _without_port(value.strip().lower())
        if host is None or not self._allows(host):
            shown = f" `{value[:100]}`" if host is not None else ""
            raise InferEngineError(
                "forbidden",
                f"This server asks for no API key, so it answers to this machine's own addresses and to listed names. "
                f"The host{shown} is none of them: use 127.0.0.1 or localhost, or list the name in "
                f"{self._section}.allowed_hosts{_example(self._section, host)}.",
            )

    def _check_origin(self, value: str) -> None:
        origin = value.strip().lower().rstrip("/")
        if origin in self._origins or self._takes_any_origin:
            return
        host = _host_of_origin(origin)
        if host is None or not self._allows(host):
            lists = "http.cors_origins" if self._section == "http" else "ws.origins"
            raise InferEngineError(
                "forbidden",
                "This server asks for no API key, so pages of other origins may not call it. The operator can list "
                f"this page's origin in {lists}.",
            )

    def _allows(self, host: str) -> bool:
        if host == "localhost" or host.endswith(".localhost") or host in self._names:
            return True
        if host.endswith(self._suffixes):
            return True
        return _is_address(host) if self._public_ports else _is_loopback(host)


class HostMiddleware:
    """ASGI middleware that refuses hosts and origins with 403 while no API keys are required."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, keys: KeyRing, refusals: RefusalMetrics) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse its host or origin."""
        if scope["type"] != "lifespan" and not self._keys.required:
            try:
                self._hosts.check(scope)
            except InferEngineError as error:
                self._refusals.count("host")
                await (_refuse_page(scope, send, error) if _is_page(scope) else refuse(scope, send, error))
                return
        await self._app(scope, receive, send)


async def refuse(scope: Scope, send: Send, error: InferEngineError) -> None:
    """Answer a request or a websocket handshake with an error."""
    body = error_body(error)
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    start: dict[str, Any] = {
        "type": f"{kind}.start",
        "status": error.http_status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    await send(start)
    await send({"type": f"{kind}.body", "body": body})


def _is_page(scope: Scope) -> bool:
    """Return whether a browser asks for a page to show."""
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return scope["type"] == "http" and scope["method"] == "GET" and any(b"text/html" in value for value in accepted)


async def _refuse_page(scope: Scope, send: Send, error: InferEngineError) -> None:
    """Answer a browser with the error as a page that people can read."""
    text = f"{_PAGE_HEAD}<h1>This address is not allowed</h1><p>{html.escape(error.message)}</p></html>"
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(text.encode())).encode()),
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def read_names(section: str, text: str) -> list[str]:
    """Return the host names of the comma-separated setting `allowed_hosts`. Raises ConfigError for anything else."""
    names = [item.strip().lower().rstrip(".") for item in text.split(",") if item.strip()]
    for name in names:
        bare = name.removeprefix("*.")
        if name != ANY and not _NAME.fullmatch(bare) and not _is_address(bare.strip("[]")):
            raise ConfigError(
                f"{section}.allowed_hosts", f"{name[:100]!r} is no host name: write names without scheme, port or path"
            )
    return [name.strip("[]") for name in names]


def is_named(host: str, names: Iterable[str]) -> bool:
    """Return whether a list of `read_names` contains this host."""
    return any(name in (ANY, host) or (name.startswith("*.") and host.endswith(name[1:])) for name in names)


def public_ports(listeners: Iterable[socket.socket]) -> list[int]:
    """Return the ports of the listeners that other machines can reach."""
    return [listener.getsockname()[1] for listener in listeners if is_public(listener)]


def _without_port(value: str) -> str | None:
    """Return the name or address in a Host header, None for an invalid one."""
    if value.startswith("["):
        address, closed, port = value[1:].partition("]")
        return address if closed and (not port or _PORT.fullmatch(port)) else None
    name, colon, port = value.partition(":")
    if colon and not _PORT.fullmatch(colon + port):
        return None
    name = name.removesuffix(".")
    return name if _NAME.fullmatch(name) else None


def _host_of_origin(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


def _example(section: str, host: str | None) -> str:
    """Return the option that allows this name; empty for what is no name."""
    return f" (start with --{section}.allowed_hosts {host[:100]})" if host and not _is_address(host) else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return bool(address.is_loopback or address.is_unspecified)  # connecting to 0.0.0.0 reaches the own machine
