"""Speculation: how many tokens to guess ahead for a sequence, from what guessing has brought so far.

A guess that is right saves a step, a wrong one costs the time to verify it. The length follows the sequence's own rate
of acceptance (an exponential mean): one more guess pays as long as the chance that all up to it are right, r^k, beats
its cost. A sequence whose guesses fail stops guessing and tries again after a while. Under load the batch fills the
device without guesses, and there are none.
"""

from __future__ import annotations

from typing import Protocol

from inferengine.core.sequence import Sequence

SMOOTHING = 0.2  # weight of a new observation
WORTHWHILE = 0.3  # probability at which one more guess pays
RETRY_AFTER = 32  # tokens after which a sequence that gave up tries again
PROBE_LENGTH = 2  # guesses of a sequence about which nothing is known yet, beyond the first


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


class DraftControl:
    """Decides the number of guesses. `max_drafts` bounds it, `max_running` is where the device has enough to do."""

    def __init__(self, max_drafts: int, max_running: int) -> None:
        self.max_drafts = max_drafts
        self.max_running = max_running
        self.num_drafted = 0
        self.accepted_by_position = [0] * max_drafts
        self.num_accepted = 0
        self.num_verified = 0  # verifications: accepted / verified + 1 is the mean length of a step

    def length(self, sequence: Sequence, num_running: int) -> int:
        """How many guesses to ask for now."""
        if num_running > self.max_running:
            return 0
        rate = sequence.draft_rate
        if rate is None:
            return min(self.max_drafts, PROBE_LENGTH)
        if rate < WORTHWHILE:
            return PROBE_LENGTH if len(sequence.tokens) >= sequence.drafts_resume_at else 0
        length, chance = 1, rate * rate
        while length < self.max_drafts and chance >= WORTHWHILE:
            length += 1
            chance *= rate
        return length

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """A verification is back."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for place in range(min(num_accepted, self.max_drafts)):
            self.accepted_by_position[place] += 1
        self.num_verified += 1
        # tokens after the first wrong guess say nothing: judge only those up to it
        judged = min(num_drafted, num_accepted + 1)
        rate = num_accepted / judged
        old = sequence.draft_rate
        sequence.draft_rate = rate if old is None else old + SMOOTHING * (rate - old)
        if sequence.draft_rate < WORTHWHILE:
            sequence.drafts_resume_at = len(sequence.tokens) + RETRY_AFTER
