"""/v1/responses: create, whole, streamed or in the background; get, cancel, delete; conversations by reference."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from frontends.common import json as fields
from frontends.common.errors import rename_field, report, unexpected
from frontends.common.generation import Generation
from frontends.http.bodies import Response as ResponseFields
from frontends.http.openai.chat import ChatRequest, read_chat
from frontends.http.openai.request_fields import read_json
from frontends.http.openai.responses.format import ResponsesFormat, as_messages
from frontends.http.openai.responses.request import NAMES, read_input, to_chat
from frontends.http.openai.responses.store import StoredResponse
from frontends.http.respond import JsonBytes, answer
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest

logger = logging.getLogger(__name__)

MAX_METADATA = 16
CANCEL_S = 10.0
Endpoint = Callable[[Request], Awaitable[Response]]


def with_own_names(endpoint: Endpoint) -> Endpoint:
    """Errors name fields as this dialect calls them."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InferEngineError as error:
            if error.field is not None and error.field not in NAMES:
                error.field = NAMES.get(error.field.partition("[")[0], error.field)
            rename_field(error, NAMES)
            raise

    return wrapped


@with_own_names
async def create(request: Request) -> Response:
    """OpenAI's Responses: whole, as events, or in the background."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    tenant = _tenant(request)
    asked = fields.read_fields(ResponseFields, {"input": "", **body}, service.config.limits)
    background, store = asked.background, asked.store
    if background and asked.stream:
        raise InvalidRequest("background", "cannot be streamed: ask for the response later", code="unsupported")
    if background and not store:
        raise InvalidRequest("store", "must be true for a response in the background")
    messages = read_input(body)
    if (previous := asked.previous_response_id) is not None:
        try:
            before = await service.responses.get(previous, tenant)
        except InferEngineError as error:
            error.field = "previous_response_id"
            raise
        if before.unfinished:
            raise InvalidRequest("previous_response_id", "is not finished yet")
        messages = [*before.messages, *as_messages(before.document["output"]), *messages]
    chat = await read_chat(service, to_chat(body, messages), request.scope["request_id"])
    envelope = _envelope(body, asked, chat)

    def keep(document: dict[str, Any]) -> None:
        if store:
            service.responses.put(StoredResponse(tenant, messages, document))

    generation = chat.generation(service, request)
    format = ResponsesFormat(chat, envelope, keep)
    if background:
        return await _in_background(service, generation, format, StoredResponse(tenant, messages, envelope))
    stream = chat.answer.streaming.stream
    return await answer(service, request, generation, format, stream=stream, before_end=service.responses.saved)


async def get(request: Request) -> Response:
    """A stored response."""
    service: HttpState = request.app.state.service
    if request.query_params.get("stream") == "true":
        raise InvalidRequest("stream", "a stored response is not streamed", code="unsupported")
    return JsonBytes((await service.responses.get(request.path_params["id"], _tenant(request))).document)


async def cancel(request: Request) -> Response:
    """End a response that is made in the background; one that has ended stays as it is."""
    service: HttpState = request.app.state.service
    stored = await service.responses.get(request.path_params["id"], _tenant(request))
    if not stored.document.get("background"):
        raise InvalidRequest("id", "only responses made in the background can be cancelled")
    if stored.task is not None:
        stored.cancel()
        await asyncio.wait([stored.task])
    elif stored.unfinished:
        await _cancel_elsewhere(service, stored)
    return JsonBytes((await service.responses.get(request.path_params["id"], _tenant(request))).document)


async def delete(request: Request) -> Response:
    """Forget a stored response."""
    service: HttpState = request.app.state.service
    stored = await service.responses.delete(request.path_params["id"], _tenant(request))
    if stored.unfinished and stored.task is None:  # after that: its worker keeps what is not deleted
        service.engines.cancel_request(stored.request_id)
    return JsonBytes({"id": request.path_params["id"], "object": "response", "deleted": True})


async def _in_background(
    service: HttpState, generation: Generation, format: ResponsesFormat, stored: StoredResponse
) -> Response:
    """Answer at once; the response is made when the engine gets to it, whether anybody asks for it or not."""
    try:
        await generation.accepted()
    except InferEngineError:
        generation.cancel()
        raise
    stored.document = {**stored.document, "status": "queued"}
    stored.request_id = generation.submissions[0].id
    stored.cancel = generation.cancel
    stored.task = asyncio.create_task(_make(service, generation, format, stored))
    service.responses.put(stored)
    queued = stored.document
    await service.responses.saved()
    return JsonBytes(queued)


async def _make(service: HttpState, generation: Generation, format: ResponsesFormat, stored: StoredResponse) -> None:
    stored.document = {**stored.document, "status": "in_progress"}
    service.responses.put(stored)
    try:
        with service.call(generation, _nobody_leaves):
            outputs = await generation.collect()
            await generation.settle()
        format.document(outputs, generation.usage())
    except InferEngineError as error:
        report(error, stored.request_id.hex())
        format.failure(error)
    except Exception:
        logger.exception("a response in the background failed")
        format.failure(unexpected())


async def _cancel_elsewhere(service: HttpState, stored: StoredResponse) -> None:
    """Another worker makes it: end it in the engine, and wait until that worker has heard of it."""
    service.engines.cancel_request(stored.request_id)
    until_s = time.monotonic() + CANCEL_S
    while stored.unfinished and time.monotonic() < until_s:
        await asyncio.sleep(0.02)
        stored = await service.responses.get(stored.document["id"], stored.tenant)


async def _nobody_leaves() -> Message:
    """There is no connection whose end would end the request."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def _envelope(body: dict[str, Any], asked: ResponseFields, chat: ChatRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    label = chat.options.label
    return {
        "id": f"resp_{label if len(label) == 32 else secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": asked.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": asked.metadata,
        "model": chat.served.name,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning"),
        "store": asked.store,
        "temperature": chat.params.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": chat.params.top_p,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
    }


def _tenant(request: Request) -> str:
    key = request.scope.get("api_key")
    return "" if key is None else str(key.tenant)
