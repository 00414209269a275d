"""Prompt lookup: guess that what followed the last few tokens before will follow them again.

Saxena, "Prompt Lookup Decoding" (2023): no second model, and right most of the time where an output copies from its
prompt: summaries, edits of code, extraction. The index grows with the sequence, so that a guess costs a few dictionary
look-ups whatever the length.
"""

from __future__ import annotations

from inferengine.core.sequence import Sequence

LENGTHS = (4, 3, 2)  # tokens to match, the longest first


class _Index:
    """For each n-gram of a sequence the position after its last occurrence but the one at the very end."""

    __slots__ = ("after", "num_indexed")

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in the tokens up to the last but one: what follows the last is not known."""
        after = self.after
        for end in range(max(self.num_indexed, 1), len(tokens)):
            for length in LENGTHS:
                if end >= length:
                    after[tuple(tokens[end - length : end])] = end
        self.num_indexed = max(self.num_indexed, len(tokens))


class NgramProposer:
    """Implements `core.speculation.Proposer` on the host."""

    on_device = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        tokens = sequence.tokens
        index = self._indices.get(sequence.uid)
        if index is None:
            index = self._indices[sequence.uid] = _Index()
        index.extend(tokens)
        for length in LENGTHS:
            begin = index.after.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if begin is not None:
                return self._until_stop(sequence, tokens[begin : begin + max_tokens])
        return []

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.uid, None)

    def _until_stop(self, sequence: Sequence, guesses: list[int]) -> list[int]:
        """A guess after a stop could never be used."""
        for index, token in enumerate(guesses):
            if token in sequence.stop_ids:
                return guesses[: index + 1]
        return guesses
