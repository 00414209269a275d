"""Whose share of the engine a request uses: the names that the front ends send with it.

First the client's address, then who asks from there: the user or the session that the request names, or its websocket.
The engine divides its time between the first names and each one's part between the second ones, so that a client that
makes up users divides what it has anyway. A key's tenant goes before both. Nothing else depends on these names: files,
streams, cached prefixes and limits belong to the tenant.

Behind a proxy all clients have one address: there only the second name tells them apart.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import Any

# In this order; OpenAI's names for a person come before those for a conversation.
_WHO = ("safety_identifier", "user", "session_id", "prompt_cache_key")
_DIGEST_CHARACTERS = 16


def client_of(host: str) -> str:
    """Return what counts as one client: an IPv4 address, the first 64 bits of an IPv6 address, and "" for what is no
    address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ipaddress.ip_network((found, 64), strict=False).network_address)
    return str(found)


def share_of(client: tuple[str, int] | None, document: Mapping[str, Any], session: str = "") -> tuple[str, str]:
    """Return the names of an HTTP request: its client's address and whom its body names, both "" where unknown.

    `client`: as ASGI has it; None for a unix socket. `session`: that of the request's header.
    """
    metadata = document.get("metadata")
    named = [document.get(name) for name in _WHO]
    if isinstance(metadata, Mapping):  # Anthropic's
        named.append(metadata.get("user_id"))
    who = next((name for name in named if isinstance(name, str) and name), session)
    return "" if client is None else client_of(client[0]), name_of(who)


def name_of(who: str) -> str:
    """Return a short name for what a client calls a user or a session; "" for none."""
    return hashlib.sha256(who.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS] if who else ""
