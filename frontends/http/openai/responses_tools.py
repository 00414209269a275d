"""Tools of the Responses API as tools of chat, and calls of them as the API tells them.

A `namespace` groups tools: each is a function named NAMESPACE__NAME for the model, and its calls are told with both
names. A `custom` tool takes a text: for the model it is a function with one string, `input`. Tools that OpenAI runs on
its own servers, such as `web_search`, are left out where the model may choose, and refused where it must not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inferengine.errors import InvalidRequest
from inferengine.text.tool_parsers.custom import as_function

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
    """`definitions`: what the model is shown, as chat has it. `origins`: by the name shown. `tools`: those of the
    request that it can call."""

    definitions: list[dict[str, Any]]
    origins: dict[str, Origin]
    tools: list[Any]


def read_response_tools(tools: Any, choice: Any) -> ResponseTools:
    """Read `tools`. Raises InvalidRequest naming the place."""
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
    """Return `tool_choice` as chat has it."""
    if not isinstance(choice, dict):
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
    return choice if "function" in choice else _named(choice)


def shown_name(item: dict[str, Any]) -> Any:
    """Return the name of a tool or of a call as the model is shown it."""
    name, namespace = item.get("name"), item.get("namespace")
    return f"{namespace}{SEPARATOR}{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def _is_free(choice: Any) -> bool:
    """Whether the model may answer without a call."""
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
