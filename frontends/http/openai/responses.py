"""Serve OpenAI's Responses API, for text and the client's own tools: create, retrieve, resume, cancel and delete.

A response is returned whole, streamed, or made in the background. Its body is converted to one of the chat API;
`previous_response_id` and `conversation` put earlier items before it. The answer is an object with output items, or the
events that build it up. Items come in the order in which the model writes them: reasoning, messages, function calls.
Every event has a number, so that a client can tell whether it has missed one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from frontends.common.auth import tenant_of
from frontends.common.chat import read_chat_prompt
from frontends.common.errors import error_object, flatten_tool_field, rename_field, report, unexpected
from frontends.common.generation import ChoiceOutput, Output, Piece, RequestOutput, Usage, draft_token_counts
from frontends.common.json import event, read_fields
from frontends.http.bodies import SAMPLING, ResponsesFields, check_model, read_json
from frontends.http.openai.completion_formats import chat_logprobs
from frontends.http.openai.completions import ChatRequest, read_chat
from frontends.http.openai.conversations import conversation_of
from frontends.http.openai.response_store import EventLog, ResponseStore, StoredResponse, read_events
from frontends.http.openai.responses_input import (
    Origin,
    ResponseItem,
    ResponseTools,
    as_messages,
    item_id,
    lookup_in,
    read_items,
    read_response_choice,
    read_response_tools,
    with_ids,
)
from frontends.http.openai.stored_chat import page
from frontends.http.respond import JsonBytes, RouteHandler, answer, keep_alive
from frontends.http.routes.tokenize import MAX_TOKENS
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning
from inferengine.text.tool_parsers.custom import custom_input

logger = logging.getLogger(__name__)

CANCEL_S = 10.0


def with_own_names(endpoint: RouteHandler) -> RouteHandler:
    """Wrap a route so that its errors name fields as the Responses API does."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InferEngineError as error:
            flatten_tool_field(error)
            if error.field is not None and error.field not in NAMES:
                if error.field.endswith(".function.arguments"):  # of a message: items have other places
                    error.message = f"the arguments of a function_call {error.message}"
                error.field = NAMES.get(error.field.partition("[")[0], error.field)
            rename_field(error, NAMES)
            raise

    return wrapped


class Asked(NamedTuple):
    """A request that was read. `before`: the conversation so far. `items`: its own. `chat`: both as a chat body."""

    fields: ResponsesFields
    before: list[ResponseItem]
    items: list[ResponseItem]
    tools: ResponseTools
    chat: dict[str, Any]
    conversation: StoredResponse | None


@with_own_names
async def create(request: Request) -> Response:
    """Create a response: whole, as events, or in the background."""
    service: HttpState = request.app.state.service
    store, tenant = service.responses, tenant_of(request.scope)
    body = await read_json(request, service.config.http.max_body_bytes)
    asked = await _read(service, body, tenant)
    fields = asked.fields
    if fields.background and not fields.store:
        raise InvalidRequest("store", "must be true for a response in the background")
    chat = await read_chat(service, asked.chat, request.scope["request_id"])
    envelope = _envelope(body, asked, chat)
    items = with_ids(asked.items, envelope["id"])
    stored = StoredResponse(tenant, [*asked.before, *items], envelope)

    def keep(document: dict[str, Any]) -> None:
        if fields.store:
            stored.document = document
            store.put(stored)
        if asked.conversation is not None and document["status"] in ("completed", "incomplete"):
            store.append(asked.conversation.name, [*items, *document["output"]])

    generation = chat.generation(service, request)
    if fields.background:
        log = EventLog(store, stored.name) if fields.stream else None
        add = None if log is None else log.add
        return await _in_background(
            service, generation, ResponsesFormat(chat, envelope, keep, asked.tools.origins, add), stored, log
        )
    format = ResponsesFormat(chat, envelope, keep, asked.tools.origins)
    saved = store.saved if fields.store or asked.conversation is not None else None
    return await answer(service, request, generation, format, stream=fields.stream, before_end=saved)


@with_own_names
async def input_tokens(request: Request) -> Response:
    """Count the tokens that the prompt of /v1/responses would have."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    asked = await _read(service, body, tenant_of(request.scope))
    served = await service.model.get()
    check_model(asked.chat, served)
    prompt = await read_chat_prompt(asked.chat, served, service.config, most=MAX_TOKENS)
    return JsonBytes({"object": "response.input_tokens", "input_tokens": len(prompt.prompt_ids)})


async def get(request: Request) -> Response:
    """Return a stored response; with `?stream=true` its events, from `starting_after` on."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    if request.query_params.get("stream") != "true":
        return JsonBytes(stored.document)
    after = request.query_params.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal() or len(after) > 9:
        raise InvalidRequest("starting_after", "must be the sequence_number of an event")
    if not stored.has_events:
        message = "only responses made with background and stream are streamed again"
        raise InvalidRequest("stream", message, code="unsupported")
    return _stream(service, stored, int(after) + 1)


