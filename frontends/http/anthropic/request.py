"""A body of Anthropic's Messages API as one of OpenAI's chat dialect, which everything behind it reads.

Text and tools only. Reference: Anthropic's API documentation, "Messages".
"""

from __future__ import annotations

import json
from typing import Any

from frontends.common import json as fields
from frontends.http.bodies import AnthropicAnswer, AnthropicMessages
from frontends.http.openai.request_fields import SAMPLING
from inferengine.errors import InvalidRequest

# What a request may say besides Anthropic's own fields, for those who know this server.
PASSED_ON = (
    *(name for name in SAMPLING if name not in ("n", "stop")),
    "cache_salt",
    "priority",
    "chat_template_kwargs",
)
# Names of the chat dialect in errors, as this dialect has them.
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "max_completion_tokens": "max_tokens"}
REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": (), "n": (1,)}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: dict[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """Raises InvalidRequest naming the field as this dialect calls it. `counting`: only the prompt matters."""
    for name, idle in REFUSED.items():
        if body.get(name) is not None and body[name] not in idle:
            raise InvalidRequest(name, "is not supported by this engine: leave it out", code="unsupported")
    chat: dict[str, Any] = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    chat |= {"model": body.get("model"), "messages": [*_system(body.get("system")), *_messages(body.get("messages"))]}
    asked = fields.read_fields(AnthropicMessages, {"messages": None, **body})
    if not counting:
        own = fields.read_fields(AnthropicAnswer, body)
        chat |= {"max_tokens": own.max_tokens, "stream": own.stream, "stop": own.stop_sequences}
    if chat["messages"][-1]["role"] == "assistant" and not chat["messages"][-1].get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    _add_tools(chat, asked)
    _add_thinking(chat, asked)
    form = asked.output_config.get("format") or body.get("output_format")
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
    """One message's blocks: results of tools are messages of their own, before what else the user says."""
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


def _add_tools(chat: dict[str, Any], asked: AnthropicMessages) -> None:
    tools = asked.tools
    if tools is not None:
        if not isinstance(tools, list):
            raise InvalidRequest("tools", "must be a list")
        chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    choice = asked.tool_choice
    if not choice:
        return
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise InvalidRequest("tool_choice.type", "must be auto, any, tool or none")
    chat["parallel_tool_calls"] = not fields.flag(choice, "disable_parallel_tool_use")


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise InvalidRequest(path, "must be a tool of the client's own, with name and input_schema", code="unsupported")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _add_thinking(chat: dict[str, Any], asked: AnthropicMessages) -> None:
    """Templates of thinking models know `enable_thinking`; others do not read it."""
    kind = asked.thinking.get("type")
    if kind is not None:
        if not isinstance(kind, str):
            raise InvalidRequest("thinking.type", "must be enabled, adaptive or disabled")
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled", **chat.get("chat_template_kwargs", {})}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name}", "must be a string")
    return value


def tool_input(arguments: str) -> dict[str, Any]:
    """The input of a call as an object; of one that was cut off in the middle, nothing."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
