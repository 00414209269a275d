"""TokenMatcher: llguidance behind the core's grammar protocol."""

from __future__ import annotations

import ctypes

from llguidance import LLMatcher


class TokenMatcher:
    """One output's place in a compiled grammar. Implements `core.grammar.Grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def validate(self, token_ids: list[int]) -> int:
        return int(self._matcher.validate_tokens(token_ids)) if token_ids else 0

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise RuntimeError(self._matcher.get_error())

    def fill_bitmask(self, row: memoryview) -> None:
        """Raises RuntimeError where a limit was hit; the interpreter lock is free meanwhile."""
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(row)), len(row))
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())