async def input_items(request: Request) -> Response:
    """List the input items of a stored response, including those of the conversation before it."""
    return JsonBytes(page((await _stored(request)).items, request.query_params, order="desc"))


async def cancel(request: Request) -> Response:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    if not stored.document.get("background"):
        raise InvalidRequest("id", "only responses made in the background can be cancelled")
    if stored.task is not None:
        stored.cancel()
        await asyncio.wait([stored.task])
    elif stored.unfinished:
        await _cancel_elsewhere(service, stored)
    return JsonBytes((await _stored(request)).document)


async def delete(request: Request) -> Response:
    """Delete a stored response."""
    service: HttpState = request.app.state.service
    stored = await _stored(request)
    await service.responses.delete(stored.name[1], stored.tenant)
    if stored.unfinished and stored.task is None:  # after that: its worker keeps what is not deleted
        service.engines.cancel_request(stored.request_id)
    return JsonBytes({"id": request.path_params["id"], "object": "response", "deleted": True})


async def _stored(request: Request) -> StoredResponse:
    service: HttpState = request.app.state.service
    name = request.path_params["id"]
    if not name.startswith("resp_"):
        raise InferEngineError("not_found", "There is no such response: they are kept for an hour.")
    return await service.responses.get(name, tenant_of(request.scope))


async def _read(service: HttpState, body: dict[str, Any], tenant: str) -> Asked:
    fields = read_fields(ResponsesFields, {"input": "", **body}, service.config.limits)
    for name, idle in REFUSED.items():
        if body.get(name) is not None and body[name] not in idle:
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")
    items = await read_items(body.get("input"), lookup_in(service.responses, tenant))
    conversation = await conversation_of(service.responses, tenant, fields.conversation)
    before = list(conversation.items) if conversation is not None else []
    if fields.previous_response_id is not None:
        if conversation is not None:
            raise InvalidRequest("conversation", "cannot be combined with previous_response_id")
        before = await _before(service.responses, tenant, fields.previous_response_id)
    tools = read_response_tools(fields.tools, fields.tool_choice)
    return Asked(fields, before, items, tools, to_chat(body, fields, tools, as_messages(before, items)), conversation)


async def _before(store: ResponseStore, tenant: str, name: str) -> list[ResponseItem]:
    """Return the input and output items of a stored response: the conversation before the next one."""
    try:
        stored = await store.get(name, tenant)
    except InferEngineError as error:
        error.field = "previous_response_id"
        raise
    if stored.unfinished:
        raise InvalidRequest("previous_response_id", "is not finished yet")
    if stored.document.get("object") != "response":
        raise InvalidRequest("previous_response_id", "is not the id of a response")
    return [*stored.items, *stored.document["output"]]


def _stream(service: HttpState, stored: StoredResponse, first: int) -> Response:
    """Stream the events of a response that is made in the background. It goes on when the reader disconnects."""
    response = EventSourceResponse(
        read_events(service.responses, stored, max(0, first)),
        ping=service.config.http.keep_alive_s,
        ping_message_factory=keep_alive,
        sep="\n",
    )
    del response.headers["connection"]  # as EVENT_HEADERS
    return response


async def _in_background(
    service: HttpState, generation: RequestOutput, format: ResponsesFormat, stored: StoredResponse, log: EventLog | None
) -> Response:
    """Start a response in the background and answer at once. It is made whether or not anybody retrieves it."""
    try:
        await generation.accepted()
    except InferEngineError:
        generation.cancel()
        raise
    stored.document = {**stored.document, "status": "queued"}
    stored.request_id = generation.submissions[0].id
    stored.cancel = generation.cancel
    stored.log, stored.has_events = log, log is not None
    stored.task = asyncio.create_task(_make(service, generation, format, stored))
    service.responses.put(stored)
    queued = stored.document
    await service.responses.saved()
    return JsonBytes(queued) if log is None else _stream(service, stored, 0)


async def _make(service: HttpState, generation: RequestOutput, format: ResponsesFormat, stored: StoredResponse) -> None:
    stored.document = {**stored.document, "status": "in_progress"}
    service.responses.put(stored)
    try:
        with service.call(generation, _no_disconnect):
            if stored.log is None:
                outputs = await generation.collect()
                await generation.settle()
                format.document(outputs, generation.usage())
            else:
                await _make_events(generation, format)
    except InferEngineError as error:
        report(error, stored.request_id.hex())
        format.failure(error)
    except Exception:
        logger.exception("a response in the background failed")
        format.failure(unexpected())


