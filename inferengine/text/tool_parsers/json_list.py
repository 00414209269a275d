"""A mark, and then a list of calls or one call: `<|tool_call|>[{"name": "f", "arguments": {...}}]`.

Granite 3 ends the list with the answer, Phi-4-mini with `<|/tool_call|>`; Granite 3.0 writes `<tool_call>`, Phi-4-mini
`functools` where it follows its training instead of its template. Cohere's models name the keys otherwise (cohere.py).
"""

from __future__ import annotations

from inferengine.text.tool_parsers.base import CallDelta, CallObject, Part, Prose, shown_end, split_at_mark

GRANITE = ("<|tool_call|>", "<tool_call>")
PHI4 = ("<|tool_call|>", "functools[")
COHERE = ("<|START_ACTION|>",)
CLOSES = ("<|/tool_call|>", "</tool_call>", "<|END_ACTION|>")


class JsonListParser:
    """Text before a mark is content; after it come calls, until something else than an object, a comma or a bracket."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._prose = Prose()
        self._state = "text"
        self._held = ""
        self._raw: list[str] = []  # since the mark, until a call is certain
        self._call = CallObject()
        self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while self._held:
            if self._state != "call":
                marks = (*self._marks, *CLOSES)
                before, mark, self._held = split_at_mark(self._held, marks)
                rest = self._read_outside(before, parts)
                if rest:  # a call has begun
                    self._held = rest + (mark or "") + self._held
                    continue
                if mark is None:
                    break
                self._pass(mark, parts)
                continue
            self._read_call(parts)
        if final:
            if self._state == "call":
                self._take(parts, cut=cut)
            elif self._state == "text":
                self._prose.show_end(self._held, parts, cut=cut)
            else:
                self._read_outside(shown_end(self._held, cut=cut), parts)
            self._held = ""
            is_cut_off = cut and self._state != "text"  # a call was to come
            if (not self._call.begun or self._state == "between") and not is_cut_off:
                self._show_raw(parts)
            self._prose.finish(parts)
        return parts

    def _read_outside(self, text: str, parts: list[Part]) -> str:
        """Read text before the next mark. Returns what follows the beginning of a call."""
        if self._state == "text":
            self._prose.show(text, parts)
            return ""
        for place, character in enumerate(text):
            if character == "{":
                self._state, self._call = "call", CallObject()
                return text[place:]
            self._raw.append(character)
            if character not in " \t\r\n,[]":
                self._show_raw(parts)
                self._prose.show(text[place + 1 :], parts)
                break
        return ""

    def _pass(self, mark: str, parts: list[Part]) -> None:
        if mark in self._marks:
            self._show_raw(parts)
            self._prose.begin_call()
            self._state, self._raw = "between", [mark]
        elif self._state == "between":
            self._raw.append(mark)
            if self._raw[0] in self._marks:
                self._show_raw(parts)
            self._state, self._raw = "text", []
        else:
            self._prose.show(mark, parts)

    def _read_call(self, parts: list[Part]) -> None:
        call = self._call
        for place, character in enumerate(self._held):
            call.push(character)
            if call.complete or call.broken:
                self._held = self._held[place + 1 :]
                self._take(parts)
                if call.begun:
                    self._num_calls += 1
                    self._prose.end_call()
                    self._state, self._raw = "between", [""]
                else:
                    self._show_raw(parts)
                return
        self._held = ""
        self._take(parts)

    def _take(self, parts: list[Part], *, cut: bool = False) -> None:
        name, arguments = self._call.take(cut=cut)
        if name is not None or arguments:
            parts.append(CallDelta(self._num_calls, name, arguments))

    def _show_raw(self, parts: list[Part]) -> None:
        """Show what was no call. What stands between calls (`raw` begins with an empty text) is part of the format."""
        if self._state == "call" and not self._call.begun:
            self._raw += self._call.raw
        raw = "".join(self._raw)
        if self._raw[:1] == [""]:
            raw = raw.lstrip(" \t\r\n,[]")
        self._state, self._raw = "text", []
        if raw:
            self._prose.show(raw, parts)
