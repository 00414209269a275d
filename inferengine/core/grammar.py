"""Grammar: the protocol through which the core uses what a request's output must match.

Compiling and matching are somebody else's work (`inferengine.structured`); the core tells a grammar which tokens came
and asks it for the mask of those that may come next.
"""

from __future__ import annotations

from typing import Protocol


class Grammar(Protocol):
    """A compiled grammar at one point of one output. Only one thread touches it at a time. Every method but `validate`
    raises InvalidRequest where the grammar cannot be followed any further: its output ends."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. False: the token is not allowed here; the state is unchanged."""
        ...

    def validate(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first on, would be accepted. Changes nothing."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        ...

    def fill_bitmask(self, row: memoryview) -> None:
        """Write the mask of allowed next tokens: bit t % 32 of int32 word t // 32. `row` has ceil(V / 32) words."""
        ...

    def is_terminated(self) -> bool:
        """Nothing can follow."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must follow whatever the model says; empty where it has a choice. Changes nothing."""
        ...
