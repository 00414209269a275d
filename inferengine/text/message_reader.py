"""One assistant's output as reasoning, content and tool calls, while it is being written."""

from __future__ import annotations

from inferengine.text.message_parts import CallDelta, Content, Part, Reasoning
from inferengine.text.reasoning import ReasoningReader
from inferengine.text.tool_parsers import ToolParser


class Message:
    """Parts put together."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[tuple[str, str]] = []  # name and arguments as JSON text

    def add(self, parts: list[Part]) -> None:
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
    """Reads one output. Either reader may be absent; then that kind of part is content."""

    def __init__(self, reasoning: ReasoningReader | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.num_calls = 0

    def push(self, text: str, final: bool = False) -> list[Part]:
        """What the text adds; `final`: nothing follows."""
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
        return parts

    def read(self, text: str) -> Message:
        """A whole output at once."""
        message = Message()
        message.add(self.push(text, final=True))
        return message
