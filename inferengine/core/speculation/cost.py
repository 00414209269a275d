"""SpeculationCost: what guesses add to a step, learnt from finished steps.

For a batch of some size the time of a step is taken to be plain + fixed + slope x guesses: `plain` from steps of as
many rows without guesses, the rest by least squares over the steps with guesses, recent ones first. A GPU with little
to do verifies guesses for nothing, a CPU pays for every row, a draft model costs its own forward passes: all of it is
in the time, so nothing needs to be known of the device.

SpeculationBudget: what guessing may still cost, in steps without guesses: trials stay a small share of the time.

Every step adds a share of its own length. A step with guesses, and one that waited for tokens so that guesses could be
asked for, takes away what it took longer than a plain one; an accepted guess gives back the part of a plain step that
it saved. While there is credit anything may be tried. Without it only guessing that has brought more than it cost of
late goes on, down to a debt of as much as may be saved up: what a draft model read first may be won back.
"""

from __future__ import annotations

from typing import NamedTuple

SMOOTHING = 0.15  # weight of a new plain step
FORGETTING = 0.92  # weight that the past keeps when a step with guesses comes in
DOUBT = 0.4  # weight that it keeps when it was not looked at for a while
MOST_SURPRISE = 3.0  # a step that took longer than so many times the expected is the machine's doing
NEARBY = 1.3  # plain steps of so many times more or fewer rows stand for each other
FIRST_FIXED, FIRST_SLOPE = 0.1, 0.03  # shares of a plain step: believed until something was measured


class Estimate(NamedTuple):
    """Seconds of a step without guesses, of having any, and of each."""

    plain_s: float
    fixed_s: float
    slope_s: float


class _Fit:
    """Least squares of extra seconds over numbers of guesses, both parts not below 0."""

    __slots__ = ("count", "sum_x", "sum_xx", "sum_xy", "sum_y")

    def __init__(self) -> None:
        self.count = self.sum_x = self.sum_y = self.sum_xx = self.sum_xy = 0.0

    def add(self, num_guesses: int, extra_s: float) -> None:
        self.fade(FORGETTING)
        self.count += 1
        self.sum_x += num_guesses
        self.sum_y += extra_s
        self.sum_xx += num_guesses**2
        self.sum_xy += num_guesses * extra_s

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
    """Pure: the caller says what a step held and how long it took."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}  # by number of rows
        self._fits: dict[int, _Fit] = {}  # by bit length of the number of rows

    def observe(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        """A step of `num_rows` rows without prompts is done."""
        if num_guesses == 0:
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
            seconds = self.clipped(num_rows, num_guesses, seconds)
        fit.add(num_guesses, max(0.0, seconds - expected.plain_s))

    def clipped(self, num_rows: int, num_guesses: int, seconds: float) -> float:
        """No more of a step's seconds than may be due to its guesses."""
        expected = self.estimate(num_rows)
        if expected is None or num_rows.bit_length() not in self._fits:
            return seconds
        return _clipped(seconds, expected.plain_s + expected.fixed_s + expected.slope_s * num_guesses)

    def doubt(self, num_rows: int) -> None:
        """What is known of guesses is old: what comes next counts for more."""
        fit = self._fits.get(num_rows.bit_length())
        if fit is not None:
            fit.fade(DOUBT)

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds of a step without guesses; None: it is not known of about so many rows."""
        plain_s = self._plain_s.get(num_rows)
        if plain_s is None:
            nearest = min(self._plain_s, key=lambda known: abs(known - num_rows), default=0)
            if nearest * NEARBY < num_rows or num_rows * NEARBY < nearest:
                return None
            plain_s = self._plain_s[nearest]
        return plain_s

    def estimate(self, num_rows: int) -> Estimate | None:
        """None: it is not known how long a step of about so many rows takes."""
        plain_s = self.plain_s(num_rows)
        if plain_s is None:
            return None
        if plain_s <= 0:
            return Estimate(1.0, FIRST_FIXED, FIRST_SLOPE)  # the clock is too coarse to tell
        fit = self._fits.get(num_rows.bit_length())
        line = (FIRST_FIXED * plain_s, FIRST_SLOPE * plain_s) if fit is None else fit.line()
        return Estimate(plain_s, *line)


def _clipped(seconds: float, expected_s: float) -> float:
    return min(seconds, MOST_SURPRISE * expected_s) if expected_s > 0 else seconds


SHARE = 0.02  # of all time that trials may take
FIRST = 8.0  # plain steps: the credit of an engine that has just begun
MOST = 32.0  # and the most that is ever saved up
CREDIT_SMOOTHING = 0.2  # weight of the last step with guesses in what guessing brings
MOST_OF_A_STEP = 256.0  # plain steps: one that took longer stood still


class SpeculationBudget:
    """Pure: the caller says how long steps took, in plain steps of as many rows."""

    def __init__(self) -> None:
        self.left = FIRST
        self.has_waited = False  # ever: steps are launched behind each other, unless guesses are asked for
        self._brings = 1.0  # plain steps that a step with guesses has saved of late: an engine begins with hope
        self._pending = 0.0  # what the step with guesses that is being committed has brought so far
        self._num_rows = 0  # of that step
        self._is_reading = False

    @property
    def allows(self) -> bool:
        """Whether guesses may be asked for."""
        return self.left > 0 or (self._brings > 0 and self.left > -MOST)

    def rest(self, num_steps: int = 1) -> None:
        """Plain steps are over."""
        if self._num_rows:
            self._settle()
        self.left = min(MOST, self.left + SHARE * num_steps)

    def observe_step(self, num_rows: int, length: float, *, has_waited: bool = False, is_reading: bool = False) -> None:
        """A step with guesses, or one that `has_waited`, took so many plain ones, a draft model's reading of prompts
        included where `is_reading`. Its accepted guesses are told next."""
        if self._num_rows:
            self._settle()
        length = min(length, MOST_OF_A_STEP)
        self.has_waited = self.has_waited or has_waited
        self._num_rows, self._is_reading, self._pending = num_rows, is_reading, 1.0 - length
        self.left = min(MOST, self.left + 1.0 - length + SHARE * length)

    def observe_accepted(self, num_accepted: int) -> None:
        """Of the step just told: each is one token of the many that a plain step gives."""
        if self._num_rows:
            saved = num_accepted / self._num_rows
            self._pending += saved
            self.left = min(MOST, self.left + saved)

    def _settle(self) -> None:
        """All is known of the last step with guesses."""
        if not self._is_reading:
            self._brings += CREDIT_SMOOTHING * (self._pending - self._brings)
        self._num_rows = 0
