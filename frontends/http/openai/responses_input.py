"""Items of the Responses API: what a request brings, and what they are as messages of chat."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from frontends.http.openai.response_store import ResponseStore
from frontends.http.openai.responses_tools import shown_name
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text.tool_parsers.custom import custom_arguments

Item = dict[str, Any]
Lookup = Callable[[str], Awaitable[Item | None]]
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
    """Return the id of a response's item. It has the response's in it, so that a reference to it can be looked up."""
    return f"{PREFIXES[kind]}_{response_id.partition('_')[2]}{'i' if of_input else ''}{index}"


async def read_items(value: Any, lookup: Lookup) -> list[Item]:
    """Read `input`: a text, or a list of items. References are replaced by their items. Raises InvalidRequest."""
    if isinstance(value, str) and value:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
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
        elif kind in PREFIXES:
            items.append({**item, "type": kind})
        else:
            raise InvalidRequest(path, f"items of type {str(kind)[:40]} cannot be read", code="unsupported")
    return items


def lookup_in(store: ResponseStore, tenant: str) -> Lookup:
    """Find items of stored responses, of their input or their output, by id."""

    async def lookup(name: str) -> Item | None:
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


def with_ids(items: Iterable[Item], response_id: str) -> list[Item]:
    """Return the items, each with an id: its own, or one of its response."""
    return [
        item if item.get("id") else {**item, "id": item_id(item["type"], response_id, place, of_input=True)}
        for place, item in enumerate(items)
    ]


def as_messages(before: Iterable[Item], items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the conversation so far and the request's own items as messages. Raises InvalidRequest naming the place
    in `input`."""
    messages: list[dict[str, Any]] = []
    for item in before:
        _add_item(item, messages, "input")
    for place, item in enumerate(items):
        _add_item(item, messages, f"input[{place}]")
    return messages or [{"role": "user", "content": ""}]


def _add_item(item: Item, messages: list[dict[str, Any]], path: str) -> None:
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
