"""What an assistant's output is made of, once its text has been read."""

from __future__ import annotations

from typing import NamedTuple


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
