"""TokenMatcher: llguidance behind the core's grammar protocol."""

from __future__ import annotations

import ctypes

from llguidance import LLMatcher


class TokenMatcher:
    """One output's place in a compiled grammar. Implements `core.grammar.Grammar`.

    What needs no translation is llguidance's own method: a step of many outputs makes a hundred such calls.
    """

    __slots__ = ("_compute_mask", "_consume", "_is_error", "_matcher", "forced", "is_terminated")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._consume, self._compute_mask = matcher.try_consume_tokens, matcher.unsafe_compute_mask_ptr
        self._is_error = matcher.is_error
        self.is_terminated = matcher.is_stopped
        self.forced = matcher.compute_ff_tokens

    def accept(self, token_id: int) -> bool:
        return bool(self._consume([token_id]) == 1)

    def validate(self, token_ids: list[int]) -> int:
        return int(self._matcher.validate_tokens(token_ids)) if token_ids else 0

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise RuntimeError(self._matcher.get_error())

    def fill_bitmask(self, row: memoryview) -> None:
        """Raises RuntimeError where a limit was hit; the interpreter lock is free meanwhile."""
        self._compute_mask(ctypes.addressof(ctypes.c_char.from_buffer(row)), len(row))
        if self._is_error():
            raise RuntimeError(self._matcher.get_error())
