"""Serve chat completions that were created with `store`: list, retrieve, update and delete them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import tenant_of
from frontends.common.generation import ChoiceOutput, Output, Piece, RequestOutput, Usage
from frontends.common.json import read_fields, whole_number
from frontends.http.bodies import MetadataFields, read_json
from frontends.http.openai.response_store import ResponseStore, StoredResponse
from frontends.http.respond import Format, JsonBytes
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest

PREFIX = "chatcmpl-"
MAX_PAGE = 100
PAGE = 20


class KeepingFormat:
    """Wraps another format and stores the whole answer at its end, whether it was streamed or not."""

    def __init__(self, format: Format, store: ResponseStore, kept: StoredResponse) -> None:
        """`kept`: the record to complete and store; its document has what the answer lacks, such as metadata."""
        self._format = format
        self._store = store
        self._kept = kept
        self._outputs: dict[int, Output] = {}

    @property
    def ends_with_usage(self) -> bool:
        """Return what Format.ends_with_usage does."""
        return self._format.ends_with_usage

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces, and remember them."""
        self._outputs.setdefault(choice.index, Output(choice)).add(pieces)
        return self._format.events(generation, choice, pieces)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: every piece has to be seen."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Keep the answer and write the end of the stream."""
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        self.document(outputs, generation.usage())
        return self._format.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error. An answer that failed is not kept."""
        return self._format.failure(error)

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Keep and return the whole answer."""
        document = self._format.document(outputs, usage)
        self._kept.document = {**document, **self._kept.document}
        self._store.put(self._kept)
        return document


async def get(request: Request) -> Response:
    """Return a stored chat completion."""
    return JsonBytes((await _stored(request)).document)


async def update(request: Request) -> Response:
    """Replace the `metadata` of a stored chat completion."""
    return await replace_metadata(request, _stored)


async def delete(request: Request) -> Response:
    """Delete a stored chat completion."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    await service.responses.delete(stored.document["id"], stored.tenant)
    return JsonBytes({"object": "chat.completion.deleted", "id": stored.document["id"], "deleted": True})


async def messages(request: Request) -> Response:
    """List the input messages of a stored chat completion."""
    stored = await _stored(request)
    name = stored.document["id"]
    shown = [{**_as_listed(message), "id": f"{name}-{place}"} for place, message in enumerate(stored.items)]
    return JsonBytes(page(shown, request.query_params, order="asc"))


def _as_listed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI lists it: parts are not its content, but its content_parts."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": None, "content_parts": content}
    return {**message, "content": content, "content_parts": None}


async def listing(request: Request) -> Response:
    """List the stored chat completions, filtered by `model` and `metadata[…]`."""
    service: HttpState = request.app.state.service
    stored = await service.responses.of_tenant(tenant_of(request.scope), PREFIX)
    query = request.query_params
    wanted = {name[9:-1]: value for name, value in query.items() if name.startswith("metadata[") and name[-1] == "]"}
    shown = [
        one.document
        for one in stored
        if query.get("model", one.document["model"]) == one.document["model"]
        and wanted.items() <= (one.document.get("metadata") or {}).items()
    ]
    return JsonBytes(page(shown, query, order="asc"))


async def replace_metadata(request: Request, find: Callable[[Request], Awaitable[StoredResponse]]) -> Response:
    """Replace the `metadata` of the record that `find` returns for the request."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    metadata = read_fields(MetadataFields, body).metadata
    stored = await find(request)
    stored.document = {**stored.document, "metadata": metadata}
    service.responses.put(stored)
    await service.responses.saved()
    return JsonBytes(stored.document)


def page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, order: str) -> dict[str, Any]:
    """Return one page of a list in OpenAI's format, by `limit`, `after` and `order` of the query.

    `order`: the default order. Raises InvalidRequest.
    """
    limit, order = whole_number(query.get("limit", str(PAGE))), query.get("order", order)
    if limit is None or not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest("limit", f"must be a whole number from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", "must be asc or desc")
    found = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        place = next((place for place, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest("after", "is not the id of an entry of this list")
        found = found[place + 1 :]
    shown = found[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }


async def _stored(request: Request) -> StoredResponse:
    service: HttpState = request.app.state.service
    name = request.path_params["id"]
    if not name.startswith(PREFIX):
        raise InferEngineError("not_found", "There is no such chat completion: they are kept for an hour.")
    return await service.responses.get(name, tenant_of(request.scope))
