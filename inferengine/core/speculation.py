"""Speculation: draft tokens from a proposer, with KV blocks for them, in the steps in which that pays.

Proposers, by `speculation.method`: prompt lookup on the host, or a draft model on the device. Prompt lookup (Saxena,
"Prompt Lookup Decoding", 2023) proposes that what followed the last few tokens before will follow them again. It needs
no second model, and is accepted most of the time where an output copies from its prompt: summaries, edits of code,
extraction. Of the places where the last two tokens stood before, it copies from the one where most tokens before them
match, too. The index grows with the sequence by one dictionary entry per token, and a proposal compares a bounded
number of places, whatever the length. A request may bring a prediction of its output, such as the file that is to be
edited: its tokens go before what is looked up.

SpeculationController: how many draft tokens each sequence gets, from what speculation has gained and cost so far. An
accepted draft token saves a step, a rejected one costs the time to verify it. A sequence's own acceptance rate r (an
exponential mean) says what a draft token is worth: all up to the k-th are right with chance r^k. Draft tokens are
chosen, the likeliest first, while each raises the tokens per second of the step. Where even the best choice does not
beat a step without any there are none, but for a trial now and then. So the length follows acceptance and load.

SpeculationCost: what a draft token costs is measured. The time of a step of some number of rows is modelled as plain +
fixed + slope × draft tokens: `plain` from steps of as many rows without draft tokens, the rest by least squares over
the steps with some, recent ones first. A GPU with little to do verifies draft tokens in the same time, a CPU pays for
every row, a draft model costs its own forward passes. All of it shows in the time, so nothing needs to be known of the
device.

SpeculationBudget: the time of trials, and the time lost because a step has to wait for its tokens and cannot be
launched behind the one before, stays below 2 % of all time. A token bucket counts plain steps (steps without draft
tokens, of as many rows). Each step refills 2 % of its duration. A step with draft tokens, and one that waited for
tokens because of speculation, spends its overhead over a plain step; an accepted draft token gives back the part of a
plain step that it saved. While the budget is positive any trial is allowed. Below 0 speculation continues only if it
has gained more than it cost of late, down to a debt of as much as may be saved up: this lets it win back what a draft
model spends on reading a prompt first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple, Protocol

from inferengine.core.executor import Capacity
from inferengine.core.kv_cache import KVCacheManager
from inferengine.core.sequence import Sequence
from inferengine.errors import ConfigError

# -- proposers ---------------------------------------------------------------------------------------------------------

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
    """Resolve `speculation.method`: `auto` is `draft` if the executor has loaded a draft model, else `none`. Raises
    ConfigError where the model's states cannot be taken back when a draft token was wrong."""
    if capacity.has_states and method not in ("auto", "none"):
        raise ConfigError(
            "speculation.method",
            "the model keeps states, which cannot be taken back after a wrong draft: set it to none",
        )
    if method == "auto":
        return "draft" if capacity.has_draft_model else "none"
    return method


def build_proposer(method: str, capacity: Capacity) -> Proposer | None:
    """Make the proposer of `speculation.method`; None without speculation."""
    return PROPOSERS[speculation_method(method, capacity)]()


# -- how many draft tokens ---------------------------------------------------------------------------------------------


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

