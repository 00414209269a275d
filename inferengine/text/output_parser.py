"""Splits an assistant's output into reasoning, content and tool calls, while it is being generated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from inferengine.text.tool_parsers import ToolParser, harmony
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning, split_at_mark
from inferengine.text.tool_parsers.custom import CustomCalls


@dataclass(frozen=True)
class ReasoningFormat:
    """How models mark the reasoning that they write before they answer. The first of `opens` and `closes` is what the
    model's template writes."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    signs: tuple[str, ...]  # texts in the chat template of such a model
    make_reader: Callable[[], ToolParser] | None = (
        None  # of whole outputs, where reasoning is not only at the beginning
    )
    marks: tuple[str, ...] = ()  # parts of the above that are special tokens in some vocabularies
    stops: tuple[str, ...] = ()  # special tokens that end an output, beside the checkpoint's own
    answer: str = ""  # ends a prompt after which the answer comes at once


THINK = ReasoningFormat("think", ("<think>",), ("</think>",), ("</think>",))
REASONING = {
    format.name: format
    for format in (
        THINK,
        ReasoningFormat(
            "harmony",
            (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
            (f"{harmony.CHANNEL}final{harmony.MESSAGE}",),
            (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
            lambda: harmony.HarmonyParser(calls=False),
            harmony.MARKS,
            harmony.STOPS,
            answer=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), ("[/THINK]",)),
        ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), ("</seed:think>",)),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            ("Here is my thought process", "Here's my thought process"),
        ),
        ReasoningFormat("kimi", ("\u25c1think\u25b7",), ("\u25c1/think\u25b7",), ("\u25c1/think\u25b7",)),
    )
}


def reasoning_format(mode: str, template: str | None) -> ReasoningFormat | None:
    """Return the format that `http.reasoning_parser` names, or for `auto` the one of a chat template; None: none."""
    if mode != "auto":
        return REASONING.get(mode)
    formats = REASONING.values() if template is not None else ()
    return next((format for format in formats if any(sign in (template or "") for sign in format.signs)), None)


class ReasoningReader:
    """Splits reasoning from the answer in one output. `inside`: the prompt has opened the tag already. A tag inside the
    answer is text. White space next to the tags is dropped."""

    def __init__(self, *, inside: bool, format: ReasoningFormat = THINK) -> None:
        self._format = format
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._begun = False  # whether more than white space has been shown of the current side

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take more text; `final`: nothing follows. Returns the parts that it completes."""
        parts: list[Part] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            begin = text.lstrip()
            opened = next((mark for mark in self._format.opens if begin.startswith(mark)), None)
            if opened is not None:
                self._state, text = "reasoning", begin[len(opened) :]
            elif any(mark.startswith(begin) for mark in self._format.opens) and not final:
                self._held = text
                return parts
            else:
                self._state, self._begun = "answer", True
        if self._state == "reasoning":
            before, mark, rest = split_at_mark(text, self._format.closes)
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


class Message:
    """A whole output, joined from its parts."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[tuple[str, str]] = []  # name, and arguments as JSON text or the text for a custom tool

    def add(self, parts: list[Part]) -> None:
        """Append parts."""
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif part.call == len(self.calls):
                self.calls.append((part.name or "", part.arguments))
            else:
                name, arguments = self.calls[part.call]
                self.calls[part.call] = (name, arguments + part.arguments)


class MessageReader:
    """Parses one output. Without a reasoning reader or a tool parser that kind of part is content. `custom`: the names
    of tools that take a text."""

    def __init__(
        self, reasoning: ReasoningReader | ToolParser | None, tools: ToolParser | None, custom: Collection[str] = ()
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._custom = CustomCalls(custom) if custom else None
        self.num_calls = 0

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take more text; `final`: nothing follows. Returns the parts that it completes."""
        split: list[Part] = [Content(text)] if self._reasoning is None else self._reasoning.push(text, final)
        if self._tools is None:
            return [part for part in split if not isinstance(part, Content) or part.text]
        parts: list[Part] = []
        for part in split:
            parts += self._tools.push(part.text) if isinstance(part, Content) else [part]
        if final:
            parts += self._tools.push("", final=True)
        for part in parts:
            if isinstance(part, CallDelta):
                self.num_calls = part.call + 1
        return parts if self._custom is None else self._custom.push(parts, final)

    def read(self, text: str) -> Message:
        """Parse a whole output at once."""
        message = Message()
        message.add(self.push(text, final=True))
        return message
