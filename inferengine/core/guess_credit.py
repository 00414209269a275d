"""GuessCredit: what guessing may still cost, in steps without guesses: trials stay a small share of the time.

Every step adds a share of its own length. A step with guesses, and one that waited for tokens so that guesses could be
asked for, takes away what it took longer than a plain one; an accepted guess gives back the part of a plain step that
it saved. While there is credit anything may be tried. Without it only guessing that has brought more than it cost of
late goes on, down to a debt of as much as may be saved up: what a draft model read first may be won back.
"""

from __future__ import annotations

SHARE = 0.02  # of all time that trials may take
FIRST = 8.0  # plain steps: the credit of an engine that has just begun
MOST = 32.0  # and the most that is ever saved up
SMOOTHING = 0.2  # weight of the last step with guesses in what guessing brings
MOST_OF_A_STEP = 256.0  # plain steps: one that took longer stood still


class GuessCredit:
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
            self._brings += SMOOTHING * (self._pending - self._brings)
        self._num_rows = 0
