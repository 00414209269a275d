"""Proposers of draft tokens, by `speculation.method`: prompt lookup on the host, or a draft model on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inferengine.core.executor import Capacity
from inferengine.core.sequence import Sequence

MOST_PLACES = 16  # latest places that are compared
MOST_MATCHING = 16  # tokens at which a match is long enough
UNPROVEN_MATCH = 4  # tokens that must agree while a sequence's guesses have not been right more often than wrong
PROVEN = 0.5  # rate of acceptance above which the last two tokens are enough
SHIFT = 32  # bits of a token id in the key of a pair


class Proposer(Protocol):
    """Guesses what comes next. `on_device` ones know only how many: the executor makes the guesses itself."""

    @property
    def on_device(self) -> bool: ...

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """At most `max_tokens` guesses; empty where there is nothing to go by. On the device: as many zeros."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...


class _Index:
    """The places after each pair of tokens, the latest first: `last[pair]`, then `before[place]`; 0 ends the chain."""

    __slots__ = ("before", "last", "num_indexed")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.before: list[int] = [0, 0]
        self.num_indexed = 2  # places below this have been taken in

    def extend(self, tokens: list[int]) -> None:
        """Take in the places up to the last token: what follows the last is not known."""
        last, before = self.last, self.before
        for place in range(self.num_indexed, len(tokens)):
            pair = tokens[place - 2] << SHIFT | tokens[place - 1]
            before.append(last.get(pair, 0))
            last[pair] = place
        self.num_indexed = max(self.num_indexed, len(tokens))

    def best(self, tokens: list[int], least: int) -> int:
        """The place where the text goes on that agrees with the end of `tokens` the furthest back, the latest of equal
        ones; 0: none of at least so many tokens."""
        end = len(tokens)
        place = self.last.get(tokens[-2] << SHIFT | tokens[-1], 0)
        best, best_length = 0, least - 1
        for _ in range(MOST_PLACES):
            if place == 0 or best_length == MOST_MATCHING:
                break
            most = min(place, MOST_MATCHING)
            length = 2
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self.before[place]
        return best


class NgramProposer:
    """Implements `core.speculation.Proposer` on the host."""

    on_device = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        tokens = sequence.tokens
        if len(tokens) < 2:
            return []
        index = self._indices.get(sequence.uid)
        if index is None:
            index = self._indices[sequence.uid] = _Index()
        index.extend(tokens)
        is_proven = sequence.acceptance_rate is not None and sequence.acceptance_rate > PROVEN
        begin = index.best(tokens, 2 if is_proven else UNPROVEN_MATCH)
        if begin == 0:
            return []
        guesses = tokens[begin : begin + max_tokens]
        while len(guesses) < max_tokens:  # the copy has reached the end: a text that repeats itself goes round
            guesses += guesses[: max_tokens - len(guesses)]
        return self._until_stop(sequence, guesses)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.uid, None)

    def _until_stop(self, sequence: Sequence, guesses: list[int]) -> list[int]:
        """A guess after a stop could never be used."""
        for index, token in enumerate(guesses):
            if token in sequence.stop_ids:
                return guesses[: index + 1]
        return guesses


class DraftModelProposer:
    """The guesses are made on the device, by the executor's draft model: here only their number is known."""

    on_device = True

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return [0] * max_tokens

    def forget(self, sequence: Sequence) -> None:
        """It remembers nothing."""


PROPOSERS: dict[str, Callable[[], Proposer | None]] = {
    "none": lambda: None,
    "ngram": NgramProposer,
    "draft": DraftModelProposer,
}


def speculation_method(method: str, capacity: Capacity) -> str:
    """Resolve `speculation.method`: `auto` is `draft` if the executor has loaded a draft model, else `none`."""
    if method == "auto":
        return "draft" if capacity.has_draft_model else "none"
    return method


def build_proposer(method: str, capacity: Capacity) -> Proposer | None:
    """Make the proposer of `speculation.method`; None without speculation."""
    return PROPOSERS[speculation_method(method, capacity)]()
