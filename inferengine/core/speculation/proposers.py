"""Proposers of draft tokens, by `speculation.method`: prompt lookup on the host, or a draft model on the device.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023) proposes that what followed the last few tokens before will
follow them again. It needs no second model, and is accepted most of the time where an output copies from its prompt:
summaries, edits of code, extraction. Of the places where the last two tokens stood before, it copies from the one where
most tokens before them match, too. The index grows with the sequence by one dictionary entry per token, and a proposal
compares a bounded number of places, whatever the length. A request may bring a prediction of its output, such as the
file that is to be edited: its tokens go before what is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Protocol

from inferengine.core.executor import Capacity
from inferengine.core.sequence import Sequence

MAX_PLACES = 16  # latest places that are compared
MAX_MATCH = 16  # tokens at which a match is long enough
UNPROVEN_MATCH = 4  # tokens that must match until most of a sequence's draft tokens have been accepted
PROVEN_RATE = 0.5  # acceptance rate above which a match of two tokens is enough
PREDICTION_MATCH = 2  # tokens of the output that must stand in a prediction to go on from there
SHIFT = 32  # bits of a token id in the key of a pair


class Proposer(Protocol):
    """Proposes draft tokens. With `on_device` it only says how many: the executor computes the tokens itself."""

    @property
    def on_device(self) -> bool:
        """Whether the executor's draft model makes the tokens."""
        ...

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` draft tokens; empty where it finds none. On the device: as many zeros."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has ended."""
        ...


class _Index:
    """The places after each pair of tokens, the latest first: `last[pair]`, then `before[place]`; 0 ends the chain."""

    __slots__ = ("before", "last", "num_indexed")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.before: list[int] = [0, 0]
        self.num_indexed = 2  # places below this are in the index

    def extend(self, tokens: ListOf[int]) -> None:
        """Add the places up to the last token: what follows the last is not known."""
        last, before = self.last, self.before
        for place in range(self.num_indexed, len(tokens)):
            pair = tokens[place - 2] << SHIFT | tokens[place - 1]
            before.append(last.get(pair, 0))
            last[pair] = place
        self.num_indexed = max(self.num_indexed, len(tokens))

    def best(self, indexed: ListOf[int], tokens: list[int], min_match: int) -> int:
        """Return the place in `indexed`, whose places these are, after the longest match with the end of `tokens`, the
        latest of equal ones; 0: no match of at least `min_match` tokens."""
        end = len(tokens)
        place = self.last.get(tokens[-2] << SHIFT | tokens[-1], 0)
        best, best_length = 0, min_match - 1
        for _ in range(MAX_PLACES):
            if place == 0 or best_length == MAX_MATCH:
                break
            most = min(place, end, MAX_MATCH)
            length = 2
            while length < most and indexed[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self.before[place]
        return best


class _Prediction:
    """Where an output is in what its request predicts it to be (`Request.prediction_ids`).

    The output is followed token by token. Where it differs, the place is lost until the end of the output stands in
    the prediction again: what was inserted, left out or changed costs a few steps without draft tokens of it."""

    __slots__ = ("_index", "_num_followed", "_place", "_tokens")

    def __init__(self, sequence: Sequence) -> None:
        self._tokens = sequence.request.prediction_ids
        self._num_followed = sequence.num_prompt  # tokens of the sequence
        self._place: int | None = 0  # of the next token; None: lost
        self._index: _Index | None = None  # made when the place is first lost

    def drafts(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return the next tokens of the prediction; empty where the output is elsewhere or beyond it."""
        predicted, tokens = self._tokens, sequence.tokens
        for token in tokens[self._num_followed :]:
            if self._place is not None:
                follows = self._place < len(predicted) and predicted[self._place] == token
                self._place = self._place + 1 if follows else None
        self._num_followed = len(tokens)
        if self._place is None:
            if self._index is None:
                self._index = _Index()
                self._index.extend(predicted)
            if sequence.num_output >= PREDICTION_MATCH:
                self._place = self._index.best(predicted, tokens, PREDICTION_MATCH) or None
        return [] if self._place is None else list(predicted[self._place : self._place + max_tokens])


class NgramProposer:
    """Prompt lookup on the host, in the request's prediction first. Implements Proposer."""

    on_device = False

    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}  # by uid
        self._predictions: dict[int, _Prediction] = {}  # by uid, of requests that have one

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return the tokens that the request predicts here, else those after the longest match; up to a stop token."""
        if sequence.request.prediction_ids:
            prediction = self._predictions.get(sequence.uid)
            if prediction is None:
                prediction = self._predictions[sequence.uid] = _Prediction(sequence)
            if drafts := prediction.drafts(sequence, max_tokens):
                return _up_to_stop(drafts, sequence)
        tokens = sequence.tokens
        if len(tokens) < 2:
            return []
        index = self._indices.get(sequence.uid)
        if index is None:
            index = self._indices[sequence.uid] = _Index()
        index.extend(tokens)
        is_proven = sequence.acceptance_rate is not None and sequence.acceptance_rate > PROVEN_RATE
        begin = index.best(tokens, tokens, 2 if is_proven else UNPROVEN_MATCH)
        if begin == 0:
            return []
        drafts = tokens[begin : begin + max_tokens]
        while len(drafts) < max_tokens:  # the copy has reached the end: repeat it, for texts that repeat themselves
            drafts += drafts[: max_tokens - len(drafts)]
        return _up_to_stop(drafts, sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the index of a sequence that has ended."""
        self._indices.pop(sequence.uid, None)
        self._predictions.pop(sequence.uid, None)


def _up_to_stop(drafts: list[int], sequence: Sequence) -> list[int]:
    """Return the draft tokens up to the first that ends the sequence: those behind it can never be used."""
    for place, token in enumerate(drafts):
        if token in sequence.stop_ids:
            return drafts[: place + 1]
    return drafts


class DraftModelProposer:
    """The executor's draft model makes the tokens on the device. Implements Proposer."""

    on_device = True

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return `max_tokens` zeros, which stand for the tokens."""
        return [0] * max_tokens

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: nothing is kept."""


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
