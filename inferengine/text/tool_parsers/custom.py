"""Translate custom tools, which take a text: the model is shown a function with one string argument, `input`.

Where a grammar governs the calls, it enforces a tool's regular expression. A Lark grammar is only described to the
model: the text stands in a JSON string, whose escapes that grammar does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from inferengine.errors import InvalidRequest
from inferengine.text.tool_parsers.base import CallDelta, Part

INPUT = "input"


def as_function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the description and parameters of the function that stands for a custom tool. `path`: where the tool is in
    the request, for errors. Raises InvalidRequest for a format that is not known."""
    form = tool.get("format") or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    description = tool.get("description") if isinstance(tool.get("description"), str) else ""
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise InvalidRequest(f"{path}.format", "must be of type text or grammar")
    if form["type"] == "grammar":
        grammar = form.get("grammar", form)  # the chat route nests it one level deeper than Responses
        syntax, definition = (
            (grammar.get("syntax"), grammar.get("definition")) if isinstance(grammar, dict) else (None, None)
        )
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise InvalidRequest(f"{path}.format", "a grammar must have a syntax, lark or regex, and a definition")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        description = f"{description}\n\nThe input must match this {syntax} grammar:\n{definition}".strip()
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {**({"description": description} if description else {}), "parameters": parameters}


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text in such arguments. Arguments of another shape, or cut off, are returned as they are."""
    try:
        value = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments


class CustomCalls:
    """Turns calls of the functions that stand for custom tools back into calls with a text. The text comes whole, at
    the end of its call: before, its JSON string cannot be read."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names of the custom tools."""
        self._names = frozenset(names)
        self._call: int | None = None  # the one under way
        self._arguments: list[str] = []

    def push(self, parts: Iterable[Part], final: bool = False) -> list[Part]:
        """Take more parts; `final`: nothing follows. Returns them, those of custom calls replaced."""
        shown: list[Part] = []
        for part in parts:
            if isinstance(part, CallDelta) and part.call == self._call:
                self._arguments.append(part.arguments)
                continue
            shown += self._end()
            if isinstance(part, CallDelta) and part.name in self._names:
                self._call, self._arguments = part.call, [part.arguments]
                part = CallDelta(part.call, part.name, "", is_custom=True)
            shown.append(part)
        return [*shown, *self._end()] if final else shown

    def _end(self) -> list[Part]:
        if self._call is None:
            return []
        call, self._call = self._call, None
        return [CallDelta(call, None, custom_input("".join(self._arguments)), is_custom=True)]
