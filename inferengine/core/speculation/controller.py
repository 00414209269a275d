"""SpeculationController: how many draft tokens each sequence gets, from what speculation has gained and cost so far.

An accepted draft token saves a step, a rejected one costs the time to verify it. A sequence's own acceptance rate r (an
exponential mean) says what a draft token is worth: all up to the k-th are right with chance r^k. What a draft token
costs is measured (SpeculationCost). Draft tokens are chosen, the likeliest first, while each raises the tokens per
second of the step. Where even the best choice does not beat a step without any there are none, but for a trial now and
then. So the length follows acceptance and load. The time of trials, and the time lost because a step has to wait for
its tokens and cannot be launched behind the one before, stays below 2 % of all time (SpeculationBudget).
"""

from __future__ import annotations

from collections.abc import Mapping

from inferengine.core.sequence import Sequence
from inferengine.core.speculation.cost import Estimate, SpeculationBudget, SpeculationCost

SMOOTHING = 0.2  # weight of a new observation in a sequence's rate
SHARED_SMOOTHING = 0.05  # weight in the rate over all sequences, which a new sequence begins with
FIRST_RATE = 0.6  # before anything was verified
MIN_RATE = 0.1  # rate below which a sequence has draft tokens only in trials
MIN_CHANCE = 0.05  # chance of acceptance below which a draft token is not requested
RETRY_AFTER = 32  # tokens until a sequence below MIN_RATE has its next trial
TRIAL_LENGTH = 2  # draft tokens of a trial
MIN_SPEEDUP = 1.08  # expected speed-up of a step below which it has no draft tokens
MIN_GAIN = 1.25  # required gain per cost of a draft token: its cost delays the whole batch
FIRST_PAUSE, LAST_PAUSE = 4, 128  # steps between trials while speculation does not pay, doubled each time
REFRESH = 64  # steps with draft tokens after which one without is measured again
REFRESH_STEPS = 3  # steps until steps overlap again, where the executor overlaps them
CATCH_UP = 8  # tokens that a draft model reads in about the time of one
FIRST_RETRY, LAST_RETRY = 2, 32  # tokens until a proposer that found nothing is asked again, doubled each time


class _History:
    """The history of batches of about one size."""

    __slots__ = ("is_catching_up", "num_drafted_steps", "pause", "resume_at", "steps")

    def __init__(self) -> None:
        self.steps = 0  # planned
        self.num_drafted_steps = 0  # steps with draft tokens since the last one without
        self.resume_at = 0  # number of steps before which there are no draft tokens
        self.pause = FIRST_PAUSE
        self.is_catching_up = False  # the trial under way lets the draft model read what it has missed


