"""Read the items and tools of a Responses request, and convert them to messages and tools of the chat API.

A `namespace` groups tools: the model sees each as a function named NAMESPACE__NAME; its calls are reported with both
names. A `custom` tool takes a text: for the model it is a function with one string, `input`. Tools that OpenAI runs on
its own servers, such as `web_search`, are left out where the model may choose, and refused where it must not.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from frontends.http.openai.response_store import ResponseStore
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text.tool_parsers.custom import as_function, custom_arguments

ResponseItem = dict[str, Any]
FindItem = Callable[[str], Awaitable[ResponseItem | None]]
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})i?\d{1,6}")


def item_id(kind: str, response_id: str, index: int, *, of_input: bool = False) -> str:
    """Return the id of a response's item. It contains the response's id, so that a reference can be resolved."""
    return f"{PREFIXES[kind]}_{response_id.partition('_')[2]}{'i' if of_input else ''}{index}"


async def read_items(value: Any, lookup: FindItem) -> list[ResponseItem]:
    """Read `input`: a text, or a list of items. References are replaced by their items. Raises InvalidRequest."""
    if isinstance(value, str) and value:
        return [_as_listed({"type": "message", "role": "user", "content": value})]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", "must be a text or a list of items, not empty")
    items = []
    for place, item in enumerate(value):
        path = f"input[{place}]"
        if not isinstance(item, dict):
            raise InvalidRequest(path, "must be an object with a type, such as message")
        kind = item.get("type") or "message"
        if kind == "item_reference":
            found = await lookup(item["id"]) if isinstance(item.get("id"), str) else None
            if found is None:
                raise InvalidRequest(path, "there is no such item: they are kept for an hour, with their response")
            items.append(found)
        elif isinstance(kind, str) and kind in PREFIXES:
            items.append(_as_listed({**item, "type": kind}))
        else:
            raise InvalidRequest(path, f"items of type {str(kind)[:40]} cannot be read", code="unsupported")
    return items


def _as_listed(item: ResponseItem) -> ResponseItem:
    """Return an item as whoever lists it expects it: with a status, and a message with its text in a part."""
    item = {"status": "completed", **item}
    text = item.get("content")
    if item["type"] != "message" or not isinstance(text, str):
        return item
    if item.get("role") == "assistant":
        return {**item, "content": [{"type": "output_text", "text": text, "annotations": []}]}
    return {**item, "content": [{"type": "input_text", "text": text}]}


def lookup_in(store: ResponseStore, tenant: str) -> FindItem:
    """Return a function that finds input and output items of stored responses by id."""

    async def lookup(name: str) -> ResponseItem | None:
        found = _ITEM_ID.fullmatch(name)
        if found is None:
            return None
        try:
            stored = await store.get(f"resp_{found[1]}", tenant)
        except InferEngineError:
            return None
        items = [*stored.items, *stored.document["output"]]
        return next((item for item in items if item.get("id") == name), None)

    return lookup


def with_ids(items: Iterable[ResponseItem], response_id: str) -> list[ResponseItem]:
    """Return the items, each with an id: its own, or one of its response."""
    return [
        item if item.get("id") else {**item, "id": item_id(item["type"], response_id, place, of_input=True)}
        for place, item in enumerate(items)
    ]


def as_messages(before: Iterable[ResponseItem], items: Iterable[ResponseItem]) -> list[dict[str, Any]]:
    """Return the conversation so far and the request's own items as messages. Raises InvalidRequest naming the place
    in `input`."""
    messages: list[dict[str, Any]] = []
    for item in before:
        _add_item(item, messages, "input")
    for place, item in enumerate(items):
        _add_item(item, messages, f"input[{place}]")
    return messages or [{"role": "user", "content": ""}]


def _add_item(item: ResponseItem, messages: list[dict[str, Any]], path: str) -> None:
    kind = item["type"]
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{path}.content")})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            if not isinstance(item.get("input"), str):
                raise InvalidRequest(f"{path}.input", "must be a string")
            arguments = custom_arguments(item["input"])
        function = {"name": shown_name(item), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _content(item.get("output"), f"{path}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    # Reasoning is left out: what a model thought in earlier turns is not shown to it again.


def _content(content: Any, path: str) -> Any:
    """Return a content as the chat API has it: text or parts. A refusal in the history counts as text."""
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


# -- tools -------------------------------------------------------------------------------------------------------------


SEPARATOR = "__"
# Tools that a server runs. A model that may choose goes without them.
HOSTED = (
    "web_search",
    "web_search_preview",
    "web_search_2025_08_26",
    "web_search_preview_2025_03_11",
    "image_generation",
    "tool_search",
)


class Origin(NamedTuple):
    """The tool behind a function's name. `kind`: function or custom."""

    kind: str
    name: str
    namespace: str | None = None


