"""The API key of a socket: in a header for programs, as a subprotocol for browsers, which can send no header.

A page offers `inferengine.v1.json` and `inferengine.key.<KEY>`; the answer names the first only. Keys have none but the
characters of a token (RFC 6455), and a subprotocol stands in no log and no address bar, unlike a query.

Which web pages may open the socket. Browsers let any page of any site try, and name it in `Origin`.

A page may when this server served it (same host and port) under a name that cannot be rebound to this machine by
somebody else's DNS: an IP address, localhost, or one that ws.allowed_hosts lists. Every other origin must be listed.
Programs send no Origin and may.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from frontends.common.hosts import is_named

KEY_SUBPROTOCOL = "inferengine.key."


def presented_key(headers: Mapping[str, str], subprotocols: Sequence[str]) -> str | None:
    """What the client shows, if anything."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if "x-api-key" in headers:
        return headers["x-api-key"]
    return next((name.removeprefix(KEY_SUBPROTOCOL) for name in subprotocols if name.startswith(KEY_SUBPROTOCOL)), None)


def without_keys(subprotocols: Sequence[str]) -> list[str]:
    """The subprotocols that are ones."""
    return [name for name in subprotocols if not name.startswith(KEY_SUBPROTOCOL)]


ANY = "*"


def read_origins(text: str) -> tuple[str, ...]:
    """The comma-separated list of the configuration."""
    return tuple(item.strip().rstrip("/").lower() for item in text.split(",") if item.strip())


def may_connect(origin: str | None, host: str | None, listed: Sequence[str], names: Sequence[str] = ()) -> bool:
    """`origin` and `host` are the request's headers, None where absent. `names`: further names of this server."""
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


def _is_local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
