"""`functions` and `function_call`, which chat had before tools, read as tools. One call is answered in that shape."""

from __future__ import annotations

import re
from typing import Any

from inferengine.errors import InferEngineError, InvalidRequest


def asks_in_functions(body: dict[str, Any]) -> bool:
    """Whether calls are to be answered as `function_call`. Raises InvalidRequest where both shapes are used."""
    if not isinstance(body.get("functions"), list | None):
        raise InvalidRequest("functions", "must be a list of objects with name and parameters")
    if not body.get("functions"):
        return False
    if body.get("tools"):
        raise InvalidRequest("functions", "cannot be combined with tools, which is the newer name")
    return True


def as_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with `functions`, `function_call` and messages of either as tools, tool_choice and tool calls."""
    read = dict(body)
    functions, choice = read.pop("functions", None), read.pop("function_call", None)
    if functions:
        read["tools"] = [{"type": "function", "function": function} for function in functions]
        read["parallel_tool_calls"] = False  # the old shape has room for one
        if choice is not None:
            read["tool_choice"] = _choice(choice)
    elif choice not in (None, "none", "auto"):
        raise InvalidRequest("function_call", "needs functions to choose from")
    if isinstance(messages := read.get("messages"), list):
        read["messages"] = _messages(messages)
    return read


def rename_place(error: InferEngineError) -> None:
    """Name the place of an error as a body with `functions` does."""
    if error.field == "tool_choice":
        error.field = "function_call"
    elif error.field is not None:
        error.field = re.sub(r"^tools(\[\d+\])?(\.function)?", r"functions\1", error.field)


def _choice(choice: Any) -> Any:
    if choice in ("none", "auto"):
        return choice
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise InvalidRequest("function_call", 'must be none, auto or {"name": …}')
    return {"type": "function", "function": {"name": choice["name"]}}


def _messages(messages: list[Any]) -> list[Any]:
    """A call gets an id of its own, which the next result of that function refers to."""
    read: list[Any] = []
    num_calls = 0
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "function":
            result = {name: value for name, value in message.items() if name != "role"}
            read.append({"role": "tool", "tool_call_id": f"call_{num_calls}", **result})
        elif isinstance(message, dict) and message.get("function_call") is not None:
            num_calls += 1
            call = {"id": f"call_{num_calls}", "type": "function", "function": message["function_call"]}
            said = {name: value for name, value in message.items() if name != "function_call"}
            read.append({**said, "tool_calls": [call]})
        else:
            read.append(message)
    return read
