"""Hermes and Qwen: `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`, once for each call.

Nous Research's Hermes function calling; Qwen 2.5 and Qwen 3 were trained on the same marks.
"""

from __future__ import annotations

from inferengine.text.tool_parsers.base import CallDelta, CallObject, Content, Part, Prose, split_at_mark

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = (OPEN, CLOSE)


class HermesParser:
    """Text between calls is content; white space right before and after a call belongs to the format."""

    def __init__(self) -> None:
        self._held = ""
        self._call: CallObject | None = None
        self._num_calls = 0
        self._prose = Prose()

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while self._held:
            before, mark, self._held = split_at_mark(self._held, MARKS[:1] if self._call is None else MARKS[1:])
            if self._call is None:
                self._prose.show(before, parts)
            else:
                self._read(self._call, before, parts)
            if mark == OPEN:
                self._prose.begin_call()
                self._call = CallObject()
            elif mark == CLOSE:
                self._close(parts, mark)
            else:
                break
        if final:
            if self._call is not None:
                self._read(self._call, self._held, parts, cut=cut)
                self._close(parts, "", cut=cut)
            else:
                self._prose.show_end(self._held, parts, cut=cut)
                self._prose.finish(parts)
            self._held = ""
        return parts

    def _read(self, call: CallObject, text: str, parts: list[Part], *, cut: bool = False) -> None:
        for character in text:
            if call.complete or call.broken:
                call.raw.append(character)
            else:
                call.push(character)
        name, arguments = call.take(cut=cut)
        if name is not None or arguments:
            parts.append(CallDelta(self._num_calls, name, arguments))

    def _close(self, parts: list[Part], mark: str, *, cut: bool = False) -> None:
        """End a call, at its mark or where the output ends. Without a name it was no call: its text is content, but
        not where the output was cut off before the name."""
        call, self._call = self._call, None
        if call is None:
            return
        if call.begun:
            self._num_calls += 1
            self._prose.end_call()
        elif not cut or call.broken:
            parts.append(Content(f"{OPEN}{''.join(call.raw)}{mark}"))