class ResponseTools(NamedTuple):
    """The tools of a request. `definitions`: as chat tools, for the model. `origins`: by the name that the model sees.
    `tools`: those of the request that can be called."""

    definitions: list[dict[str, Any]]
    origins: dict[str, Origin]
    tools: list[Any]


def read_response_tools(tools: Any, choice: Any) -> ResponseTools:
    """Read `tools`. Raises InvalidRequest naming the tool at fault."""
    if tools is None:
        return ResponseTools([], {}, [])
    if not isinstance(tools, list):
        raise InvalidRequest("tools", "must be a list")
    found = ResponseTools([], {}, [])
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in HOSTED and _is_free(choice):
            continue
        found.tools.append(tool)
        if kind != "namespace":
            _add(found, tool, None, path)
            continue
        inner, name = tool.get("tools"), tool.get("name")
        if not isinstance(inner, list) or not isinstance(name, str) or not name:
            raise InvalidRequest(path, "a namespace must have a name and a list of tools")
        for position, one in enumerate(inner):
            _add(found, one, name, f"{path}.tools[{position}]")
    return found


def read_response_choice(choice: Any) -> Any:
    """Convert `tool_choice` to that of the chat API. Raises InvalidRequest naming the field."""
    if not isinstance(choice, dict):
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest("tool_choice", 'must be none, auto, required or {"type": "function", "name"}')
        return choice
    if choice.get("type") == "allowed_tools":
        named = choice.get("tools")
        if not isinstance(named, list):
            raise InvalidRequest("tool_choice", "allowed_tools must have a mode and tools")
        kept = [one for one in named if not (isinstance(one, dict) and one.get("type") in HOSTED)]
        return {"type": "allowed_tools", "mode": choice.get("mode"), "tools": [_named(one) for one in kept]}
    if choice.get("type") not in ("function", "custom"):
        kind = str(choice.get("type"))[:40]
        raise InvalidRequest("tool_choice", f"tools of type {kind} cannot be called here", code="unsupported")
    if "function" not in choice and not isinstance(choice.get("name"), str):
        raise InvalidRequest("tool_choice.name", "must be the name of a tool")
    return choice if "function" in choice else _named(choice)


def shown_name(item: dict[str, Any]) -> Any:
    """Return the name of a tool, or of a call, that the model sees."""
    name, namespace = item.get("name"), item.get("namespace")
    return f"{namespace}{SEPARATOR}{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def _is_free(choice: Any) -> bool:
    """Return whether the model may answer without a call."""
    if isinstance(choice, dict):
        return choice.get("type") == "allowed_tools" and choice.get("mode") == "auto"
    return choice in (None, "auto", "none")


def _named(choice: Any) -> dict[str, Any]:
    name = shown_name(choice) if isinstance(choice, dict) else None
    return {"type": "function", "function": {"name": name}}


def _add(found: ResponseTools, tool: Any, namespace: str | None, path: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        message = "must be of type function, custom or namespace: this server has no tools of its own"
        raise InvalidRequest(path, message, code="unsupported")
    name = shown_name({**tool, "namespace": namespace})
    function = {"name": name, **_function(tool)} if kind == "function" else {"name": name, **as_function(tool, path)}
    found.definitions.append({"type": "function", "function": function})
    if isinstance(name, str):
        found.origins[name] = Origin(kind, str(tool["name"]), namespace)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
