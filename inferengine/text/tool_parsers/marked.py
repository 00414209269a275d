"""DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. One call is, of V3 and R1,
`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>`, and since V3.1
`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

from __future__ import annotations

import re

from inferengine.text.tool_parsers.base import CallDelta, Content, JsonValue, Part, Prose, split_at_mark

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
_NAME = re.compile(r"[^\s<>{}\"']{1,128}")


class DeepSeekParser:
    """Text outside of calls is content. A call without a name is shown as it is."""

    def __init__(self) -> None:
        self._prose = Prose()
        self._state = "text"
        self._held = ""
        self._raw: list[str] = []  # of a call whose arguments have not begun
        self._head: list[str] = []  # before the separator: a name, or the word function
        self._before: list[str] = []  # between the separator and the arguments
        self._value = JsonValue()
        self._num_calls = 0

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take more text; `final`: nothing follows. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while True:
            before, mark, self._held = split_at_mark(self._held, MARKS)
            self._take(before, parts)
            if mark is None:
                break
            self._pass(mark, parts)
        if final:
            self._take(self._held, parts)
            self._held = ""
            if self._state in ("head", "before"):
                self._end(parts)
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
        if self._state == "arguments" and mark in (CALLS, CALL, SEPARATOR):
            self._read_arguments(mark, parts)  # of a string among the arguments
        elif self._state == "head" and mark == SEPARATOR:
            self._raw.append(mark)
            self._state, self._before = "before", []
        elif self._state in ("head", "before") and mark != SEPARATOR:
            self._end(parts)
            self._prose.end_call()
            self._state = "text"
        elif self._state in ("arguments", "over") and mark in (CALL_END, CALLS_END, CALLS):
            self._num_calls += 1
            self._state = "text"
            self._prose.end_call()
        if mark == CALL and self._state in ("text", "over"):
            self._num_calls += self._state == "over"
            self._prose.begin_call()
            self._state, self._raw, self._head = "head", [mark], []
        elif mark == CALLS and self._state == "text":
            self._prose.begin_call()

    def _name(self) -> str | None:
        """The name: before the code fence, else before the separator."""
        written = "".join(self._before).strip().removesuffix("json").removesuffix("```").strip()
        name = written or "".join(self._head).strip()
        return name if _NAME.fullmatch(name) else None

    def _end(self, parts: list[Part]) -> None:
        """A call ends before its arguments begin: it has none, or is no call."""
        name = self._name() if self._state == "before" else None
        if name is None:
            self._show_raw(parts)
            return
        parts.append(CallDelta(self._num_calls, name, "{}"))
        self._num_calls += 1

    def _show_raw(self, parts: list[Part]) -> None:
        parts.append(Content("".join(self._raw)))
        self._state, self._raw = "text", []
