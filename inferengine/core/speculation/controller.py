"""Speculation: how many tokens to guess ahead for each sequence, from what guessing has brought and cost so far.

A guess that is right saves a step, a wrong one costs the time to verify it. A sequence's own rate of acceptance r (an
exponential mean) says what a guess is worth: all up to the k-th are right with chance r^k. What a guess costs is
measured (SpeculationCost). Guesses are taken, the likeliest first, while each raises the tokens per second of the step;
where even the best choice does not beat a step without guesses there are none, but for a trial now and then. So the
length follows acceptance and load. What trials cost, with what it costs that a step waits for its tokens and cannot be
launched behind the one before, is kept account of: it stays below a fiftieth of the time (core/speculation/cost.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from inferengine.core.sequence import Sequence
from inferengine.core.speculation.cost import Estimate, SpeculationBudget, SpeculationCost

SMOOTHING = 0.2  # weight of a new observation in a sequence's rate
SHARED_SMOOTHING = 0.05  # and in the rate of all, which a new sequence begins with
FIRST_RATE = 0.6  # before anything was verified
HOPELESS = 0.1  # rate below which a sequence guesses only now and then
LEAST_CHANCE = 0.05  # a guess less likely than this is not asked for
RETRY_AFTER = 32  # tokens after which a sequence that gave up tries again
PROBE_LENGTH = 2  # guesses of a trial
ADVANTAGE = 1.08  # by how much guessing must promise to win
WORTH = 1.25  # a guess is for one sequence, its time is everybody's: it must be worth so much more
FIRST_PAUSE, LAST_PAUSE = 4, 128  # steps between trials while it does not pay, doubled each time
REFRESH = 64  # steps with guesses after which one without is measured again
REFRESH_STEPS = 3  # steps until one is launched behind another again, where that is done
CATCH_UP = 8  # tokens that a draft model reads as fast as one
LOOK_AGAIN, LOOK_AGAIN_LAST = 2, 32  # tokens until a proposer that had nothing to go by is asked again, doubled


class _Load:
    """What is remembered for batches of about one size."""

    __slots__ = ("guessed", "has_read_up", "pause", "resume_at", "steps")

    def __init__(self) -> None:
        self.steps = 0  # planned
        self.guessed = 0  # with guesses, since the last without
        self.resume_at = 0  # number of steps before which nothing is guessed
        self.pause = FIRST_PAUSE
        self.has_read_up = False  # the trial under way was for the draft model to catch up


class SpeculationController:
    """Decides the number of guesses. `max_drafts` bounds it, with more than `max_running` sequences there are none."""

    def __init__(self, max_drafts: int, max_running: int) -> None:
        self.max_drafts = max_drafts
        self.max_running = max_running
        self.cost = SpeculationCost()
        self.credit = SpeculationBudget()
        self.num_drafted = 0
        self.accepted_by_position = [0] * max_drafts
        self.num_accepted = 0
        self.num_verified = 0  # verifications: accepted / verified + 1 is the mean length of a step
        self._shared_rate = FIRST_RATE
        self._loads: dict[int, _Load] = {}  # by bit length of the number of rows

    # -- when --------------------------------------------------------------------------------------------------------

    def begin(self, num_rows: int, num_steps: int = 1) -> bool:
        """A step of so many rows is being planned, so many after the last time: whether guesses should be asked for."""
        if num_rows > self.max_running or num_rows == 0:
            return False
        load = self._load(num_rows)
        load.steps += num_steps
        if not self.is_active(num_rows):
            load.guessed = 0
            return False
        if load.guessed < REFRESH:
            return True
        load.guessed = 0
        if self.credit.has_waited:
            load.resume_at = load.steps + REFRESH_STEPS
        return False

    def is_active(self, num_rows: int) -> bool:
        """Whether guessing pays, or may be tried again, with so many rows."""
        if num_rows == 0 or num_rows > self.max_running:
            return False
        load = self._load(num_rows)
        if load.steps < load.resume_at or not (self.credit.allows or load.has_read_up):
            return False
        return self.cost.plain_s(num_rows) is not None

    def is_due(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether this sequence may guess when it has so many tokens."""
        return num_tokens >= sequence.drafts_resume_at

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether a draft model that guesses for it now has much to read first: the prompt, or what came while there
        were no guesses."""
        return len(sequence.tokens) - sequence.last_draft_at > CATCH_UP

    def begin_drafts(self, sequence: Sequence) -> None:
        """Guesses for it are part of the step that is planned."""
        sequence.is_draft_model_behind = self.is_behind(sequence)
        sequence.last_draft_at = len(sequence.tokens)

    # -- how many ----------------------------------------------------------------------------------------------------

    def length(self, sequence: Sequence) -> int:
        """The most guesses that could be worth while, whatever they cost."""
        rate = self._rate(sequence)
        length, chance = 1, rate * rate
        while length < self.max_drafts and chance >= LEAST_CHANCE:
            length += 1
            chance *= rate
        return max(length, min(PROBE_LENGTH, self.max_drafts))

    def choose(self, offers: Mapping[Sequence, int], num_rows: int, *, on_device: bool) -> dict[Sequence, int]:
        """How many of the guesses on offer to verify in a step of `num_rows` rows."""
        load = self._load(num_rows)
        estimate = self.cost.estimate(num_rows) if offers else None
        if estimate is None:
            load.has_read_up = False
            return {}
        load.guessed += 1
        trials = {sequence: min(length, PROBE_LENGTH) for sequence, length in offers.items()}
        lengths = self._best(offers, num_rows, estimate)
        if lengths:
            load.pause, load.has_read_up = FIRST_PAUSE, False
            return {sequence: trials[sequence] for sequence in trials if self._rate(sequence) < HOPELESS} | lengths
        load.has_read_up = on_device and not load.has_read_up and any(map(self.is_behind, offers))
        if not load.has_read_up:  # else the draft model has much to read first: what guessing costs shows in the next
            self.cost.doubt(num_rows)
            load.resume_at = load.steps + load.pause
            load.pause = min(LAST_PAUSE, 2 * load.pause)
        return trials

    def _best(self, offers: Mapping[Sequence, int], num_rows: int, estimate: Estimate) -> dict[Sequence, int]:
        """The choice with the most tokens per second; empty where that is none at all."""
        chances = [
            (rate**place, sequence)
            for sequence, length in offers.items()
            for rate in (self._rate(sequence),)
            if rate >= HOPELESS
            for place in range(1, length + 1)
        ]
        chances.sort(key=lambda item: -item[0])
        tokens, seconds = float(num_rows), estimate.plain_s + estimate.fixed_s
        lengths: dict[Sequence, int] = {}
        for (
            chance,
            sequence,
        ) in chances:  # a sequence's own come in their order: each is less likely than the one before
            if chance * seconds < WORTH * estimate.slope_s * tokens:
                break
            tokens, seconds = tokens + chance, seconds + estimate.slope_s
            lengths[sequence] = lengths.get(sequence, 0) + 1
        return lengths if tokens * estimate.plain_s > ADVANTAGE * num_rows * seconds else {}

    # -- what came of it ---------------------------------------------------------------------------------------------

    def nothing_offered(self, sequence: Sequence) -> None:
        """The proposer had nothing to go by: ask again a little later, and later each time."""
        sequence.draft_pause = min(LOOK_AGAIN_LAST, 2 * sequence.draft_pause or LOOK_AGAIN)
        sequence.drafts_resume_at = len(sequence.tokens) + sequence.draft_pause

    def observe_step(
        self,
        num_rows: int,
        num_guesses: int,
        seconds: float,
        *,
        has_waited: bool,
        is_reading: bool,
        num_steps: int = 1,
    ) -> None:
        """How long a step of `num_rows` rows without prompts took, and the plain ones before it that were not looked
        at. `has_waited`: nothing was launched behind the step before, for the sake of guesses. `is_reading`: a draft
        model had much to read in it."""
        if num_rows > self.max_running:
            return
        plain_s = self.cost.plain_s(num_rows)
        if plain_s and not (num_guesses or has_waited):
            self.credit.rest(num_steps)
            self.cost.observe(num_rows, 0, seconds)
            return
        if num_guesses and not is_reading:
            seconds = self.cost.clipped(num_rows, num_guesses, seconds)
        if plain_s:
            self.credit.observe_step(
                num_rows,
                seconds / plain_s,
                has_waited=has_waited,
                is_reading=is_reading,
            )
        if not (is_reading or (has_waited and not num_guesses)):
            self.cost.observe(num_rows, num_guesses, seconds)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """A verification is back."""
        self.credit.observe_accepted(num_accepted)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        for place in range(min(num_accepted, self.max_drafts)):
            self.accepted_by_position[place] += 1
        self.num_verified += 1
        # tokens after the first wrong guess say nothing: judge only those up to it
        rate = num_accepted / min(num_drafted, num_accepted + 1)
        old = self._rate(sequence)
        sequence.acceptance_rate = old + SMOOTHING * (rate - old)
        self._shared_rate += SHARED_SMOOTHING * (rate - self._shared_rate)
        sequence.draft_pause = 0
        if sequence.acceptance_rate < HOPELESS:
            sequence.drafts_resume_at = len(sequence.tokens) + RETRY_AFTER

    def _rate(self, sequence: Sequence) -> float:
        return self._shared_rate if sequence.acceptance_rate is None else sequence.acceptance_rate

    def _load(self, num_rows: int) -> _Load:
        load = self._loads.get(num_rows.bit_length())
        if load is None:
            load = self._loads[num_rows.bit_length()] = _Load()
        return load
