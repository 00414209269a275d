"""What was done to the service and when, so that what a client met can be told from a fault of the product."""

from __future__ import annotations

import time
from typing import NamedTuple

SETTLES_S = 15.0  # after a part is back: its peers find it again


class Disturbance(NamedTuple):
    """`what`: a fault and the part that it met, such as `kill engine`. `over_s`: None while it lasts."""

    what: str
    began_s: float
    over_s: float | None


class Disturbances:
    """Faults in the order they began."""

    def __init__(self) -> None:
        self._all: list[Disturbance] = []

    def begin(self, what: str) -> int:
        """Note the beginning. Returns the place for `end`."""
        self._all.append(Disturbance(what, time.monotonic(), None))
        return len(self._all) - 1

    def end(self, place: int) -> float:
        """Note that its effect is over. Returns its seconds."""
        found = self._all[place]._replace(over_s=time.monotonic())
        self._all[place] = found
        assert found.over_s is not None
        return found.over_s - found.began_s

    def touched(self, what: str, since_s: float) -> bool:
        """Whether one with these words in its name lasted, or had just ended, at a moment from `since_s` to now."""
        return any(
            all(word in one.what.split() for word in what.split())
            and (one.over_s is None or one.over_s + SETTLES_S >= since_s)
            for one in self._all
        )