class SpeculationController:
    """Decides the number of draft tokens: at most `max_drafts` a sequence, none beyond `max_running` sequences."""

    def __init__(self, max_drafts: int, max_running: int) -> None:
        self.max_drafts = max_drafts
        self.max_running = max_running
        self.cost = SpeculationCost()
        self.budget = SpeculationBudget()
        self.num_drafted = 0
        self.accepted_by_position = [0] * max_drafts
        self.num_accepted = 0
        self.num_verified = 0  # verified rows: accepted / verified + 1 is the mean number of tokens of such a row
        self._shared_rate = FIRST_RATE
        self._histories: dict[int, _History] = {}  # by bit length of the number of rows

    # -- when --------------------------------------------------------------------------------------------------------

    def begin(self, num_rows: int, num_steps: int = 1) -> bool:
        """Count a planned step, `num_steps` after the last call. Returns whether to ask for draft tokens."""
        if num_rows > self.max_running or num_rows == 0:
            return False
        history = self._history(num_rows)
        history.steps += num_steps
        if not self.is_active(num_rows):
            history.num_drafted_steps = 0
            return False
        if history.num_drafted_steps < REFRESH:
            return True
        history.num_drafted_steps = 0
        if self.budget.has_waited:
            history.resume_at = history.steps + REFRESH_STEPS
        return False

    def is_active(self, num_rows: int) -> bool:
        """Whether speculation pays, or may be tried again, with so many rows."""
        if num_rows == 0 or num_rows > self.max_running:
            return False
        history = self._history(num_rows)
        if history.steps < history.resume_at or not (self.budget.allows or history.is_catching_up):
            return False
        return self.cost.plain_s(num_rows) is not None

    def is_due(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether this sequence may have draft tokens when it has so many tokens."""
        return num_tokens >= sequence.drafts_resume_at

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether a draft model has much to read first: the prompt, or the tokens since its last draft tokens."""
        return len(sequence.tokens) - sequence.last_draft_at > CATCH_UP

    def begin_drafts(self, sequence: Sequence) -> None:
        """Note that the step being planned has draft tokens of this sequence."""
        sequence.is_draft_model_behind = self.is_behind(sequence)
        sequence.last_draft_at = len(sequence.tokens)

    # -- how many ----------------------------------------------------------------------------------------------------

    def length(self, sequence: Sequence) -> int:
        """Return the most draft tokens that could be accepted with at least MIN_CHANCE, whatever they cost."""
        rate = self._rate(sequence)
        length, chance = 1, rate * rate
        while length < self.max_drafts and chance >= MIN_CHANCE:
            length += 1
            chance *= rate
        return max(length, min(TRIAL_LENGTH, self.max_drafts))

    def choose(self, offers: Mapping[Sequence, int], num_rows: int, *, on_device: bool) -> dict[Sequence, int]:
        """Return how many of the offered draft tokens to verify in a step of `num_rows` rows, by sequence."""
        history = self._history(num_rows)
        estimate = self.cost.estimate(num_rows) if offers else None
        if estimate is None:
            history.is_catching_up = False
            return {}
        history.num_drafted_steps += 1
        trials = {sequence: min(length, TRIAL_LENGTH) for sequence, length in offers.items()}
        lengths = self._best(offers, num_rows, estimate)
        if lengths:
            history.pause, history.is_catching_up = FIRST_PAUSE, False
            return {sequence: trials[sequence] for sequence in trials if self._rate(sequence) < MIN_RATE} | lengths
        history.is_catching_up = on_device and not history.is_catching_up and any(map(self.is_behind, offers))
        if not history.is_catching_up:  # else the draft model reads first, and the next trial shows the cost
            self.cost.fade(num_rows)
            history.resume_at = history.steps + history.pause
            history.pause = min(LAST_PAUSE, 2 * history.pause)
        return trials

    def _best(self, offers: Mapping[Sequence, int], num_rows: int, estimate: Estimate) -> dict[Sequence, int]:
        """The choice with the most tokens per second; empty if no draft tokens give more."""
        chances = [
            (rate**place, sequence)
            for sequence, length in offers.items()
            for rate in (self._rate(sequence),)
            if rate >= MIN_RATE
            for place in range(1, length + 1)
        ]
        chances.sort(key=lambda item: -item[0])
        tokens, seconds = float(num_rows), estimate.plain_s + estimate.fixed_s
        lengths: dict[Sequence, int] = {}
        for (
            chance,
            sequence,
        ) in chances:  # those of one sequence come in order: each is less likely than the one before
            if chance * seconds < MIN_GAIN * estimate.slope_s * tokens:
                break
            tokens, seconds = tokens + chance, seconds + estimate.slope_s
            lengths[sequence] = lengths.get(sequence, 0) + 1
        return lengths if tokens * estimate.plain_s > MIN_SPEEDUP * num_rows * seconds else {}

    # -- results -----------------------------------------------------------------------------------------------------

    def nothing_offered(self, sequence: Sequence) -> None:
        """Note that the proposer found nothing for this sequence: it is asked again later, and later each time."""
        sequence.draft_pause = min(LAST_RETRY, 2 * sequence.draft_pause or FIRST_RETRY)
        sequence.drafts_resume_at = len(sequence.tokens) + sequence.draft_pause

    def observe_step(
        self,
        num_rows: int,
        num_draft_tokens: int,
        seconds: float,
        *,
        has_waited: bool,
        is_reading: bool,
        num_steps: int = 1,
    ) -> None:
        """Learn from the time of a step of `num_rows` rows without prompts.

        `num_steps` counts it and the plain steps before it that were not measured. `has_waited`: it was not launched
        behind the step before, because of speculation. `is_reading`: a draft model had much to read in it.
        """
        if num_rows > self.max_running:
            return
        plain_s = self.cost.plain_s(num_rows)
        if plain_s and not (num_draft_tokens or has_waited):
            self.budget.observe_plain(num_steps)
            self.cost.observe(num_rows, 0, seconds)
            return
        if num_draft_tokens and not is_reading:
            seconds = self.cost.clipped(num_rows, num_draft_tokens, seconds)
        if plain_s:
            self.budget.observe_step(
                num_rows,
                seconds / plain_s,
                has_waited=has_waited,
                is_reading=is_reading,
            )
        if not (is_reading or (has_waited and not num_draft_tokens)):
            self.cost.observe(num_rows, num_draft_tokens, seconds)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified row: how many of its draft tokens were accepted."""
        self.budget.observe_accepted(num_accepted)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        for place in range(min(num_accepted, self.max_drafts)):
            self.accepted_by_position[place] += 1
        self.num_verified += 1
        # draft tokens after the first rejected one say nothing: count only those up to it
        rate = num_accepted / min(num_drafted, num_accepted + 1)
        old = self._rate(sequence)
        sequence.acceptance_rate = old + SMOOTHING * (rate - old)
        self._shared_rate += SHARED_SMOOTHING * (rate - self._shared_rate)
        sequence.draft_pause = 0
        if sequence.acceptance_rate < MIN_RATE:
            sequence.drafts_resume_at = len(sequence.tokens) + RETRY_AFTER

    def _rate(self, sequence: Sequence) -> float:
        return self._shared_rate if sequence.acceptance_rate is None else sequence.acceptance_rate

    def _history(self, num_rows: int) -> _History:
        history = self._histories.get(num_rows.bit_length())
        if history is None:
            history = self._histories[num_rows.bit_length()] = _History()
        return history
