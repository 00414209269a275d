"""How the output of a chat turn is read, and OpenAI's names for what was read: for every front end the same.

An OutputParser is small: kept with the request in the engine, it lets any front end go on in the middle of a tool call.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from inferengine.text.output_parser import MessageReader, ReasoningReader
from inferengine.text.tool_parsers import FORMATS, ToolFormat
from inferengine.text.tool_parsers.base import CallDelta


@dataclass(frozen=True)
class OutputParser:
    """`calls`: the form of the tool calls that may come, None where none may. `thinks`: a part may be reasoning;
    `inside`: the prompt has opened it already. `keeps_special_tokens`: the marks of calls are special tokens."""

    calls: ToolFormat | None = None
    thinks: bool = False
    inside: bool = False
    keeps_special_tokens: bool = False

    @property
    def is_plain(self) -> bool:
        """The output is text for the user as it stands."""
        return self.calls is None and not self.thinks

    def make_reader(self) -> MessageReader:
        """For one output."""
        return MessageReader(
            ReasoningReader(inside=self.inside) if self.thinks else None,
            self.calls.make_parser() if self.calls is not None else None,
        )

    def call_id(self, answer_id: str, choice: int, call: int) -> str:
        """The id of a call: the same whenever the same answer is read again, as after a reconnect."""
        assert self.calls is not None
        digest = hashlib.sha256(f"{answer_id}/{choice}/{call}".encode()).hexdigest()[: self.calls.id_characters]
        return (
            digest if len(digest) < 16 else f"call_{digest}"
        )  # a template that wants a length wants nothing before it

    def call_entry(self, answer_id: str, choice: int, part: CallDelta) -> dict[str, Any]:
        """An entry of a streamed `tool_calls`: id and name come with a call's first."""
        if part.name is None:
            return {"index": part.call, "function": {"arguments": part.arguments}}
        return {
            "index": part.call,
            "id": self.call_id(answer_id, choice, part.call),
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }


def finish_reason(reason: str | None, num_calls: int) -> str | None:
    """An output that ended by itself after calling tools waits for their results."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def parser_to_map(parser: OutputParser) -> dict[str, Any]:
    """As it is kept in a note."""
    return {
        "calls": None if parser.calls is None else parser.calls.name,
        "thinks": parser.thinks,
        "inside": parser.inside,
        "special": parser.keeps_special_tokens,
    }


def parser_from_map(kept: Any) -> OutputParser:
    """The inverse. What no front end wrote is text as it stands."""
    if not isinstance(kept, dict):
        return OutputParser()
    calls = kept.get("calls")
    return OutputParser(
        FORMATS.get(calls) if isinstance(calls, str) else None,
        kept.get("thinks") is True,
        kept.get("inside") is True,
        kept.get("special") is True,
    )
