"""Serve OpenAI's Conversations: items under an id, to which responses append their input and output items."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import tenant_of
from frontends.common.json import read_fields
from frontends.http.bodies import ConversationFields, ConversationItemsFields, read_json
from frontends.http.openai.response_store import ResponseStore, StoredResponse
from frontends.http.openai.responses_input import PREFIXES, ResponseItem, as_messages, lookup_in, read_items
from frontends.http.openai.stored_chat import page, replace_metadata
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text import check_messages

PREFIX = "conv_"
MAX_NEW_ITEMS = 20  # OpenAI's limit for one call
ROLES = ("user", "assistant", "system", "developer")


async def create(request: Request) -> Response:
    """Create a conversation, with or without items."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    fields = read_fields(ConversationFields, body)
    tenant = tenant_of(request.scope)
    is_empty = fields.items is None or fields.items == []  # and no other value that counts as false
    items = [] if is_empty else await _new_items(service.responses, tenant, fields.items)
    document = {
        "id": f"{PREFIX}{secrets.token_hex(16)}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": fields.metadata,
    }
    service.responses.put(StoredResponse(tenant, items, document))
    await service.responses.saved()
    return JsonBytes(document)


async def get(request: Request) -> Response:
    """Return a conversation without its items."""
    return JsonBytes((await _stored(request)).document)


async def update(request: Request) -> Response:
    """Replace the `metadata` of a conversation."""
    return await replace_metadata(request, _stored)


async def delete(request: Request) -> Response:
    """Delete a conversation."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    await service.responses.delete(stored.name[1], stored.tenant)
    return JsonBytes({"id": stored.name[1], "object": "conversation.deleted", "deleted": True})


async def items(request: Request) -> Response:
    """List the items of a conversation, the newest first."""
    return JsonBytes(page((await _stored(request)).items, request.query_params, order="desc"))


async def add_items(request: Request) -> Response:
    """Append items to a conversation."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    given = read_fields(ConversationItemsFields, {"items": [], **body}).items
    stored = await _stored(request)
    added = await _new_items(service.responses, stored.tenant, given)
    service.responses.append(stored.name, added)
    await service.responses.saved()
    return JsonBytes(page(added, {"limit": str(MAX_NEW_ITEMS)}, order="asc"))


async def item(request: Request) -> Response:
    """Return one item of a conversation."""
    return JsonBytes(_found(await _stored(request), request.path_params["item"]))


async def delete_item(request: Request) -> Response:
    """Delete one item of a conversation."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    taken = _found(stored, request.path_params["item"])
    stored.items = [one for one in stored.items if one is not taken]
    service.responses.put(stored)
    await service.responses.saved()
    return JsonBytes(stored.document)


async def conversation_of(store: ResponseStore, tenant: str, given: Any) -> StoredResponse | None:
    """Return the conversation of a request: an id, or an object with one. None where it names none. Raises
    InvalidRequest, and not_found."""
    if given is None:
        return None
    name = given.get("id") if isinstance(given, dict) else given
    if not isinstance(name, str):
        raise InvalidRequest("conversation", "must be an id or an object with one")
    if not name.startswith(PREFIX):
        raise InferEngineError("not_found", _MISSING, field="conversation")
    try:
        return await store.get(name, tenant)
    except InferEngineError:
        raise InferEngineError("not_found", _MISSING, field="conversation") from None


_MISSING = "There is no such conversation: they are kept for an hour after the last use."


async def _stored(request: Request) -> StoredResponse:
    service: HttpState = request.app.state.service
    stored = await conversation_of(service.responses, tenant_of(request.scope), request.path_params["id"])
    assert stored is not None
    return stored


async def _new_items(store: ResponseStore, tenant: str, given: Any) -> list[ResponseItem]:
    """Read items to be added, and give each an id. Raises InvalidRequest naming the place."""
    try:
        if not isinstance(given, list) or len(given) > MAX_NEW_ITEMS:
            raise InvalidRequest("input", f"must be a list of 1 to {MAX_NEW_ITEMS} items")
        read = await read_items(given, lookup_in(store, tenant))
        as_messages([], read)
    except InferEngineError as error:
        error.field = f"items{(error.field or '').removeprefix('input')}"
        raise
    for place, one in enumerate(read):
        _check(one, f"items[{place}]")
    return [one if one.get("id") else {**one, "id": f"{PREFIXES[one['type']]}_{secrets.token_hex(24)}"} for one in read]


def _check(one: ResponseItem, path: str) -> None:
    """Refuse an item that no response can read: it would fail each one in the conversation. Raises InvalidRequest."""
    if one["type"] == "message" and one.get("role") not in ROLES:
        raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    if not isinstance(one.get("id") or "", str):
        raise InvalidRequest(f"{path}.id", "must be a string")
    try:
        check_messages(as_messages([], [one]))
    except InvalidRequest as error:
        error.field = path
        raise


def _found(stored: StoredResponse, name: str) -> ResponseItem:
    found = next((one for one in stored.items if one.get("id") == name), None)
    if found is None:
        raise InferEngineError("not_found", "There is no such item in this conversation.")
    return found
