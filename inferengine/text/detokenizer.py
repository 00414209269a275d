"""Token ids to text while they arrive: what was given out never changes, and its sum equals the decode of the whole.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) go through a table of bytes and an incremental UTF-8 decoder. All others
(SentencePiece with byte fallback, WordPiece, ...) have rules that look at neighbours, so a window of ids is decoded.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

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
