"""The API key of a socket: in a header for programs, as a subprotocol for browsers, which can send no header.

A page offers `inferengine.v1.json` and `inferengine.key.<KEY>`; the answer names the first only. Keys have none but the
characters of a token (RFC 6455), and a subprotocol stands in no log and no address bar, unlike a query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
