"""The parts of an assistant's output, and the search for marks that may be cut between two pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def split_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Find the first mark. Returns (text before, mark, rest); without a whole mark: the text that may be shown, None,
    and the end of the text that may begin a mark."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, _, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    longest = max(map(len, marks)) - 1
    for begin in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[begin:]) for mark in marks):
            return text[:begin], None, text[begin:]
    return text, None, ""


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer, while it was thinking."""

    text: str


class CallDelta(NamedTuple):
    """A piece of the tool call number `call` (from 0). The first delta of a call has its `name`; `arguments` is a piece
    of their JSON text."""

    call: int
    name: str | None
    arguments: str


Part = Content | Reasoning | CallDelta