async def _make_events(generation: RequestOutput, format: ResponsesFormat) -> None:
    format.begin()
    async for choice, pieces in generation.merged():
        format.events(generation, choice, pieces)
        if (error := pieces[-1].error) is not None:
            raise generation.error or error
    await generation.settle()
    format.end(generation)


async def _cancel_elsewhere(service: HttpState, stored: StoredResponse) -> None:
    """Cancel a response that another worker makes: in the engine, then wait until that worker has stored its end."""
    service.engines.cancel_request(stored.request_id)
    until_s = time.monotonic() + CANCEL_S
    while stored.unfinished and time.monotonic() < until_s:
        await asyncio.sleep(0.02)
        stored = await service.responses.get(stored.document["id"], stored.tenant)


async def _no_disconnect() -> Message:
    """Stand in for ASGI's receive and never return: a response in the background has no client to disconnect."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def _envelope(body: dict[str, Any], asked: Asked, chat: ChatRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat its request."""
    label, fields, conversation = chat.options.label, asked.fields, asked.conversation
    own = len(label) == 32 and all(character in "0123456789abcdef" for character in label)
    return {
        "id": f"resp_{label if own else secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": fields.background,
        "conversation": None if conversation is None else {"id": conversation.document["id"]},
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": fields.max_tool_calls,
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
        "tools": asked.tools.tools,
        "top_logprobs": fields.top_logprobs,
        "top_p": chat.params.top_p,
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
    }


PASSED_ON = (
    *(name for name in SAMPLING if name != "n"),
    *("cache_salt", "priority", "chat_template_kwargs", "parallel_tool_calls", "stream", "model"),
    *("prompt_cache_key", "session_id"),
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
    "prompt": (),
    "n": (1,),
    "context_management": ([],),
}


