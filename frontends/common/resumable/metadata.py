"""The note that a front end has the engine keep with a request, so that any other front end can read it on.

It holds whose request it is and, for HTTP, the request itself: replayed, it makes the same events from the same tokens.
The engine never looks inside. Whoever speaks the wire could have written it, so reading it trusts nothing.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgpack

from inferengine.wire.codec import MAX_NOTE_BYTES

VERSION = 1
COMPRESS_ABOVE_BYTES = 1024


class RequestMetadata(NamedTuple):
    """`path`, `label` and `body` of the HTTP request; empty where there was none. `created`: Unix time in seconds.
    `zipped`: `body` is compressed, as it travels."""

    tenant: str = ""
    path: str = ""
    label: str = ""
    created: int = 0
    body: bytes = b""
    zipped: bool = False

    def request_body(self, most_bytes: int) -> bytes:
        """The HTTP request's body; empty where it has more than `most_bytes` or is broken."""
        if not self.zipped:
            return self.body if len(self.body) <= most_bytes else b""
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(self.body, most_bytes)
        except zlib.error:
            return b""
        return body if unpacker.eof else b""


def pack_metadata(note: RequestMetadata) -> bytes:
    """As bytes for the engine. A body too large to be kept is left out: the request can then be read on only by
    sending it again."""
    body, zipped = note.body, len(note.body) > COMPRESS_ABOVE_BYTES
    if zipped:
        body = zlib.compress(body, 1)
    whole = msgpack.packb([VERSION, note.tenant, note.path, note.label, note.created, zipped, body])
    if len(whole) > MAX_NOTE_BYTES:
        whole = msgpack.packb([VERSION, note.tenant, "", note.label, note.created, False, b""])
    return bytes(whole)


def unpack_metadata(data: bytes) -> RequestMetadata:
    """The inverse. What no front end of this version wrote is an empty note."""
    try:
        version, tenant, path, label, created, zipped, body = msgpack.unpackb(data, strict_map_key=True)
        if version != VERSION or not all(isinstance(text, str) for text in (tenant, path, label)):
            return RequestMetadata()
        return RequestMetadata(tenant, path, label, int(created), bytes(body), bool(zipped))
    except (ValueError, TypeError, msgpack.UnpackException):
        return RequestMetadata()
