"""Serve OpenAI's files and batches: /v1/files and /v1/batches. A tenant sees its own only.

`read_parts` reads an upload, multipart/form-data (RFC 7578), as it arrives: the head of each part, then its content in
pieces. Starlette's own reader needs python-multipart and writes files of any size to a temporary folder before the
route sees them. An upload here is one file and a few short fields, and goes straight into the store, within its bounds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from email.message import Message
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from frontends.common.auth import key_of
from frontends.common.json import read_fields, whole_number
from frontends.http.bodies import MAX_METADATA, read_json
from frontends.http.openai.batch_store import CHUNK_BYTES, DAY_S, ENDPOINTS, KEEP_S
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import about

MAX_FIELD_BYTES = 1024
SHORTEST_KEEP_S = 3600
MAX_WINDOW_S = 7 * DAY_S
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNITS = {"m": 60, "h": 3600, "d": DAY_S}

MetadataText = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file is removed."""

    seconds: Annotated[int, about(ge=SHORTEST_KEEP_S, le=KEEP_S)]
    anchor: Literal["created_at"] = "created_at"


class BatchFields(msgspec.Struct, frozen=True):
    """Of POST /v1/batches."""

    input_file_id: Annotated[str, about("a file of purpose batch: in each line custom_id, method, url and body")]
    endpoint: Annotated[Literal[ENDPOINTS], about("the route of all lines")]  # type: ignore[valid-type]
    completion_window: Annotated[
        str,
        about(
            "how long it may take: a number of minutes, hours or days, such as 24h; at most 7d",
            schema={"pattern": "^[1-9][0-9]*[mhd]$"},
        ),
    ] = "24h"
    metadata: Annotated[
        Annotated[dict[str, MetadataText], Meta(max_length=MAX_METADATA)], about("returned as it is")
    ] = {}
    output_expires_after: Annotated[ExpiresAfter | None, about("when output and error files are removed")] = None


class UploadFields(msgspec.Struct, frozen=True):
    """The parts of POST /v1/files."""

    file: Annotated[str, about("the file, one JSON object in each line", schema={"format": "binary"})]
    purpose: Annotated[Literal["batch"], about("what it is for")]
    expires_after: Annotated[ExpiresAfter | None, about("when it is removed, after 30 days if not said")] = None


class ListFields(msgspec.Struct, frozen=True):
    """The query of GET /v1/batches."""

    after: Annotated[str | None, about("the id that the last page ended with")] = None
    limit: Annotated[int, about("most entries", ge=1, le=100)] = 20


class FileListFields(msgspec.Struct, frozen=True):
    """The query of GET /v1/files."""

    after: Annotated[str | None, about("the id that the last page ended with")] = None
    limit: Annotated[int, about("most entries", ge=1, le=10_000)] = 10_000
    order: Annotated[Literal["asc", "desc"], about("by age: the oldest or the newest first")] = "desc"
    purpose: Annotated[str | None, about("only files of that purpose")] = None