def to_chat(
    body: dict[str, Any], fields: ResponsesFields, tools: ResponseTools, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    """Convert a body to one of the chat API. `messages`: those of the conversation so far and of `input`."""
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
    if tools.definitions:
        chat["tools"] = tools.definitions
    if (choice := read_response_choice(fields.tool_choice)) is not None:
        chat["tool_choice"] = choice
    return chat


def _form(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise InvalidRequest("text.format", "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


Keep = Callable[[dict[str, Any]], None]


# -- answers and events ------------------------------------------------------------------------------------------------


class ResponsesFormat:
    """Writes a response as an object or as events, and stores it.

    `envelope`: the fields that the request decides. `keep` is called with the finished object. `origins`: the request's
    tools by the names that the model was shown. `log` gets every event of a response in the background.
    """

    ends_with_usage = False  # `end` tells it

    def __init__(
        self,
        chat: ChatRequest,
        envelope: dict[str, Any],
        keep: Keep,
        origins: Mapping[str, Origin],
        log: Callable[[bytes], None] | None = None,
    ) -> None:
        self._origins = origins
        self._log = log
        self._chat = chat
        self._keep = keep
        self._response = {**envelope, "status": "in_progress", "output": []}
        self._reader = chat.prompt.parser.make_reader()
        self._items: list[dict[str, Any]] = []
        self._arguments: list[str] = []  # of the last call
        self._open = False  # the last item is still being written
        self._kind = ""  # of the last item; that of a call includes its number
        self._number = 0  # of the next event
        self._rows: list[dict[str, Any]] = []  # log-probabilities of the open text
        self._finish_reason: str | None = None

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces; before the first, `response.created` and `response.in_progress`."""
        parts = self._begin()
        for piece in pieces:
            self._take(piece, parts)
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Keep the finished response and write the event that carries it."""
        response = self._finished(generation.usage())
        self._keep(response)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: InferEngineError) -> bytes:
        """Keep the response as failed and write `response.failed`."""
        parts = self._begin()
        self._close(parts, "incomplete")
        response = {**self._response, "status": "failed", "output": self._items, "error": failure(error)}
        self._keep(response)
        parts.append(self._event("response.failed", response=response))
        return b"".join(parts)

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Keep and return the whole response object."""
        (output,) = outputs
        parts: list[bytes] = []
        whole = Piece(
            output.text, output.token_ids, output.logprobs, 0, output.finish_reason, output.stop_reason, output.error
        )
        self._take(whole, parts)
        response = self._finished(usage)
        self._keep(response)
        return response

    def begin(self) -> bytes:
        """Write `response.created` and `response.in_progress`, once."""
        return b"".join(self._begin())

    def _begin(self) -> list[bytes]:
        if self._number:
            return []
        return [self._event(name, response=self._response) for name in ("response.created", "response.in_progress")]

    def _take(self, piece: Piece, parts: list[bytes]) -> None:
        if (shown := chat_logprobs(self._chat.answer, piece.token_ids, piece.logprobs)) is not None:
            self._rows += shown["content"]
        for part in self._reader.push(piece.text, piece.is_last, cut=piece.is_cut):
            self._add(part, parts)
        if piece.is_last:
            self._finish_reason = piece.finish_reason
            self._close(parts, "incomplete" if piece.is_cut else "completed")

    def _add(self, part: Part, parts: list[bytes]) -> None:
        match part:
            case Content(text):
                if self._kind != "message" or not self._open:
                    self._start("message", {"role": "assistant", "content": []}, parts)
                    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    self._last["content"].append(content)
                    parts.append(
                        self._event("response.content_part.added", content_index=0, part=content, **self._where)
                    )
                self._last["content"][0]["text"] += text
                rows, self._rows = self._rows, []
                self._last["content"][0]["logprobs"] += rows
                where = {"content_index": 0, "logprobs": rows, **self._where}
                parts.append(self._event("response.output_text.delta", delta=text, **where))
            case Reasoning(text):
                if self._kind != "reasoning" or not self._open:
                    content = {"type": "reasoning_text", "text": ""}
                    self._start("reasoning", {"summary": [], "content": [content]}, parts)
                self._last["content"][0]["text"] += text
                parts.append(self._event("response.reasoning_text.delta", delta=text, content_index=0, **self._where))
            case CallDelta(call, name, arguments):
                if self._kind != f"call {call}":
                    self._start_call(call, name or "", parts)
                self._arguments.append(arguments)
                if self._last["type"] == "function_call":
                    self._last["arguments"] += arguments
                    where = self._where
                    parts.append(self._event("response.function_call_arguments.delta", delta=arguments, **where))

    @property
    def _last(self) -> dict[str, Any]:
        return self._items[-1]

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._last["id"], "output_index": len(self._items) - 1}

    def _start_call(self, call: int, name: str, parts: list[bytes]) -> None:
        """Start the item of a call. A custom tool's input is written when the call is complete."""
        origin = self._origins.get(name, Origin("function", name))
        fields: dict[str, Any] = {
            "call_id": self._chat.prompt.parser.call_id(self._response["id"], 0, call),
            "name": origin.name,
        }
        if origin.namespace is not None:
            fields["namespace"] = origin.namespace
        if origin.kind == "custom":
            self._start("custom_tool_call", {**fields, "input": ""}, parts)
        else:
            self._start("function_call", {**fields, "arguments": ""}, parts)
        self._kind = f"call {call}"
        self._arguments = []

    def _start(self, kind: str, fields: dict[str, Any], parts: list[bytes]) -> None:
        self._close(parts, "completed")
        name = item_id(kind, self._response["id"], len(self._items))
        self._items.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self._kind, self._open = kind, True
        index = len(self._items) - 1
        parts.append(self._event("response.output_item.added", output_index=index, item=self._last))

    def _close(self, parts: list[bytes], status: str) -> None:
        if not self._open:
            return
        self._open = False
        item, where = self._last, self._where
        item["status"] = status
        if item["type"] == "message":
            content = item["content"][0]
            done = {"content_index": 0, **where}
            parts.append(self._event("response.output_text.done", text=content["text"], logprobs=[], **done))
            parts.append(self._event("response.content_part.done", part=content, **done))
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            parts.append(self._event("response.reasoning_text.done", text=text, content_index=0, **where))
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input("".join(self._arguments))
            if item["input"]:
                parts.append(self._event("response.custom_tool_call_input.delta", delta=item["input"], **where))
            parts.append(self._event("response.custom_tool_call_input.done", input=item["input"], **where))
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            parts.append(self._event("response.function_call_arguments.done", **call, **where))
        parts.append(self._event("response.output_item.done", output_index=where["output_index"], item=item))

    def _finished(self, usage: Usage) -> dict[str, Any]:
        status, details = "completed", None
        if self._finish_reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        elif self._finish_reason == "abort":
            status = "cancelled"
        return {
            **self._response,
            "status": status,
            "incomplete_details": details,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0, **draft_token_counts(usage)},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._number
        self._number += 1
        written = event({"type": kind, "sequence_number": number, **values}, kind)
        if self._log is not None:
            self._log(written)
        return written


def failure(error: InferEngineError) -> dict[str, Any]:
    """Return `error` of a response that failed."""
    shown = error_object(error)
    return {"code": "server_error" if error.http_status >= 500 else shown["code"], "message": shown["message"]}
