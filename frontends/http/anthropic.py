"""Anthropic's Messages API for text and tools: POST /v1/messages and /v1/messages/count_tokens.

A body is rewritten as one of OpenAI's chat API and read as such. The answer is a document of content blocks, or the
events that build it up. Reference: Anthropic's API documentation, "Messages".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.chat import read_chat_prompt
from frontends.common.errors import anthropic_error, flatten_tool_field, rename_field, sentence
from frontends.common.generation import ChoiceOutput, Output, Piece, RequestOutput, Usage, draft_token_counts
from frontends.common.json import event, read_fields, read_flag, read_mapping
from frontends.http.bodies import SAMPLING, MessagesFields, MessagesPromptFields, check_model, read_json
from frontends.http.openai.completions import ChatRequest, read_chat
from frontends.http.respond import JsonBytes, RouteHandler, answer
from frontends.http.routes.tokenize import MAX_TOKENS
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning


def with_own_names(endpoint: RouteHandler) -> RouteHandler:
    """Wrap a route so that its errors name fields as Anthropic does. `DialectMiddleware` writes the errors."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InferEngineError as error:
            rename_field(error, NAMES)
            flatten_tool_field(error, "input_schema")
            raise

    return wrapped


@with_own_names
async def messages(request: Request) -> Response:
    """Create a message, whole or as events (Anthropic's Messages): text and tools."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    chat = await read_chat(service, to_chat(body), request.scope["request_id"])
    format = MessagesFormat(chat, f"msg_{chat.options.label}")
    stream = chat.answer.streaming.stream
    return await answer(service, request, chat.generation(service, request), format, stream=stream)


@with_own_names
async def count_tokens(request: Request) -> Response:
    """Count the tokens that the prompt of /v1/messages would have."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    chat = to_chat(body, counting=True)
    served = await service.model.get()
    check_model(chat, served)
    prompt = await read_chat_prompt(chat, served, service.config, most=MAX_TOKENS)
    return JsonBytes({"input_tokens": len(prompt.prompt_ids)})


