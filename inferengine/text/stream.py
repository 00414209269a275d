"""From the tokens of one output to the text that a client sees: detokenizer and stop strings behind one call.

Front ends and the engine's own text path use nothing else, so both give the same text for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inferengine.text.detokenizer import Detokenizer
from inferengine.text.stop_strings import StopStrings
from inferengine.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """`text` is new; `stop` is the stop string that ended the output here, or None; `num_tokens` counts the tokens of
    the whole output so far, up to and with the one that completed the stop string."""

    text: str
    stop: str | None
    num_tokens: int


class TextStream:
    """State of one output. `context_ids` are the last prompt tokens, for decoders that strip a leading space;
    before `min_tokens` tokens stop strings are not looked for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids)
        self._stops = StopStrings(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int], final: bool = False, stop_token: bool = False) -> TextDelta:
        """Take the next tokens; `final` says that these are the last, so nothing stays held back. `stop_token`: the
        last of them ended the output by its id, and has no text unless stops are to be included. Tokens after a stop
        string are ignored and not counted."""
        if self.stopped is not None:
            return TextDelta("", self.stopped, self.num_tokens)
        hidden = 1 if stop_token and not self._include_stop else 0
        parts: list[str] = []
        for token_id in token_ids[: len(token_ids) - hidden]:
            self.num_tokens += 1
            text = self._detokenizer.push(token_id)
            if self._look(text, parts):
                return TextDelta("".join(parts), self.stopped, self.num_tokens)
        self.num_tokens += min(hidden, len(token_ids))
        if final and not self._look(self._detokenizer.flush(), parts) and self._stops is not None:
            parts.append(self._stops.flush())
        return TextDelta("".join(parts), self.stopped, self.num_tokens)

    def _look(self, text: str, parts: list[str]) -> bool:
        """Append what of `text` may be shown; True when a stop string ended the output."""
        if self._stops is None or self.num_tokens < self._min_tokens:
            parts.append(text)
            return False
        shown, self.stopped = self._stops.push(text)
        parts.append(shown)
        return self.stopped is not None
