"""Calls between special tokens: around all of them, around each, and before its arguments.

DeepSeek, between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. One call is, of V3 and R1,
`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>`, and since V3.1
`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

Kimi K2 (docs/tool_call_guidance.md of its repository), between `<|tool_calls_section_begin|>` and
`<|tool_calls_section_end|>`: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. 0 is
the number of the call.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from inferengine.text.tool_parsers.base import CallDelta, Content, JsonValue, Part, Prose, split_at_mark


class Marks(NamedTuple):
    """The special tokens of one format. `has_ids`: what is before a call's arguments is an id, which has the name."""

    calls: str
    calls_end: str
    call: str
    separator: str
    call_end: str
    has_ids: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them."""
        return self.calls, self.calls_end, self.call, self.separator, self.call_end


DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
)
KIMI = Marks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", has_ids=True,
)  # fmt: skip
_NAME = re.compile(r"[^\s<>{}\"']{1,128}")
_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class MarkedParser:
    """Text outside of calls is content. A call without a name is shown as it is."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._prose = Prose()
        self._state = "text"
        self._held = ""
        self._raw: list[str] = []  # of a call whose arguments have not begun
        self._head: list[str] = []  # before the separator: a name, an id, or the word function
        self._before: list[str] = []  # between the separator and the arguments
        self._value = JsonValue()
        self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while True:
            before, mark, self._held = split_at_mark(self._held, self._marks.texts)
            self._take(before, parts)
            if mark is None:
                break
            self._pass(mark, parts)
        if final:
            if self._state == "text":
                self._prose.show_end(self._held, parts, cut=cut)
            else:
                self._take(self._held, parts)
            self._held = ""
            if self._state in ("head", "before"):
                self._end(parts, cut=cut)
            self._prose.finish(parts)
        return parts

    def _take(self, text: str, parts: list[Part]) -> None:
        if self._state == "text":
            self._prose.show(text, parts)
        elif self._state == "head":
            self._head.append(text)
            self._raw.append(text)
        elif self._state == "before":
            self._read_before(text, parts)
        elif self._state == "arguments":
            self._read_arguments(text, parts)

    def _read_before(self, text: str, parts: list[Part]) -> None:
        place = text.find("{")
        if place < 0:
            self._before.append(text)
            self._raw.append(text)
            return
        self._before.append(text[:place])
        self._raw.append(text[:place])
        name = self._name()
        if name is None:
            self._raw.append(text[place:])
            self._show_raw(parts)
            return
        parts.append(CallDelta(self._num_calls, name, ""))
        self._state, self._value = "arguments", JsonValue()
        self._read_arguments(text[place:], parts)

    def _read_arguments(self, text: str, parts: list[Part]) -> None:
        for place, character in enumerate(text):
            if self._value.push(character) == "end":
                parts.append(CallDelta(self._num_calls, None, text[: place + 1]))
                self._state = "over"
                return
        if text:
            parts.append(CallDelta(self._num_calls, None, text))

    def _pass(self, mark: str, parts: list[Part]) -> None:
        marks = self._marks
        if self._state == "arguments" and mark in (marks.calls, marks.call, marks.separator):
            self._read_arguments(mark, parts)  # of a string among the arguments
        elif self._state == "head" and mark == marks.separator:
            self._raw.append(mark)
            self._state, self._before = "before", []
        elif self._state in ("head", "before") and mark != marks.separator:
            self._end(parts)
            self._prose.end_call()
            self._state = "text"
        elif self._state in ("arguments", "over") and mark in (marks.call_end, marks.calls_end, marks.calls):
            self._num_calls += 1
            self._state = "text"
            self._prose.end_call()
        if mark == marks.call and self._state in ("text", "over"):
            self._num_calls += self._state == "over"
            self._prose.begin_call()
            self._state, self._raw, self._head = "head", [mark], []
        elif mark == marks.calls and self._state == "text":
            self._prose.begin_call()

    def _name(self, *, cut: bool = False) -> str | None:
        """Return the name: before the code fence, else before the separator."""
        head = "".join(self._head).strip()
        if self._marks.has_ids:
            found = _ID.fullmatch(head)
            name = "" if found is None else found[1]
        else:
            line = "".join(self._before).lstrip().partition("\n")[0] if cut else "".join(self._before)
            name = line.strip().removesuffix("json").removesuffix("```").strip() or head
        return name if _NAME.fullmatch(name) else None

    def _has_whole_name(self) -> bool:
        """Return whether no more of the name can come: it is an id, or a line before the code fence, or all of the
        head."""
        before = "".join(self._before)
        is_head = not before.strip() and "".join(self._head).strip() != "function"
        return self._marks.has_ids or is_head or "\n" in before.lstrip()

    def _end(self, parts: list[Part], *, cut: bool = False) -> None:
        """End a call before its arguments begin: it has none, is no call, or was cut off."""
        is_named = self._state == "before" and (not cut or self._has_whole_name())
        name = self._name(cut=cut) if is_named else None
        if name is None:
            if not cut:
                self._show_raw(parts)
            return
        parts.append(CallDelta(self._num_calls, name, "" if cut else "{}"))
        self._num_calls += 1

    def _show_raw(self, parts: list[Part]) -> None:
        parts.append(Content("".join(self._raw)))
        self._state, self._raw = "text", []
