"""Llama 3.1 and later: the whole message is `{"name": "f", "parameters": {...}}`, several with `; ` between them,
with or without `<|python_tag|>` before. A message that begins otherwise is text."""

from __future__ import annotations

from inferengine.text.tool_parsers.base import CallDelta, CallObject, Content, Part

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser:
    """Decides by the first character that is no white space. An object without a name and arguments is an answer in
    JSON, and so is one that was cut off before its arguments, unless the tag is before it."""

    def __init__(self) -> None:
        self._state = "start"
        self._pending = ""  # text that may be a call or content
        self._call = CallObject(needs_arguments=True)
        self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        for place, character in enumerate(text):
            if self._state == "text":
                parts.append(Content(text[place:]))
                return parts
            self._pending += character
            if self._state == "call":
                self._read(character, parts)
            elif self._state == "between":
                if character not in _BETWEEN:
                    self._begin(character == "{", parts)
            elif not TAG.startswith(begin := self._pending.lstrip()) and (body := begin.removeprefix(TAG).lstrip()):
                self._begin(body == "{", parts)
        message = self._pending.lstrip()
        is_tagged = message.startswith(TAG) or (message != "" and TAG.startswith(message))  # a tag may be cut off, too
        if self._state == "call":
            self._take(parts, cut=cut and is_tagged)
        if final and self._state in ("start", "call") and not self._call.begun and not (cut and is_tagged):
            self._show(parts)
        return parts

    def _begin(self, is_call: bool, parts: list[Part]) -> None:
        if not is_call:
            self._show(parts)
            return
        self._state, self._call = "call", CallObject(needs_arguments=True)
        self._call.push("{")

    def _read(self, character: str, parts: list[Part]) -> None:
        call = self._call
        call.push(character)
        if call.complete:
            self._take(parts)
        if call.broken and not call.begun:
            self._show(parts)
        elif call.complete or call.broken:
            self._state, self._pending = "between", ""
            self._num_calls += 1

    def _take(self, parts: list[Part], *, cut: bool = False) -> None:
        name, arguments = self._call.take(cut=cut)
        if name is not None or arguments:
            parts.append(CallDelta(self._num_calls, name, arguments))
        if self._call.begun:
            self._pending = ""

    def _show(self, parts: list[Part]) -> None:
        self._state = "text"
        if self._pending:
            parts.append(Content(self._pending))
