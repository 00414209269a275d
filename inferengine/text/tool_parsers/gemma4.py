"""Gemma 4: `<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`, where names stand bare and special
tokens enclose each text. A call leaves when its end is written, as JSON. What cannot be read so is shown as it is.
"""

from __future__ import annotations

import json
import re

from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Prose, split_at_mark

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"  # what the model waits for after its calls
MARKS = (OPEN, CLOSE, QUOTE)
_CALL = re.compile(r"\s*call:([^\s<>{}\"']{1,128})(\{.*\})\s*", re.DOTALL)
_BEGUN = re.compile(r"\s*call:([^\s<>{}\"']{1,128})\{")
# A text of JSON, or the name of a value. Both are read in one pass, whatever a model writes: a word is tried at its
# beginning alone, and a text without an end, which no JSON has, is one match.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|(?<![^\s\[\]{},:"])[^\s\[\]{},:"]++(?=\s*+:)')


class Gemma4Parser:
    """Text outside of calls is content."""

    def __init__(self) -> None:
        self._prose = Prose()
        self._held = ""
        self._inside = False
        self._call: list[str] = []
        self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        self._held += text
        while True:
            before, mark, self._held = split_at_mark(self._held, (CLOSE,) if self._inside else (OPEN,))
            if self._inside:
                self._call.append(before)
            else:
                self._prose.show(before, parts)
            if mark is None:
                break
            if mark == OPEN:
                self._prose.begin_call()
                self._inside, self._call = True, []
            else:
                self._end(parts)
        if final:
            if self._inside:
                self._call.append(self._held)
                self._end(parts, closed=False, cut=cut)
            else:
                self._prose.show_end(self._held, parts, cut=cut)
            self._held = ""
            self._prose.finish(parts)
        return parts

    def _end(self, parts: list[Part], *, closed: bool = True, cut: bool = False) -> None:
        """End a call that is complete, or that the output ends within; `cut`: it was cut off there."""
        text, self._inside = "".join(self._call), False
        found = _CALL.fullmatch(text)
        arguments = None if found is None else arguments_of(found[2])
        if cut and arguments is None:
            if (begun := _BEGUN.match(text)) is not None:
                parts.append(CallDelta(self._num_calls, begun[1], ""))
            return
        if found is None or arguments is None:
            parts.append(Content(f"{OPEN}{text}{CLOSE if closed else ''}"))
            return
        parts += [CallDelta(self._num_calls, found[1], ""), CallDelta(self._num_calls, None, arguments)]
        self._num_calls += 1
        self._prose.end_call()


def arguments_of(text: str) -> str | None:
    """Return the arguments of a call as JSON text; None where they cannot be read. JSON is read too."""
    pieces = text.split(QUOTE)
    written = [
        json.dumps(piece, ensure_ascii=False) if number % 2 else _TOKEN.sub(_quoted, piece)
        for number, piece in enumerate(pieces)
    ]
    try:
        json.loads("".join(written), parse_constant=_refuse)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return None
    return "".join(written)


def _quoted(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else json.dumps(found[0], ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON
