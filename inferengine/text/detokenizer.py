"""Token ids to text while they arrive: what was given out never changes, and its sum equals the decode of the whole.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) go through a table of bytes and an incremental UTF-8 decoder. All others
(SentencePiece with byte fallback, WordPiece, ...) have rules that look at neighbours, so a window of ids is decoded.

Stop strings in a stream: found wherever the tokens cut them, and never shown, not even their first half.

One automaton (Aho and Corasick, 1975) for all strings of a request: a state is the longest end of the text so far that
begins some stop string, so its depth is exactly the number of characters to hold back.

From the tokens of one output to the text that a client sees: detokenizer and stop strings behind one call.

Front ends and the engine's own text path use nothing else, so both give the same text for the same tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from inferengine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Longer runs of held tokens are bytes that are no text at all;
# the limit only keeps the window, and so the cost of a token, bounded.
MAX_HELD_TOKENS = 64
_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """State of one output."""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` settles; empty in the middle of a character."""
        ...

    def flush(self) -> str:
        """What is still held, at the end of the output: bytes that never became a character are U+FFFD."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
) -> Detokenizer:
    """`context_ids` are the last tokens before the output: some decoders strip a space at the start of a text, and an
    output that continues a prompt does not start one. Their own text is not given out."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings. Most are whole characters: outside of a character their text is
    the same for every output, and looked up."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _UTF8("replace")
        self._decode = self._decoder.decode
        self._within = False  # in the middle of a character
        self._whole = tokenizer.whole_texts

    def push(self, token_id: int) -> str:
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
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary. Two windows of ids are kept, as vLLM's first detokenizer did: `ids[:known]` is text
    already given out and serves only as context, the rest is new and ends in what may still become a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context_ids)
        self._known = len(self._ids)
        self._known_text = self._text() if context_ids else ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._text()
        settled = len(text) > len(self._known_text) and not text.endswith(REPLACEMENT)
        if not settled and len(self._ids) - self._known < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
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
    """`text` may be given out now; `stop` is the string that ended the output, or None."""

    text: str
    stop: str | None


class StopStrings:
    """Matcher of one output. The match that completes first wins, of several that end together the longest, so the
    result does not depend on how the text was cut."""

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
        """Take more text; after a match nothing more may be pushed."""
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
        """What is held back, once it is known that the output ended otherwise."""
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
        """For each state the longest proper end of it that is a state too, breadth first."""
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