async def upload(request: Request) -> Response:
    """Upload a file for a batch: multipart/form-data with `file` and `purpose`."""
    service: HttpState = request.app.state.service
    http = service.config.http
    boundary = read_boundary(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > http.max_file_bytes + CHUNK_BYTES:
        raise _too_large(http.max_file_bytes)
    file_id = await service.files.begin_file(key_of(request.scope).tenant)
    finished = False
    try:
        async with asyncio.timeout(http.body_timeout_s * max(1.0, http.max_file_bytes / http.max_body_bytes)):
            fields, filename = await _receive(request, boundary, file_id)
        purpose, keep_s = _read_purpose(fields)
        found = await service.files.finish_file(file_id, filename, purpose, keep_s)
        finished = True
    except TimeoutError:
        raise InferEngineError("request_timeout", "The file did not arrive in time.") from None
    except ClientDisconnect:
        raise InferEngineError("cancelled", "The client went away.") from None
    finally:
        if not finished:
            await asyncio.shield(service.files.drop_upload(file_id))
    return JsonBytes(found)


async def _receive(request: Request, boundary: bytes, file_id: str) -> tuple[dict[str, str], str]:
    """Write the file's content into the store; return the other fields, and the file's name."""
    service: HttpState = request.app.state.service
    most = service.config.http.max_file_bytes
    fields: dict[str, bytearray] = {}
    filename: str | None = None
    part: PartHead | None = None
    buffer, size, place = bytearray(), 0, 0
    async for item in read_parts(aiter(request.stream()), boundary):
        if isinstance(item, PartHead):
            part = item
            if part.name == "file":
                if filename is not None:
                    raise InvalidRequest("file", "one file at a time")
                filename = part.filename or "upload"
            else:
                fields.setdefault(part.name[:64], bytearray())
        elif part is not None and part.name == "file":
            size += len(item)
            if size > most:
                raise _too_large(most)
            buffer += item
            if len(buffer) >= CHUNK_BYTES:
                await service.files.add_chunk(file_id, place, bytes(buffer))
                place += 1
                buffer.clear()
        elif part is not None:
            value = fields[part.name[:64]]
            value += item
            if len(value) > MAX_FIELD_BYTES:
                raise InvalidRequest(part.name[:64], f"at most {MAX_FIELD_BYTES} bytes")
    if filename is None:
        raise InvalidRequest("file", "is required, as a part with a filename")
    if buffer:
        await service.files.add_chunk(file_id, place, bytes(buffer))
    return {name: value.decode("utf-8", "replace") for name, value in fields.items()}, filename


def _read_purpose(fields: dict[str, str]) -> tuple[str, int]:
    """Read the purpose of a file, and for how many seconds it is kept. Raises InvalidRequest."""
    purpose = fields.get("purpose", "")
    if purpose != "batch":
        raise InvalidRequest("purpose", "must be batch: nothing else is done with files here", code="unsupported")
    seconds = whole_number(fields.get("expires_after[seconds]", str(KEEP_S)))
    if seconds is None:
        raise InvalidRequest("expires_after[seconds]", "must be a whole number")
    if not SHORTEST_KEEP_S <= seconds <= KEEP_S:
        raise InvalidRequest("expires_after[seconds]", f"must lie in [{SHORTEST_KEEP_S}, {KEEP_S}]")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise InvalidRequest("expires_after[anchor]", "must be created_at")
    return purpose, seconds


async def files(request: Request) -> Response:
    """List the files of this key's tenant."""
    service: HttpState = request.app.state.service
    query = _read_query(request, FileListFields)
    found, more = await service.files.list_files(
        key_of(request.scope).tenant,
        purpose=query.purpose,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
    )
    return _page(found, more)


async def file(request: Request) -> Response:
    """Return a file's description."""
    service: HttpState = request.app.state.service
    return JsonBytes(await service.files.file(request.path_params["id"], key_of(request.scope).tenant))


async def file_content(request: Request) -> Response:
    """Return a file's content, as it was uploaded or as a batch wrote it."""
    service: HttpState = request.app.state.service
    found = await service.files.file(request.path_params["id"], key_of(request.scope).tenant)

    async def content() -> AsyncIterator[bytes]:
        place = 0
        while (data := await service.files.chunk(found["id"], place)) is not None:
            yield data
            place += 1

    headers = {"content-length": str(found["bytes"]), "x-content-type-options": "nosniff"}
    return StreamingResponse(content(), media_type="application/octet-stream", headers=headers)


async def delete_file(request: Request) -> Response:
    """Delete a file."""
    service: HttpState = request.app.state.service
    file_id = request.path_params["id"]
    await service.files.delete_file(file_id, key_of(request.scope).tenant)
    return JsonBytes({"id": file_id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    """Create a batch: run the requests of a file later, with the lowest priority."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    fields = read_fields(BatchFields, body)
    window = _WINDOW.fullmatch(fields.completion_window)
    window_s = int(window[1]) * _UNITS[window[2]] if window else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise InvalidRequest("completion_window", "must be a number of minutes, hours or days up to 7d, such as 24h")
    key = key_of(request.scope)
    keep = fields.output_expires_after
    wanted = {
        "endpoint": fields.endpoint,
        "input_file_id": fields.input_file_id,
        "completion_window": fields.completion_window,
        "metadata": fields.metadata or None,
        "output_keep_s": KEEP_S if keep is None else keep.seconds,
    }
    found = await service.files.create_batch(key.tenant, key.name, wanted, window_s)
    service.batches.wake()
    return JsonBytes(found)


async def batches(request: Request) -> Response:
    """List the batches of this key's tenant, the newest first."""
    service: HttpState = request.app.state.service
    query = _read_query(request, ListFields)
    found, more = await service.files.list_batches(key_of(request.scope).tenant, after=query.after, limit=query.limit)
    return _page(found, more)


async def batch(request: Request) -> Response:
    """Return a batch: its status, its counts, and its files once it has ended."""
    service: HttpState = request.app.state.service
    return JsonBytes(await service.files.batch(request.path_params["id"], key_of(request.scope).tenant))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; the results of its lines so far are kept."""
    service: HttpState = request.app.state.service
    found = await service.files.cancel_batch(request.path_params["id"], key_of(request.scope).tenant)
    service.batches.wake()
    return JsonBytes(found)


def _read_query(request: Request, kind: type[Any]) -> Any:
    given: dict[str, Any] = dict(request.query_params)
    if "limit" in given:
        given["limit"] = whole_number(given["limit"])
        if given["limit"] is None:
            raise InvalidRequest("limit", "must be a whole number without a sign")
    return read_fields(kind, given)


def _page(found: list[dict[str, Any]], more: bool) -> Response:
    ids = [item["id"] for item in found] or [None]
    return JsonBytes({"object": "list", "data": found, "first_id": ids[0], "last_id": ids[-1], "has_more": more})


def _too_large(most: int) -> InferEngineError:
    return InferEngineError("request_too_large", f"A file must have at most {most} bytes.", field="file")


ROUTES = (
    Route("/v1/files", upload, methods=["POST"]),
    Route("/v1/files", files),
    Route("/v1/files/{id}", file),
    Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", file_content),
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", batches),
    Route("/v1/batches/{id}", batch),
    Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
)


# -- multipart/form-data -----------------------------------------------------------------------------------------------

MAX_HEAD_BYTES = 8 * 1024
MAX_PARTS = 16
MAX_BOUNDARY_CHARACTERS = 70  # of RFC 2046
MAX_NAME_CHARACTERS = 255
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')
_PARAMETER_BARE = re.compile(r";\s*(name|filename)=([^\s;\"]+)")


class PartHead(NamedTuple):
    """The head of a part. `filename` is None for a field."""

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
    """Clean a file name: no folder, no control characters, no escapes of browsers."""
    name = unquote(re.sub(r"\\(.)", r"\1", filename)).replace("\\", "/").rpartition("/")[2]
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARACTERS]


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest("body", f"is not valid multipart/form-data: {reason}")
