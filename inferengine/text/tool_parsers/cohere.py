"""Command R7B and Command A: what is thought, done and answered stands between special tokens of its own.

    <|START_THINKING|>Let me see.<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}
    ]<|END_ACTION|>

An answer is in `<|START_RESPONSE|>`, of newer models in `<|START_TEXT|>`, or in neither.
"""

from __future__ import annotations

from inferengine.text.tool_parsers.base import Content, Part, Reasoning, shown_end, split_at_mark
from inferengine.text.tool_parsers.json_list import COHERE, JsonListParser

THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
ACTION = (COHERE[0], "<|END_ACTION|>")
ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
MARKS = (*THINKING, *ACTION, *ANSWER)


class CohereParser:
    """Parses one output into reasoning, content and calls. `calls`: functions may be called; else what is to be done is
    reasoning."""

    def __init__(self, *, calls: bool = True) -> None:
        self._calls = JsonListParser(COHERE) if calls else None
        self._held = ""
        self._state = "answer"  # or thinking, or action
        self._space = ""  # at the end of what is thought: shown if more follows
        self._begun = False  # whether something of a thought has been shown

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while True:
            before, mark, self._held = split_at_mark(self._held, MARKS)
            self._take(before, parts)
            if mark is None:
                break
            self._pass(mark, parts)
        if final:
            self._take(self._held if self._state == "action" else shown_end(self._held, cut=cut), parts)
            self._held = ""
            if self._calls is not None:
                parts += self._calls.push("", final=True, cut=cut)
        return parts

    def _take(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._state == "answer" or (self._state == "action" and self._calls is not None):
            parts += [Content(text)] if self._calls is None else self._calls.push(text)
            return
        text = self._space + text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._begun = True
            parts.append(Reasoning(shown))

    def _pass(self, mark: str, parts: list[Part]) -> None:
        if mark in ACTION and self._calls is not None:
            parts += self._calls.push(mark)
        self._state = "thinking" if mark == THINKING[0] else "action" if mark == ACTION[0] else "answer"
        self._space, self._begun = "", False