# What a request may say besides Anthropic's own fields, for those who know this server.
PASSED_ON = (
    *(name for name in SAMPLING if name not in ("n", "stop")),
    "cache_salt",
    "prompt_cache_key",
    "session_id",
    "priority",
    "chat_template_kwargs",
)
# Fields of the chat API in errors, and what Anthropic calls them.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
}
REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": (), "n": (1,)}
NEVER = {"stop_details": None, "container": None}  # what every message must say, and this server has nothing to say of
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: dict[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """Convert a body to one of the chat API. Raises InvalidRequest naming the field as Anthropic does.

    `counting`: the body is one of count_tokens, of which only the prompt matters.
    """
    for name, idle in REFUSED.items():
        if body.get(name) is not None and body[name] not in idle:
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")
    chat: dict[str, Any] = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    chat |= {"model": body.get("model"), "messages": [*_system(body.get("system")), *_messages(body.get("messages"))]}
    fields = read_fields(MessagesPromptFields, {"messages": None, **body})
    if not counting:
        own = read_fields(MessagesFields, body)
        if not isinstance(own.stop_sequences, list | None):
            raise InvalidRequest("stop_sequences", "must be a list of texts")
        chat |= {"max_tokens": own.max_tokens, "stream": own.stream, "stop": own.stop_sequences}
    if chat["messages"][-1]["role"] == "assistant" and not chat["messages"][-1].get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    _add_tools(chat, fields)
    _add_thinking(chat, fields)
    if (effort := fields.output_config.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    form = fields.output_config.get("format") or body.get("output_format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise InvalidRequest("output_config.format", "must be an object of type json_schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return chat


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    text = system if isinstance(system, str) else "\n".join(_texts(system, "system"))
    return [{"role": "system", "content": text}]


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    read: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{path}.role", "must be user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            read.append({"role": role, "content": content})
        elif isinstance(content, list):
            read += _blocks(role, content, f"{path}.content")
        else:
            raise InvalidRequest(f"{path}.content", "must be a string or a list of blocks")
    return read


def _blocks(role: str, blocks: list[Any], path: str) -> list[dict[str, Any]]:
    """Convert the blocks of a message. Tool results become messages of their own, before the rest of the message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        where = f"{path}[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "tool_result":
            results.append(_result(block, where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind != "redacted_thinking":
            raise InvalidRequest(where, f"blocks of type {str(kind)[:40]} cannot be read", code="unsupported")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message] if texts or calls or not results else results


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input", "must be an object")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    text = content if isinstance(content, str) else "\n".join(_texts(content, f"{where}.content"))
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _texts(blocks: Any, path: str) -> list[str]:
    if not isinstance(blocks, list):
        raise InvalidRequest(path, "must be a string or a list of text blocks")
    texts = []
    for place, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise InvalidRequest(f"{path}[{place}]", "must be a text block", code="unsupported")
        texts.append(_string(block, "text", f"{path}[{place}]"))
    return texts


def _add_tools(chat: dict[str, Any], fields: MessagesPromptFields) -> None:
    tools = fields.tools
    if tools is not None:
        if not isinstance(tools, list):
            raise InvalidRequest("tools", "must be a list")
        chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    choice = fields.tool_choice
    if not choice:
        return
    kind = choice.get("type")
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise InvalidRequest("tool_choice.name", "must be the name of a tool")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise InvalidRequest("tool_choice.type", "must be auto, any, tool or none")
    chat["parallel_tool_calls"] = not read_flag(choice, "disable_parallel_tool_use")


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise InvalidRequest(path, "must be a tool of the client's own, with name and input_schema", code="unsupported")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _add_thinking(chat: dict[str, Any], fields: MessagesPromptFields) -> None:
    """Convert `thinking` to `enable_thinking`, a variable of the chat templates of reasoning models."""
    kind = fields.thinking.get("type")
    if kind is not None:
        if not isinstance(kind, str):
            raise InvalidRequest("thinking.type", "must be enabled, adaptive or disabled")
        given = read_mapping(chat, "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **given}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name}", "must be a string")
    return value


def tool_input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; empty for a call that was cut off."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessagesFormat:
    """Writes one choice as content blocks: a message object or its events."""

    ends_with_usage = False  # `end` tells it

    def __init__(self, chat: ChatRequest, message_id: str) -> None:
        self._chat = chat
        self._id = message_id
        self._reader = chat.prompt.parser.make_reader()
        self._open: str | None = None  # what the open block is: text, thinking, or the number of a call
        self._num_blocks = 0
        self._begun = False
        self._last: Piece | None = None

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces; before the first ones, `message_start` and `ping`."""
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            message = {**self._message([], None, None), "usage": _usage(generation.usage(), output_tokens=0)}
            parts.append(_event("message_start", message=message))
            parts.append(_event("ping"))
        for piece in pieces:
            for part in self._reader.push(piece.text, piece.is_last, cut=piece.is_cut):
                self._add(part, parts)
            if piece.is_last:
                self._last = piece
                self._close(parts)
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Write `message_delta` with the stop reason and usage, then `message_stop`; or that it was cancelled."""
        if self._last is not None and self._last.finish_reason == "abort":
            return self.failure(_cancelled())
        reason, sequence = _stop(self._last, self._reader.num_calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence, **NEVER}
        return _event("message_delta", delta=delta, usage=_usage(generation.usage())) + _event("message_stop")

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an `error` event."""
        return event(anthropic_error(error.http_status, sentence(error)), "error")

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole message object with its thinking, text and tool_use blocks. Raises the error of a cancelled
        answer."""
        (output,) = outputs
        if output.finish_reason == "abort":
            raise _cancelled()
        message = self._reader.read(output.text, cut=output.is_cut)
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for place, (name, arguments) in enumerate(message.calls):
            blocks.append(self._tool_use(place, name, tool_input(arguments)))
        ended = Piece("", (), None, 0, output.finish_reason, output.stop_reason)
        return {**self._message(blocks, *_stop(ended, len(message.calls))), "usage": _usage(usage)}

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._chat.served.name,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            **NEVER,
        }

    def _add(self, part: Part, parts: list[bytes]) -> None:
        match part:
            case Content(text):
                self._block("text", {"type": "text", "text": ""}, parts)
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""}, parts)
                delta = {"type": "thinking_delta", "thinking": text}
            case CallDelta(call, name, arguments):
                block = self._tool_use(call, name or "", {})
                self._block(str(call), block, parts)
                delta = {"type": "input_json_delta", "partial_json": arguments}
        parts.append(_event("content_block_delta", index=self._num_blocks - 1, delta=delta))

    def _block(self, kind: str, block: dict[str, Any], parts: list[bytes]) -> None:
        """Open a block of this kind, unless the last one is of this kind and open."""
        if self._open != kind:
            self._close(parts)
            self._open = kind
            parts.append(_event("content_block_start", index=self._num_blocks, content_block=block))
            self._num_blocks += 1

    def _close(self, parts: list[bytes]) -> None:
        if self._open is not None:
            parts.append(_event("content_block_stop", index=self._num_blocks - 1))
            self._open = None

    def _tool_use(self, call: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        call_id = self._chat.prompt.parser.call_id(self._id, 0, call)
        return {"type": "tool_use", "id": call_id, "name": name, "input": given, "caller": {"type": "direct"}}


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)


def _cancelled() -> InferEngineError:
    """Return the error of an answer that was cancelled: no `stop_reason` says that it was cut."""
    return InferEngineError("cancelled", "The answer was cancelled before it was complete.")


def _stop(last: Piece | None, num_calls: int) -> tuple[str | None, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if last is None:
        return None, None
    if last.finish_reason == "length":
        return "max_tokens", None
    if isinstance(last.stop_reason, str):
        return "stop_sequence", last.stop_reason
    return "tool_use" if num_calls else "end_turn", None


def _usage(usage: Usage, output_tokens: int | None = None) -> dict[str, Any]:
    """Convert usage: cached tokens are counted apart. Draft tokens have OpenAI's names, as Anthropic has none."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens if output_tokens is None else output_tokens,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        **draft_token_counts(usage),
    }
