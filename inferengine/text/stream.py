"""From the tokens of one output to the text that a client sees: detokenizer and stop strings behind one call.

Front ends and the engine's own text path use nothing else, so both give the same text for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inferengine.text.detokenizer import make_detokenizer
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
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids)
        self._push_token, self._flush = detokenizer.push, detokenizer.flush
        self._stops = StopStrings(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped: str | None = None

    @property
    def is_plain(self) -> bool:
        """There are no stop strings."""
        return self._stops is None

    def push_plain(self, token_id: int) -> str:
        """`push` of one token that does not end the output, where there are no stop strings."""
        self.num_tokens += 1
        return self._push_token(token_id)

    def push(self, token_ids: Sequence[int], final: bool = False, stop_token: bool = False) -> TextDelta:
        """Take the next tokens; `final` says that these are the last, so nothing stays held back. `stop_token`: the
        last of them ended the output by its id, and has no text unless stops are to be included. Tokens after a stop
        string are ignored and not counted."""
        hidden = 1 if stop_token and token_ids and not self._include_stop else 0
        shown = token_ids[:-1] if hidden else token_ids
        if self._stops is None:
            text = "".join(map(self._push_token, shown))
            self.num_tokens += len(token_ids)
            return TextDelta(text + self._flush() if final else text, None, self.num_tokens)
        parts: list[str] = []
        for token_id in shown:
            if self.stopped is None:
                self.num_tokens += 1
                self._look(self._push_token(token_id), parts)
        if self.stopped is None:
            self.num_tokens += hidden
            if final:
                self._look(self._flush(), parts)
                parts.append(self._stops.flush())
        return TextDelta("".join(parts), self.stopped, self.num_tokens)

    def _look(self, text: str, parts: list[str]) -> None:
        """Append what of `text` may be shown, and note the stop string that it completes."""
        if self._stops is None or self.num_tokens < self._min_tokens:
            parts.append(text)
            return
        shown, self.stopped = self._stops.push(text)
        parts.append(shown)
