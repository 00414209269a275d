"""Calls whose arguments are marked one by one, with their values as plain text:

Qwen3-Coder: `<tool_call>\\n<function=f>\\n<parameter=city>\\nParis\\n</parameter>\\n</function>\\n</tool_call>`.
Seed-OSS: the same within `<seed:tool_call>`. MiniMax-M2, several in one block:
`<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="city">Paris</parameter>\\n</invoke>\\n</minimax:tool_call>`.
GLM-4.5: `<tool_call>f\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value>\\n</tool_call>`.

A value is text where the tool's schema says that the parameter is a string; else it is read as JSON, and what is no
JSON is text. Each argument leaves when its end is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Prose, split_at_mark

_NAME = re.compile(r"[^\s<>{}\"']{1,128}")
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some models write them


@dataclass(frozen=True)
class XmlStyle:
    """The marks of one format. Empty: it has no such mark."""

    function: str  # before a name; empty: the name follows `opens`
    function_end: str
    name_end: str  # not part of the call's own text; empty: the name ends at the next mark
    key: str
    key_end: str
    value: str
    value_end: str
    opens: str = "<tool_call>"
    closes: str = "</tool_call>"


QWEN3_CODER = XmlStyle("<function=", "</function>", ">", "<parameter=", ">", "", "</parameter>")
SEED_OSS = XmlStyle(
    "<function=", "</function>", ">", "<parameter=", ">", "", "</parameter>", "<seed:tool_call>", "</seed:tool_call>"
)
MINIMAX_M2 = XmlStyle(
    '<invoke name="', "</invoke>", '">', '<parameter name="', '">', "", "</parameter>", "<minimax:tool_call>",
    "</minimax:tool_call>",
)  # fmt: skip
GLM45 = XmlStyle("", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class XmlParser:
    """Parses one style. `strings`: by function, the parameters that are strings."""

    def __init__(self, style: XmlStyle, strings: Mapping[str, Collection[str]]) -> None:
        self._style, self._strings = style, strings
        self._prose = Prose()
        self._state = "text"
        self._held = ""  # text that may begin a mark
        self._raw: list[str] = []  # of a call without a name yet: shown if it is none
        self._text: list[str] = []  # of the name, key or value that is being read
        self._name = self._key = ""
        self._num_calls = self._num_arguments = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while True:
            before, mark, self._held = split_at_mark(self._held, self._marks())
            self._take(before, parts)
            if mark is None:
                break
            self._pass(mark, parts)
        if final:
            if self._state in ("text", "after"):
                self._prose.show_end(self._held, parts, cut=cut)
            else:
                self._take(self._held, parts)
            self._held = ""
            self._finish(parts, cut=cut)
        return parts

    def _marks(self) -> tuple[str, ...]:
        style = self._style
        marks: tuple[str, ...] = {
            "text": (style.opens, style.function),
            "open": (style.function, style.closes),
            "name": (style.name_end,) if style.name_end else (style.key, style.closes),
            "body": (style.key, style.function_end, style.closes),
            "key": (style.key_end, style.closes),
            "before value": (style.value, style.closes),
            "value": (style.value_end,),
            "after": (style.function, style.closes, style.opens),
        }[self._state]
        return tuple(filter(None, marks))

    def _take(self, text: str, parts: list[Part]) -> None:
        """Take text before the next mark."""
        if self._state in ("text", "after"):
            self._prose.show(text, parts)
        elif self._state in ("name", "key", "value"):
            self._text.append(text)
        if self._state in ("open", "name"):
            self._raw.append(text)

    def _pass(self, mark: str, parts: list[Part]) -> None:
        style, state = self._style, self._state
        if state in ("text", "after"):
            if mark == style.closes:
                self._state = "text"
                return
            self._prose.begin_call()
            self._raw, self._text = [mark], []
            self._state = "name" if mark == style.function or not style.function else "open"
        elif state in ("open", "name"):
            self._raw.append(mark)
            if state == "open" and mark == style.function:
                self._state = "name"
            elif state == "name":
                self._begin("".join(self._text).strip(), mark, parts)
            else:
                self._show_raw(parts)
        elif mark == style.closes or (state == "body" and mark == style.function_end):
            self._end(parts)
            self._state = "text" if mark == style.closes else "after"
        elif state == "body":
            self._state, self._text = "key", []
        elif state == "key":
            self._key, self._text = "".join(self._text).strip(), []
            self._state = "before value" if style.value else "value"
        elif state == "before value":
            self._state, self._text = "value", []
        else:
            self._add("".join(self._text), parts)
            self._state = "body"

    def _begin(self, name: str, mark: str, parts: list[Part]) -> None:
        """Begin a call whose name has been read, up to `mark`."""
        if not _NAME.fullmatch(name):
            self._show_raw(parts)
            return
        self._name, self._num_arguments, self._raw = name, 0, []
        parts.append(CallDelta(self._num_calls, name, ""))
        self._state, self._text = "body", []
        if mark == self._style.key:
            self._state = "key"
        elif mark == self._style.closes:
            self._end(parts)
            self._state = "text"

    def _add(self, value: str, parts: list[Part]) -> None:
        value = value.removeprefix("\n").removesuffix("\n")
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        written = _as_json(value, is_string=self._key in self._strings.get(self._name, ()))
        parts.append(CallDelta(self._num_calls, None, f"{before}{_dumps(self._key)}: {written}"))

    def _end(self, parts: list[Part]) -> None:
        parts.append(CallDelta(self._num_calls, None, "}" if self._num_arguments else "{}"))
        self._num_calls += 1
        self._prose.end_call()

    def _show_raw(self, parts: list[Part]) -> None:
        """Show as text what was no call."""
        parts.append(Content("".join(self._raw)))
        self._state, self._raw = "text", []

    def _finish(self, parts: list[Part], *, cut: bool) -> None:
        if cut and self._state != "text":
            self._finish_cut(parts)
        elif self._state in ("open", "name"):
            name = "".join(self._text).strip()
            if self._state == "name" and not self._style.name_end and _NAME.fullmatch(name):
                self._begin(name, self._style.closes, parts)
            else:
                self._show_raw(parts)
        elif self._state == "body":  # only the closing marks are missing
            self._end(parts)
        self._prose.finish(parts)

    def _finish_cut(self, parts: list[Part]) -> None:
        """Finish a call that was cut off. Its arguments stay open, and a name is known only where its line has
        ended."""
        name, line_end, _ = "".join(self._text).lstrip().partition("\n")
        if self._state == "name" and not self._style.name_end and line_end and _NAME.fullmatch(name):
            parts.append(CallDelta(self._num_calls, name, ""))


def _as_json(value: str, *, is_string: bool) -> str:
    """Return the value of an argument as JSON text."""
    if not is_string:
        text = _PYTHON.get(value.strip(), value)
        try:
            json.loads(text, parse_constant=_refuse)
            return text.strip()
        except (ValueError, RecursionError):  # also a number of thousands of digits
            pass
    return _dumps(value)


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
