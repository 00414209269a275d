"""What speculation costs, learnt from finished steps, and the budget that limits what it may cost.

SpeculationCost: the time of a step of some number of rows is modelled as plain + fixed + slope × draft tokens: `plain`
from steps of as many rows without draft tokens, the rest by least squares over the steps with some, recent ones first.
A GPU with little to do verifies draft tokens in the same time, a CPU pays for every row, a draft model costs its own
forward passes. All of it shows in the time, so nothing needs to be known of the device.

SpeculationBudget: a token bucket, counted in plain steps (steps without draft tokens, of as many rows). Each step
refills 2 % of its duration. A step with draft tokens, and one that waited for tokens because of speculation, spends its
overhead over a plain step; an accepted draft token gives back the part of a plain step that it saved. While the budget
is positive any trial is allowed. Below 0 speculation continues only if it has gained more than it cost of late, down to
a debt of as much as may be saved up: this lets it win back what a draft model spends on reading a prompt first.
"""

from __future__ import annotations

from typing import NamedTuple

SMOOTHING = 0.15  # weight of a new plain step
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

    def fade(self, share: float) -> None:
        for name in self.__slots__:
            setattr(self, name, share * getattr(self, name))

    def line(self) -> tuple[float, float]:
        """(at 0, slope)."""
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
            self._plain_s[num_rows] = seconds if old is None else old + SMOOTHING * (_clipped(seconds, old) - old)
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