# Of SpeculationCost and SpeculationBudget:
PLAIN_SMOOTHING = 0.15  # weight of a new plain step
FORGETTING = 0.92  # weight that past steps keep when a step with draft tokens comes in
STALE = 0.4  # weight that they keep when nothing was measured for a while
OUTLIER = 3.0  # clip steps at so many times the expected time: what is longer has other causes
NEARBY = 1.3  # the time of plain steps is taken from those of up to so many times more or fewer rows
FIRST_FIXED, FIRST_SLOPE = 0.1, 0.03  # shares of a plain step: assumed until something was measured
REFILL = 0.02  # of all time that trials may take
FIRST_BUDGET = 8.0  # plain steps that a new engine starts with
MAX_BUDGET = 32.0  # plain steps that are saved up at most
GAIN_SMOOTHING = 0.2  # weight of the last step with draft tokens in what speculation gains
MAX_STEP = 256.0  # plain steps: longer steps are cut to this
QUIET_STEPS = 8  # most steps without another look at whether a sequence could have draft tokens
LOOK_EVERY = 4  # of those steps only every fourth is measured: measuring takes microseconds, too


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
        """Return whether speculation pays, or may be tried again, with so many rows."""
        if num_rows == 0 or num_rows > self.max_running:
            return False
        history = self._history(num_rows)
        if history.steps < history.resume_at or not (self.budget.allows or history.is_catching_up):
            return False
        return self.cost.plain_s(num_rows) is not None

    def is_due(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether this sequence may have draft tokens when it has so many tokens."""
        return num_tokens >= sequence.drafts_resume_at

    def is_behind(self, sequence: Sequence) -> bool:
        """Return whether a draft model has much to read first: the prompt, or the tokens since its last draft
        tokens."""
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
        """Return the draft lengths with the most tokens per second; empty if no draft tokens give more."""
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
        # those of one sequence come in order: each is less likely than the one before
        for chance, sequence in chances:
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


class Estimate(NamedTuple):
    """Seconds of a step without draft tokens, of having any, and of each."""

    plain_s: float
    fixed_s: float
    slope_s: float


class _Fit:
    """Least squares of extra seconds over numbers of draft tokens, both parts not below 0."""

    __slots__ = ("count", "sum_x", "sum_xx", "sum_xy", "sum_y")

    def __init__(self) -> None:
        self.count = self.sum_x = self.sum_y = self.sum_xx = self.sum_xy = 0.0

    def add(self, num_draft_tokens: int, extra_s: float) -> None:
        self.fade(FORGETTING)
        self.count += 1
        self.sum_x += num_draft_tokens
        self.sum_y += extra_s
        self.sum_xx += num_draft_tokens**2
        self.sum_xy += num_draft_tokens * extra_s

    def fade(self, factor: float) -> None:
        for name in self.__slots__:
            setattr(self, name, factor * getattr(self, name))

    def line(self) -> tuple[float, float]:
        """Return the fitted line as (value at 0, slope)."""
        spread = self.count * self.sum_xx - self.sum_x**2
        if spread > 0.01 * self.sum_x**2:
            slope = (self.count * self.sum_xy - self.sum_x * self.sum_y) / spread
            fixed = (self.sum_y - slope * self.sum_x) / self.count
            if slope >= 0 and fixed >= 0:
                return fixed, slope
            if slope < 0:
                return max(0.0, self.sum_y / self.count), 0.0
        return 0.0, max(0.0, self.sum_xy / self.sum_xx)  # all about equal: through the origin


class SpeculationCost:
    """Estimates the time of steps with draft tokens. Pure: the caller says what a step held and how long it took."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # by number of rows
        self._fits: dict[int, _Fit] = {}  # by bit length of the number of rows

    def observe(self, num_rows: int, num_draft_tokens: int, seconds: float) -> None:
        """Learn from a finished step of `num_rows` rows without prompts."""
        if num_draft_tokens == 0:
            old = self._plain_s.get(num_rows)
            self._plain_s[num_rows] = seconds if old is None else old + PLAIN_SMOOTHING * (_clipped(seconds, old) - old)
            return
        expected = self.estimate(num_rows)
        if expected is None:
            return
        fit = self._fits.get(num_rows.bit_length())
        if fit is None:
            fit = self._fits[num_rows.bit_length()] = _Fit()
        else:
            seconds = self.clipped(num_rows, num_draft_tokens, seconds)
        fit.add(num_draft_tokens, max(0.0, seconds - expected.plain_s))

    def clipped(self, num_rows: int, num_draft_tokens: int, seconds: float) -> float:
        """Return a step's seconds, clipped at OUTLIER times the expected ones."""
        expected = self.estimate(num_rows)
        if expected is None or num_rows.bit_length() not in self._fits:
            return seconds
        return _clipped(seconds, expected.plain_s + expected.fixed_s + expected.slope_s * num_draft_tokens)

    def fade(self, num_rows: int) -> None:
        """Give past steps with draft tokens less weight: they were measured a while ago."""
        fit = self._fits.get(num_rows.bit_length())
        if fit is not None:
            fit.fade(STALE)

    def plain_s(self, num_rows: int) -> float | None:
        """Return the seconds of a step without draft tokens; None: not known for about so many rows."""
        plain_s = self._plain_s.get(num_rows)
        if plain_s is None:
            nearest = min(self._plain_s, key=lambda known: abs(known - num_rows), default=0)
            if nearest * NEARBY < num_rows or num_rows * NEARBY < nearest:
                return None
            plain_s = self._plain_s[nearest]
        return plain_s

    def estimate(self, num_rows: int) -> Estimate | None:
        """Return the expected times of a step; None: not known for about so many rows."""
        plain_s = self.plain_s(num_rows)
        if plain_s is None:
            return None
        if plain_s <= 0:
            return Estimate(1.0, FIRST_FIXED, FIRST_SLOPE)  # the clock is too coarse to measure it
        fit = self._fits.get(num_rows.bit_length())
        line = (FIRST_FIXED * plain_s, FIRST_SLOPE * plain_s) if fit is None else fit.line()
        return Estimate(plain_s, *line)


def _clipped(seconds: float, expected_s: float) -> float:
    return min(seconds, OUTLIER * expected_s) if expected_s > 0 else seconds


class SpeculationBudget:
    """The token bucket. Pure: the caller says how long steps took, in plain steps of as many rows."""

    def __init__(self) -> None:
        self.left = FIRST_BUDGET
        self.has_waited = False  # ever: the executor overlaps steps, except where speculation waits for tokens
        self._gain = 1.0  # plain steps that a step with draft tokens has saved of late; positive at first, to begin
        self._pending = 0.0  # what the step being committed has saved so far
        self._num_rows = 0  # of that step
        self._is_reading = False

    @property
    def allows(self) -> bool:
        """Whether draft tokens may be asked for."""
        return self.left > 0 or (self._gain > 0 and self.left > -MAX_BUDGET)

    def observe_plain(self, num_steps: int = 1) -> None:
        """Refill for plain steps."""
        if self._num_rows:
            self._settle()
        self.left = min(MAX_BUDGET, self.left + REFILL * num_steps)

    def observe_step(self, num_rows: int, length: float, *, has_waited: bool = False, is_reading: bool = False) -> None:
        """Spend the overhead of a step with draft tokens, or of one that `has_waited`, of `length` plain steps.

        With `is_reading` a draft model's reading of prompts is part of it. Call `observe_accepted` next.
        """
        if self._num_rows:
            self._settle()
        length = min(length, MAX_STEP)
        self.has_waited = self.has_waited or has_waited
        self._num_rows, self._is_reading, self._pending = num_rows, is_reading, 1.0 - length
        self.left = min(MAX_BUDGET, self.left + 1.0 - length + REFILL * length)

    def observe_accepted(self, num_accepted: int) -> None:
        """Give back what accepted draft tokens of the step just observed have saved: one row of a plain step each."""
        if self._num_rows:
            saved = num_accepted / self._num_rows
            self._pending += saved
            self.left = min(MAX_BUDGET, self.left + saved)

    def _settle(self) -> None:
        """Add the last step with draft tokens, now complete, to the gain."""
        if not self._is_reading:
            self._gain += GAIN_SMOOTHING * (self._pending - self._gain)
        self._num_rows = 0


class Speculator:
    """Joins a proposer, the controller of how much to propose, and the scheduler's running sequences.

    `running` is the scheduler's own list, in order of admission. `proposer` is None without speculation.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        kv: KVCacheManager,
        running: list[Sequence],
        *,
        max_drafts: int,
        max_running: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.proposer = proposer
        self.controller = SpeculationController(max_drafts, max_running)
        self._kv = kv
        self._running = running
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waited_step = 0  # the last step that was not launched behind another, because of speculation
        self._quiet_until = 0  # step before which no sequence could have draft tokens
        self._begun_step = self._observed_step = 0  # the last steps planned and measured with speculation in mind

    def propose(self, step: int) -> dict[Sequence, list[int]]:
        """Return draft tokens for sequences whose tokens are all known. Their blocks are allocated; no sequence is
        preempted for draft tokens."""
        running, proposer, controller = self._running, self.proposer, self.controller
        if proposer is None or step < self._quiet_until:
            return {}
        num_steps, self._begun_step = step - self._begun_step, step
        if not controller.begin(len(running), num_steps):
            return {}
        offers: dict[Sequence, list[int]] = {}
        for sequence in running:
            total = len(sequence.tokens)
            if sequence.num_inflight or total - sequence.num_computed != 1 or not controller.is_due(sequence, total):
                continue
            if sequence.grammar is not None and proposer.on_device:
                continue  # the device cannot check draft tokens against a grammar
            most = min(controller.length(sequence), sequence.max_total - total - 1)
            if most <= 0:
                continue
            tokens = proposer.propose(sequence, most)
            if sequence.grammar is not None:
                tokens = tokens[: sequence.grammar.validate(tokens)]
            if tokens:
                offers[sequence] = tokens
            else:
                controller.nothing_offered(sequence)
        lengths = controller.choose(
            {sequence: len(tokens) for sequence, tokens in offers.items()}, len(running), on_device=proposer.on_device
        )
        chosen: dict[Sequence, list[int]] = {}
        room = max(0, self._max_num_batched_tokens - len(running))  # every running sequence keeps its own token
        for sequence, tokens in offers.items():
            tokens = tokens[: min(lengths.get(sequence, 0), room)]
            if tokens and self._kv.allocate(sequence, len(sequence.tokens) + len(tokens)):
                chosen[sequence] = tokens
                controller.begin_drafts(sequence)
                room -= len(tokens)
        return chosen

    def wants_results(self, step: int, is_verifying: bool) -> bool:
        """Return whether planning this step should wait for the tokens under way. `is_verifying`: the last step has
        draft tokens, so its sequences' lengths are not known."""
        if is_verifying or (self.proposer is not None and self._could_propose(self.proposer, step)):
            self._waited_step = step
            return True
        return False

    def observe_step(
        self, step: int, num_rows: int, num_draft_tokens: int, verified: list[Sequence], seconds: float
    ) -> None:
        """Learn from the time of a step without prompts. `verified`: the sequences that had draft tokens in it."""
        if step < self._quiet_until and step % LOOK_EVERY and not num_draft_tokens:
            return
        on_device = self.proposer is not None and self.proposer.on_device
        self.controller.observe_step(
            num_rows,
            num_draft_tokens,
            seconds,
            num_steps=min(LOOK_EVERY, step - self._observed_step),
            has_waited=step == self._waited_step,
            # the draft model has read prompts in this step, or what came since its last draft tokens
            is_reading=on_device and any(sequence.is_draft_model_behind for sequence in verified),
        )
        self._observed_step = step

    def _could_propose(self, proposer: Proposer, step: int) -> bool:
        """Return whether it is worth waiting for the tokens under way. A proposer on the host is asked what it would
        propose after the tokens that are known: where it has nothing now, it will hardly have anything after one
        more."""
        if step < self._quiet_until:
            return False
        running, controller = self._running, self.controller
        quiet = QUIET_STEPS
        if controller.is_active(len(running)):
            for sequence in running:
                if sequence.num_pending == 1 and controller.is_due(sequence, sequence.num_tokens):
                    if proposer.on_device or proposer.propose(sequence, 1):
                        return True
                    controller.nothing_offered(sequence)
                quiet = min(quiet, max(1, sequence.drafts_resume_at - sequence.num_tokens))
        self._quiet_until = step + quiet
        return False
