"""Records the faults that were injected and when, to tell their consequences from faults of the product."""

from __future__ import annotations

import time
from typing import NamedTuple

SETTLES_S = 15.0  # how long peers may take to find a part again after it is back


class Disturbance(NamedTuple):
    """An injected fault. `what`: the fault and its part, such as `kill engine`. `over_s`: None while it lasts."""

    what: str
    began_s: float
    over_s: float | None


class Disturbances:
    """Faults in the order they began."""

    def __init__(self) -> None:
        self._all: list[Disturbance] = []

    def begin(self, what: str) -> int:
        """Record the beginning of a fault. Returns the index to pass to `end`."""
        self._all.append(Disturbance(what, time.monotonic(), None))
        return len(self._all) - 1

    def end(self, place: int) -> float:
        """Record that a fault's effect is over. Returns how many seconds it lasted."""
        found = self._all[place]._replace(over_s=time.monotonic())
        self._all[place] = found
        assert found.over_s is not None
        return found.over_s - found.began_s

    def touched(self, what: str, since_s: float) -> bool:
        """Return whether a fault with all these words in its name was in effect, or just over, since `since_s`."""
        return any(
            all(word in one.what.split() for word in what.split())
            and (one.over_s is None or one.over_s + SETTLES_S >= since_s)
            for one in self._all
        )
