"""A body of OpenAI's Responses API as one of the chat dialect. Text and functions only."""

from __future__ import annotations

from typing import Any

from frontends.common import json as fields
from frontends.http.bodies import Response
from frontends.http.openai.request_fields import SAMPLING
from inferengine.errors import InvalidRequest

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


def to_chat(body: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat request of `messages`, which `input` and what came before it make."""
    for name, idle in REFUSED.items():
        if body.get(name) is not None and body[name] not in idle:
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")
    asked = fields.read_fields(Response, body)
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    chat: dict[str, Any] = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    chat |= {"messages": [*system, *messages], "max_tokens": asked.max_output_tokens}
    if (form := asked.text.get("format")) is not None:
        chat["response_format"] = _form(form)
    if (effort := asked.reasoning.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if "message.output_text.logprobs" in asked.include:
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if asked.truncation == "auto":
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
    """Text, or parts that the chat dialect checks; a refusal in the history is what was said."""
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
