"""Reasoning apart from the answer, for models that write `<think> ... </think>` before they answer."""

from __future__ import annotations

from inferengine.text.message_parts import Content, Part, Reasoning
from inferengine.text.tool_parsers.held_text import split_at_mark

OPEN, CLOSE = "<think>", "</think>"


class ReasoningReader:
    """Splits one output. `inside`: the prompt has opened the tag already. A tag further on in the answer is text, and
    white space next to the tags belongs to neither side."""

    def __init__(self, *, inside: bool) -> None:
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._begun = False  # of the side that is being written, something but space has been shown

    def push(self, text: str, final: bool = False) -> list[Part]:
        parts: list[Part] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begin = text.lstrip()
            if begin.startswith(OPEN):
                self._state, text = "reasoning", begin[len(OPEN) :]
            elif OPEN.startswith(begin) and not final:
                self._held = text
                return parts
            else:
                self._state, self._begun = "answer", True
        if self._state == "reasoning":
            before, mark, rest = split_at_mark(text, (CLOSE,))
            if final and mark is None:
                before, rest = before + rest, ""
            if not self._begun:
                before = before.lstrip()
            shown = before.rstrip()
            if shown:
                self._begun = True
                parts.append(Reasoning(shown))
            if mark is None:
                self._held = before[len(shown) :] + rest
                return parts
            self._state, self._begun, text = "answer", False, rest
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if text:
            parts.append(Content(text))
        return parts
