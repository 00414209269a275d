"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, and since Mistral Small 3.2 and Magistral
`[TOOL_CALLS]f[ARGS]{...}` for each call, with `[CALL_ID]...` in between where the model writes one."""

from __future__ import annotations

from inferengine.text.tool_parsers.base import CallDelta, CallObject, Content, JsonValue, Part, shown_end, split_at_mark

MARK, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """Text before the mark is content. After it: a list of calls, or a name and its arguments."""

    def __init__(self) -> None:
        self._state = "text"
        self._held = ""
        self._name = ""
        self._call = CallObject()
        self._value = JsonValue()
        self._sent = 0
        self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        if self._state == "text":
            before, mark, self._held = split_at_mark(self._held + text, (MARK,))
            if mark is None and final:
                before, self._held = before + shown_end(self._held, cut=cut), ""
            if before:
                parts.append(Content(before))
            if mark is None:
                return parts
            self._state, text, self._held = "mark", self._held, ""
        for character in text:
            self._read(character, parts)
        self._take(parts, cut=cut)
        if final and self._state == "name" and self._name.strip():
            name, args, _ = self._name.removeprefix(MARK).partition(ARGS)
            if not cut:
                parts.append(Content(MARK + self._name))
            elif args:
                parts.append(CallDelta(self._num_calls, name.partition(CALL_ID)[0].strip(), ""))
        return parts

    def _read(self, character: str, parts: list[Part]) -> None:
        match self._state:
            case "mark" | "name":
                self._read_name(character)
            case "between":
                if character == "{":
                    self._call = CallObject()
                    self._call.push(character)
                    self._state = "call"
            case "call":
                self._call.push(character)
                if self._call.complete or self._call.broken:
                    self._take(parts)
                    self._num_calls += self._call.begun
                    self._state = "between"
            case "arguments":
                if self._value.push(character) == "end":
                    self._take(parts)
                    self._num_calls += 1
                    self._state, self._name = "name", ""

    def _read_name(self, character: str) -> None:
        if self._state == "mark" and character == "[":
            self._state = "between"
            return
        if self._state == "mark" and not character.isspace():
            self._state = "name"
        self._name += character
        if character == "{" and self._state == "name":
            self._name = self._name[:-1].removeprefix(MARK).partition(ARGS)[0].partition(CALL_ID)[0].strip()
            self._state, self._value, self._sent = "arguments", JsonValue(), 0
            self._value.push(character)

    def _take(self, parts: list[Part], *, cut: bool = False) -> None:
        if self._state == "call":
            name, arguments = self._call.take(cut=cut)
        elif self._state == "arguments":
            name, arguments = (None if self._sent else self._name), "".join(self._value.raw[self._sent :])
            self._sent = len(self._value.raw)
        else:
            return
        if name is not None or arguments:
            parts.append(CallDelta(self._num_calls, name, arguments))
