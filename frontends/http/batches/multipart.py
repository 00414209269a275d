"""Reads multipart/form-data (RFC 7578) as it arrives: the head of each part, then its content in pieces.

Starlette's own reader needs python-multipart and writes files of any size to a temporary folder before the route sees
them. An upload here is one file and a few short fields, and goes straight into the store, within its bounds.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from email.message import Message
from typing import NamedTuple
from urllib.parse import unquote

from inferengine.errors import InvalidRequest

MAX_HEAD_BYTES = 8 * 1024
MAX_PARTS = 16
MAX_BOUNDARY_CHARACTERS = 70  # of RFC 2046
MAX_NAME_CHARACTERS = 255
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')
_PARAMETER_BARE = re.compile(r";\s*(name|filename)=([^\s;\"]+)")


class PartHead(NamedTuple):
    """What a part is. `filename` is None for a field."""

    name: str
    filename: str | None


def read_boundary(content_type: str) -> bytes:
    """Return the boundary of a Content-Type. Raises InvalidRequest for another type."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise InvalidRequest("Content-Type", "must be multipart/form-data with a boundary (curl: -F file=@NAME)")
    if len(boundary) > MAX_BOUNDARY_CHARACTERS or not boundary.isascii():
        raise InvalidRequest("Content-Type", f"the boundary must have at most {MAX_BOUNDARY_CHARACTERS} characters")
    return boundary.encode()


async def read_parts(stream: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[PartHead | bytes]:
    """Yield the head of each part, then the pieces of its content. Raises InvalidRequest. Holds little more than one
    piece of `stream`."""
    mark = b"\r\n--" + boundary
    buffer = bytearray(b"\r\n")  # the first mark has no line before it

    async def more() -> None:
        piece = await anext(stream, None)
        while piece == b"":
            piece = await anext(stream, None)
        if piece is None:
            raise _broken("it ends in the middle of a part")
        buffer.extend(piece)

    while (at := buffer.find(mark)) < 0:
        if len(buffer) > MAX_HEAD_BYTES:
            raise _broken("the boundary of the Content-Type does not come")
        await more()
    for _ in range(MAX_PARTS + 1):
        del buffer[: at + len(mark)]
        while len(buffer) < 2:
            await more()
        if buffer[:2] == b"--":
            return
        while (end := buffer.find(b"\r\n\r\n")) < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise _broken(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
            await more()
        yield _read_head(bytes(buffer[:end]))
        del buffer[: end + 4]
        while (at := buffer.find(mark)) < 0:
            surplus = len(buffer) - len(mark) + 1  # what cannot be the beginning of a mark
            if surplus > 0:
                yield bytes(buffer[:surplus])
                del buffer[:surplus]
            await more()
        if at:
            yield bytes(buffer[:at])
    raise _broken(f"more than {MAX_PARTS} parts")


def _read_head(head: bytes) -> PartHead:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            found = dict(_PARAMETER_BARE.findall(value)) | dict(_PARAMETER.findall(value))
            if "name" in found:
                filename = found.get("filename")
                return PartHead(found["name"], None if filename is None else _clean(filename))
    raise _broken("a part has no Content-Disposition with a name")


def _clean(filename: str) -> str:
    """A name to show: without a folder, control characters and the escapes of browsers."""
    name = unquote(re.sub(r"\\(.)", r"\1", filename)).replace("\\", "/").rpartition("/")[2]
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARACTERS]


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest("body", f"is not valid multipart/form-data: {reason}")
