"""Token ids to text while they arrive: what was given out never changes, and its sum equals the decode of the whole.

Two windows of ids are kept, as in vLLM's first detokenizer: `ids[:_known]` is text already given out and serves only as
context (decoders strip a leading space at the start of what they are given), the rest is new. Characters that end in
U+FFFD may be completed by the next token and are held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Longer runs of held tokens are bytes that are no text at all;
# the limit only keeps the window, and so the cost of a token, bounded.
MAX_HELD_TOKENS = 64


class Detokenizer:
    """State of one output. `context_ids` are the last tokens before it; their text is not given out."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = tokenizer.decode
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(context_ids)
        self._known = len(self._ids)
        self._known_text = self._text(self._ids) if context_ids else ""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` settles; often empty in the middle of a character."""
        self._ids.append(token_id)
        text = self._text(self._ids)
        settled = len(text) > len(self._known_text) and not text.endswith(REPLACEMENT)
        if not settled and len(self._ids) - self._known < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """What is still held, at the end of the output: bytes that never became a character are U+FFFD."""
        return self._give_out(self._text(self._ids)) if len(self._ids) > self._known else ""

    def _give_out(self, text: str) -> str:
        new = text[len(self._known_text) :]
        if new:
            del self._ids[: self._known]
            self._known = len(self._ids)
            self._known_text = self._text(self._ids)
        else:  # tokens without text of their own (skipped specials): keep what precedes them as context
            del self._ids[self._known :]
        return new

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(token_ids, self._skip_special_tokens)
