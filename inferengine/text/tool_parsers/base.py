"""What tool parsers share: the parts of an output, the search for marks that pieces of text may cut, CallObject, and
the text around calls.

CallObject parses `{"name": ..., "arguments": {...}}` character by character, so that a client can stream the arguments.
Nothing is passed on before the name is known: until then the caller may still show the text as content.

Prose is the text around the calls, as it is shown: white space next to a call belongs to the call's format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


def split_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Find the first mark. Returns (text before, mark, rest); without a whole mark: the text that may be shown, None,
    and the end of the text that may begin a mark."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, _, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    end = len(text)
    for mark in marks:
        begin = text.find(mark[0], max(0, len(text) - len(mark) + 1), end)
        while begin >= 0 and not mark.startswith(text[begin:]):
            begin = text.find(mark[0], begin + 1, end)
        end = begin if begin >= 0 else end
    return text[:end], None, text[end:]


def shown_end(held: str, *, cut: bool) -> str:
    """Return what is shown of the end of an output that may begin a mark: all of it, or where the output was cut off
    nothing, as of a call whose mark is complete. What may begin a word is shown."""
    return held if not cut or held[:1].isalnum() else ""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer, while it was thinking."""

    text: str


class CallDelta(NamedTuple):
    """A piece of the tool call number `call` (from 0). The first delta of a call has its `name`; `arguments` is a piece
    of their JSON text, or the whole text for a custom tool."""

    call: int
    name: str | None
    arguments: str
    is_custom: bool = False


Part = Content | Reasoning | CallDelta


class JsonValue:
    """Finds the end of one JSON value by counting brackets outside of strings. The value itself is not checked."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._begun = False

    @property
    def text(self) -> str:
        """The characters so far."""
        return "".join(self.raw)

    def push(self, character: str) -> str:
        """Take a character. Returns `more`: the value goes on; `end`: this is its last; `past`: it ended before this
        one."""
        if self._in_string:
            self.raw.append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return "more" if self._depth else "end"
            return "more"
        if not self._depth and self._begun and character in ",}] \t\r\n":
            return "past"  # a number, true, false or null
        self._begun = True
        self.raw.append(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                return "end"
        return "more"


class CallObject:
    """Parses one call: `push` characters until `complete` or `broken`; `take` what may be passed on."""

    def __init__(self, *, needs_arguments: bool = False) -> None:
        self.name: str | None = None
        self.complete = False
        self.broken = False
        self.raw: list[str] = []  # all characters so far, shown as text if this is no call
        self.begun = False  # something was passed on: the text cannot be content any more
        self._needs_arguments = needs_arguments
        self._key = ""
        self._state = "open"
        self._value = JsonValue()
        self._arguments: JsonValue | None = None
        self._sent = 0

    def push(self, character: str) -> None:
        """Take a character."""
        self.raw.append(character)
        if self._state == "value":
            self._push_value(character)
        elif character in _SPACE:
            pass
        elif self._state == "open" and character == "{":
            self._state = "key"
        elif self._state == "key" and character == '"':
            self._value = JsonValue()
            self._value.push(character)
            self._state = "in key"
            return
        elif self._state == "colon" and character == ":":
            self._value = JsonValue()
            self._state = "before value"
        elif self._state == "before value" and character not in ",:}]":
            self._state = "value"
            if self._key in ARGUMENT_KEYS:
                self._arguments = self._value
            self._push_value(character)
        elif self._state == "after value" and character == ",":
            self._state = "key"
        elif self._state in ("key", "after value") and character == "}":
            self._end()
        elif self._state != "in key":
            self.broken = True
        if self._state == "in key" and self._value.push(character) == "end":
            self._key, self._state = _string(self._value.text) or "", "colon"

    def take(self, *, cut: bool = False) -> tuple[str | None, str]:
        """Return the (name, arguments) not returned before: the name once, and the arguments as far as they are
        known. `cut`: the output was cut off here, so a name whose arguments have not begun is returned too."""
        if self.name is None or self.broken:
            return None, ""
        arguments = self._arguments
        if arguments is not None and arguments.raw[:1] == ["{"]:
            text = "".join(arguments.raw[self._sent :])
            self._sent = len(arguments.raw)
        elif self.complete and not self._sent:
            self._sent = 1
            text = _as_object(arguments)
        elif cut and not self.begun:
            text = ""
        else:
            return None, ""
        name = None if self.begun else self.name
        self.begun = True
        return name, text

    def _push_value(self, character: str) -> None:
        outcome = self._value.push(character)
        if outcome == "more":
            return
        self._state = "after value"
        if self._key in NAME_KEYS and self.name is None:
            self.name = _string(self._value.text)
            self.broken = not self.name
        if outcome == "past" and character not in _SPACE:
            if character == "}":
                self._end()
            elif character == ",":
                self._state = "key"
            else:
                self.broken = True

    def _end(self) -> None:
        self.complete = True
        self.broken = self.name is None or (self._needs_arguments and self._arguments is None)


def _string(text: str) -> str | None:
    """Read a JSON string. None for any other text, for lists nested without end, and for half of a surrogate pair,
    which an escape can spell and UTF-8 cannot."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return str(value)


def _as_object(arguments: JsonValue | None) -> str:
    """Turn arguments that are no object into one: some models write the object as a string."""
    if arguments is None or arguments.text == "null":
        return "{}"
    return _string(arguments.text) or arguments.text


class Prose:
    """Holds white space back until it is known whether a call follows it."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def show(self, text: str, parts: list[Part]) -> None:
        """Take text outside of calls."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            parts.append(Content(shown))

    def begin_call(self) -> None:
        """Drop the white space before a call."""
        self._space = ""

    def end_call(self) -> None:
        """Drop the white space after a call."""
        self._after_call = True

    def show_end(self, held: str, parts: list[Part], *, cut: bool) -> None:
        """Take the end of the output, which may begin a mark; see `shown_end`."""
        shown = shown_end(held, cut=cut)
        if held and not shown:
            self.begin_call()
        self.show(shown, parts)

    def finish(self, parts: list[Part]) -> None:
        """Show what was held back: nothing follows."""
        if self._space:
            parts.append(Content(self._space))
        self._space = ""
