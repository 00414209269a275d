"""Text that may turn out to be a mark: held back while it may, so that no half of a mark is ever shown.

What an assistant's output is made of, once its text has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def split_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """(text before, mark, rest). Without a whole mark: what may be shown, None, and the end that may begin one."""
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
    """Text that the model wrote for itself."""

    text: str


class CallDelta(NamedTuple):
    """More of the tool call number `call` (from 0). `name` comes with its first delta; `arguments` are JSON text that
    the deltas of a call put together."""

    call: int
    name: str | None
    arguments: str


Part = Content | Reasoning | CallDelta
