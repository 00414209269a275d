"""Harmony, which GPT-OSS writes: an output is messages, each in a channel that its header names.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"x": 1}<|call|>

`analysis` is reasoning, `final` the answer. A message to a function is a call, in whatever channel; `commentary` to
nobody is for the user. The prompt ends after `<|start|>assistant`, so the output begins within a header; one that
begins with anything else is an answer.

Source: OpenAI's description of the Harmony response format.
"""

from __future__ import annotations

import re

from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning, shown_end, split_at_mark

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STOPS = ENDS[1:]  # after these the model has nothing to add
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADER = (CHANNEL, START, " to=")  # how an output within a header begins


class HarmonyParser:
    """Parses one output into reasoning, content and calls. `calls`: functions may be called; else what goes to one is
    reasoning, as what goes to other recipients always is."""

    def __init__(self, *, calls: bool = True) -> None:
        self._calls = calls
        self._held = ""
        self._state = "start"
        self._kind = "content"  # of the message that is being read: content, reasoning or call
        self._header: list[str] = []
        self._num_calls = 0
        self._empty = False  # a call whose arguments have not begun

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        if self._state == "start" and not self._begin(final, cut=cut):
            return parts
        while self._held:
            if self._state == "header":
                before, mark, self._held = split_at_mark(self._held, (MESSAGE,))
                self._header.append(before)
                if mark is None:
                    break
                self._open("".join(self._header), parts)
                continue
            before, mark, self._held = split_at_mark(self._held, (*ENDS, START, CHANNEL))
            self._show(before, parts)
            if mark is None:
                break
            self._close(parts)
            self._state, self._header = "header", [mark] if mark in (START, CHANNEL) else []
        if final:
            if self._state == "message":
                self._show(self._held if self._kind == "call" else shown_end(self._held, cut=cut), parts)
                self._close(parts, cut=cut)
            self._held = ""
        return parts

    def _begin(self, final: bool, *, cut: bool) -> bool:
        """Find out whether the output begins within a header. False: more text is needed, or the header was cut
        off."""
        begin = self._held
        if (not final or cut) and any(sign.startswith(begin) and sign != begin for sign in _HEADER):
            return False
        self._state = "header" if begin.startswith(_HEADER) else "message"
        return True

    def _open(self, header: str, parts: list[Part]) -> None:
        _, _, channel = header.rpartition(CHANNEL)
        recipient = _RECIPIENT.search(header)
        self._state = "message"
        if recipient is None:
            self._kind = "reasoning" if channel.split(None, 1)[:1] == ["analysis"] else "content"
            return
        name = recipient.group(1)
        self._kind = "call" if self._calls and name.startswith(FUNCTIONS) and name != FUNCTIONS else "reasoning"
        if self._kind == "call":
            self._empty = True
            parts.append(CallDelta(self._num_calls, name.removeprefix(FUNCTIONS), ""))

    def _show(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._kind == "call":
            self._empty = False
            parts.append(CallDelta(self._num_calls, None, text))
        else:
            parts.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

    def _close(self, parts: list[Part], *, cut: bool = False) -> None:
        if self._kind == "call":
            if self._empty and not cut:
                parts.append(CallDelta(self._num_calls, None, "{}"))
            self._num_calls += 1
        self._kind = "content"
