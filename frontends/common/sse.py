"""Server-Sent Events as bytes. A chunk differs from the last one only in a few places, so the rest is made once.

Separators are LF: common clients split on a blank line made of two LFs.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring  # in C; what json.dumps uses with ensure_ascii=False
from typing import Any

DONE = b"data: [DONE]\n\n"


def quote(text: str) -> bytes:
    """`text` as a JSON string with its quotes."""
    return encode_basestring(text).encode()


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any, name: str = "") -> bytes:
    """One event; json.dumps leaves no line break inside."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"
