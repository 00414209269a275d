"""TextStream: the text of one output from its tokens as they arrive, with stop strings.

Front ends and the engine's own text path both use it, so they give the same text for the same tokens. It has two parts:

Detokenizers return text that never changes afterwards; joined it equals the decode of all ids. Byte-level vocabularies
(GPT-2, Llama 3, Qwen) are decoded by a table of bytes and an incremental UTF-8 decoder. In all others (SentencePiece
with byte fallback, WordPiece, ...) the text of a token depends on its neighbours, so a window of ids is decoded.

StopStrings finds stop strings wherever tokens cut them, and never shows a part of one. One automaton (Aho and Corasick,
1975) holds all strings of a request: a state is the longest end of the text so far that begins a stop string, so its
depth is the number of characters to hold back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inferengine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Longer runs of held tokens are bytes that are not text; the
# limit bounds the window, and so the cost of a token.
MAX_HELD_TOKENS = 64
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Decodes the tokens of one output."""

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes; empty in the middle of a character."""
        ...

    def flush(self) -> str:
        """End the output. Returns what is still held; bytes that are no character become U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
) -> Detokenizer:
    """Make the detokenizer for a vocabulary. `context_ids` are the last tokens before the output: some decoders strip a
    space at the start of a text, which an output that continues a prompt is not. Their own text is not returned."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. Most tokens are whole characters: between characters their text
    is the same in every output, and is looked up."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _UTF8("replace")
        self._decode = self._decoder.decode
        self._within = False  # in the middle of a character
        self._whole = tokenizer.whole_texts

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes."""
        if not self._within and (text := self._whole.get(token_id)) is not None:
            return text
        is_special = self._tokenizer.is_special(token_id)
        if is_special and self._skip_special_tokens:
            return ""
        began_within, text = self._within, self._decode(self._tokenizer.token_bytes(token_id))
        self._within = bool(self._decoder.getstate()[0])
        if not began_within and not self._within and not is_special:
            self._whole[token_id] = text
        return text

    def flush(self) -> str:
        """End the output. Returns U+FFFD for a character that is incomplete."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary. Two windows of ids are kept, as in vLLM's first detokenizer: the text of
    `ids[:known]` was returned already and serves as context; the rest is new, and its end may still become a
    character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context_ids)
        self._known = len(self._ids)
        self._known_text = self._text() if context_ids else ""

    def push(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes."""
        self._ids.append(token_id)
        text = self._text()
        settled = len(text) > len(self._known_text) and not text.endswith(REPLACEMENT)
        if not settled and len(self._ids) - self._known < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """End the output. Returns what is still held."""
        return self._give_out(self._text()) if len(self._ids) > self._known else ""

    def _give_out(self, text: str) -> str:
        new = text[len(self._known_text) :]
        if new:
            del self._ids[: self._known]
            self._known = len(self._ids)
            self._known_text = self._text()
        else:  # tokens without text of their own (skipped specials): keep what precedes them as context
            del self._ids[self._known :]
        return new

    def _text(self) -> str:
        return self._decode(self._ids, self._skip_special_tokens)


class StopMatch(NamedTuple):
    """`text` may be shown now; `stop` is the string that ended the output, or None."""

    text: str
    stop: str | None


class StopStrings:
    """Finds the stop strings of one output. The match that completes first wins; of several that end together, the
    longest. So the result does not depend on how the text was cut."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fail = self._links()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take more text. After a match nothing more may be pushed."""
        state = self._state
        for position, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            stop = self._match[state]
            if stop is not None:
                seen, self._held = self._held + text[: position + 1], ""
                return StopMatch(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._state = state
        seen = self._held + text
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return StopMatch(seen[:cut], None)

    def flush(self) -> str:
        """End the output without a match. Returns the text held back."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _links(self) -> list[int]:
        """For each state, its longest proper suffix that is a state too, breadth first."""
        fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            if self._match[state] is None:
                self._match[state] = self._match[fail[state]]
            for character, child in self._next[state].items():
                link = fail[state]
                while link and character not in self._next[link]:
                    link = fail[link]
                fail[child] = self._next[link].get(character, 0)
                queue.append(child)
        return fail


class TextDelta(NamedTuple):
    """`text` is new; `stop` is the stop string that ended the output here, or None; `num_tokens` counts the tokens of
    the output so far, up to and including the one that completed the stop string."""

    text: str
    stop: str | None
    num_tokens: int


class TextStream:
    """Decodes one output. `context_ids` are the last prompt tokens, for decoders that strip a leading space. Stop
    strings in the first `min_tokens` tokens do not count."""

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
        """Whether there are no stop strings."""
        return self._stops is None

    def push_plain(self, token_id: int) -> str:
        """Do what `push` does for one token that does not end the output, where there are no stop strings."""
        self.num_tokens += 1
        return self._push_token(token_id)

    def push(self, token_ids: Sequence[int], final: bool = False, stop_token: bool = False) -> TextDelta:
        """Take the next tokens. `final`: these are the last, so nothing stays held back. `stop_token`: the last of them
        ended the output by its id, and has no text unless stops are included. Tokens after a stop string are ignored
        and not counted."""
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
                self._match(self._push_token(token_id), parts)
        if self.stopped is None:
            self.num_tokens += hidden
            if final:
                self._match(self._flush(), parts)
                parts.append(self._stops.flush())
        return TextDelta("".join(parts), self.stopped, self.num_tokens)

    def _match(self, text: str, parts: list[str]) -> None:
        """Append the part of `text` that may be shown, and note the stop string that it completes."""
        if self._stops is None or self.num_tokens < self._min_tokens:
            parts.append(text)
            return
        shown, self.stopped = self._stops.push(text)
        parts.append(shown)
