"""OpenAI's Responses API, for text and functions: create, whole, streamed or in the background; get, cancel, delete.

A body becomes one of the chat API; `previous_response_id` puts a stored conversation before it.
"""

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

from frontends.common.auth import tenant_of
from frontends.common.errors import rename_field, report, unexpected
from frontends.common.generation import Generation
from frontends.common.json import read_fields
from frontends.http.bodies import ResponsesFields, read_json
from frontends.http.openai.chat import ChatRequest, read_chat
from frontends.http.openai.request_fields import SAMPLING
from frontends.http.openai.response_store import StoredResponse
from frontends.http.openai.responses_format import ResponsesFormat, as_messages
from frontends.http.respond import JsonBytes, answer
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest

logger = logging.getLogger(__name__)

CANCEL_S = 10.0
Endpoint = Callable[[Request], Awaitable[Response]]


def with_own_names(endpoint: Endpoint) -> Endpoint:
    """Let errors name fields as the Responses API calls them."""

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
    tenant = tenant_of(request.scope)
    fields = read_fields(ResponsesFields, {"input": "", **body}, service.config.limits)
    background, store = fields.background, fields.store
    if background and fields.stream:
        raise InvalidRequest("background", "cannot be streamed: ask for the response later", code="unsupported")
    if background and not store:
        raise InvalidRequest("store", "must be true for a response in the background")
    messages = read_input(body)
    if (previous := fields.previous_response_id) is not None:
        try:
            before = await service.responses.get(previous, tenant)
        except InferEngineError as error:
            error.field = "previous_response_id"
            raise
        if before.unfinished:
            raise InvalidRequest("previous_response_id", "is not finished yet")
        messages = [*before.messages, *as_messages(before.document["output"]), *messages]
    chat = await read_chat(service, to_chat(body, fields, messages), request.scope["request_id"])
    envelope = _envelope(body, fields, chat)

    def keep(document: dict[str, Any]) -> None:
        if store:
            service.responses.put(StoredResponse(tenant, messages, document))

    generation = chat.generation(service, request)
    format = ResponsesFormat(chat, envelope, keep)
    if background:
        return await _in_background(service, generation, format, StoredResponse(tenant, messages, envelope))
    stream = chat.answer.streaming.stream
    return await answer(
        service, request, generation, format, stream=stream, before_end=service.responses.saved if store else None
    )


async def get(request: Request) -> Response:
    """A stored response."""
    service: HttpState = request.app.state.service
    if request.query_params.get("stream") == "true":
        raise InvalidRequest("stream", "a stored response is not streamed", code="unsupported")
    return JsonBytes((await service.responses.get(request.path_params["id"], tenant_of(request.scope))).document)


async def cancel(request: Request) -> Response:
    """End a response that is made in the background; one that has ended stays as it is."""
    service: HttpState = request.app.state.service
    stored = await service.responses.get(request.path_params["id"], tenant_of(request.scope))
    if not stored.document.get("background"):
        raise InvalidRequest("id", "only responses made in the background can be cancelled")
    if stored.task is not None:
        stored.cancel()
        await asyncio.wait([stored.task])
    elif stored.unfinished:
        await _cancel_elsewhere(service, stored)
    return JsonBytes((await service.responses.get(request.path_params["id"], tenant_of(request.scope))).document)


async def delete(request: Request) -> Response:
    """Forget a stored response."""
    service: HttpState = request.app.state.service
    stored = await service.responses.delete(request.path_params["id"], tenant_of(request.scope))
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
        with service.call(generation, _no_disconnect):
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


async def _no_disconnect() -> Message:
    """Wait for ever: a response made in the background has no connection whose end would end it."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def _envelope(body: dict[str, Any], fields: ResponsesFields, chat: ChatRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    label = chat.options.label
    return {
        "id": f"resp_{label if len(label) == 32 else secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": fields.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": fields.metadata,
        "model": chat.served.name,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning"),
        "store": fields.store,
        "temperature": chat.params.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": chat.params.top_p,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
    }


PASSED_ON = (
    *(name for name in SAMPLING if name != "n"),
    *("cache_salt", "priority", "chat_template_kwargs", "parallel_tool_calls", "stream", "model"),
)
NAMES = {
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "n": (1,),
    "context_management": ([],),
}


def read_input(body: dict[str, Any]) -> list[dict[str, Any]]:
    """`input` as chat messages: a text, or a list of messages, calls and their outputs."""
    value = body.get("input")
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", "must be a text or a list of items, not empty")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(value):
        _add_item(item, messages, f"input[{place}]")
    return messages or [{"role": "user", "content": ""}]


def to_chat(body: dict[str, Any], fields: ResponsesFields, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the chat request of `messages`, those of `input` and of the conversation before it. `fields`: of `body`."""
    for name, idle in REFUSED.items():
        if body.get(name) is not None and body[name] not in idle:
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")
    system = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    chat: dict[str, Any] = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    chat |= {"messages": [*system, *messages], "max_tokens": fields.max_output_tokens}
    if (form := fields.text.get("format")) is not None:
        chat["response_format"] = _form(form)
    if (effort := fields.reasoning.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if "message.output_text.logprobs" in fields.include:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    if fields.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    _add_tools(chat, body)
    return chat


def _add_item(item: Any, messages: list[dict[str, Any]], path: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(path, "must be an object with a type, such as message")
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{path}.content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # what a model thought in earlier turns is not shown to it again
        raise InvalidRequest(path, f"items of type {str(kind)[:40]} cannot be read", code="unsupported")


def _content(content: Any, path: str) -> Any:
    """Text, or parts that the chat API checks; a refusal in the history is what was said."""
    if not isinstance(content, str | list):
        raise InvalidRequest(path, "must be a string or a list of parts")
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in content
    ]


def _form(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise InvalidRequest("text.format", "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _add_tools(chat: dict[str, Any], body: dict[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None:
        if not isinstance(tools, list):
            raise InvalidRequest("tools", "must be a list")
        chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if isinstance(choice, dict) and "function" not in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    if choice is not None:
        chat["tool_choice"] = choice


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(path, "must be of type function: this server has no tools of its own", code="unsupported")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
