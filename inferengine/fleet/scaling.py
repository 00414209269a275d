"""How many engines a fleet needs, by waiting requests per engine and by the time to the first token.

When one of the two is above its target for RAISE_AFTER_S, the number of engines rises in proportion, as with
Kubernetes' horizontal pod autoscaler, and at most doubles. It falls by one after LOWER_AFTER_S in which one engine
fewer would have been enough. While engines are starting nothing is added, so that their effect is seen first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

RAISE_AFTER_S = 10.0
LOWER_AFTER_S = 300.0
TOLERANCE = 0.1  # share by which a target may be exceeded without adding engines
ROOM = 0.5  # one engine fewer is enough if it would use less than this share of the KV caches and of each target


class Load(NamedTuple):
    """Load of one engine.

    `kv_usage` is a share, 0 to 1. `first_token_s` is the 95th percentile of the last half minute; 0: none was measured.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    first_token_s: float = 0.0


class ScalingPolicy:
    """Decides the number of engines of one fleet."""

    def __init__(self, least: int, most: int, queue: float, first_token_ms: float) -> None:
        """`least`, `most`: bounds of the number of engines. `queue`: target of waiting requests for each engine.
        `first_token_ms`: target of the time to the first token; 0: none."""
        self._least, self._most = least, most
        self._queue = queue
        self._first_token_s = first_token_ms / 1e3
        self._high_since: float | None = None
        self._low_since: float | None = None

    def wanted(self, now: float, loads: Sequence[Load], wanted: int) -> int:
        """Return how many engines there should be. `loads`: of the READY engines. `wanted`: the last answer."""
        bounded = min(max(wanted, self._least), self._most)
        if bounded != wanted or len(loads) < wanted or not loads or self._least == self._most:
            self._high_since = self._low_since = None
            return bounded
        pressure = self._pressure(loads, len(loads))
        if pressure > 1.0 + TOLERANCE:
            self._low_since = None
            self._high_since = now if self._high_since is None else self._high_since
            if now - self._high_since < RAISE_AFTER_S:
                return wanted
            self._high_since = None
            return min(self._most, max(wanted + 1, math.ceil(wanted * min(pressure, 2.0))))
        self._high_since = None
        if not self._has_room(loads, wanted - 1):
            self._low_since = None
            return wanted
        self._low_since = now if self._low_since is None else self._low_since
        if now - self._low_since < LOWER_AFTER_S:
            return wanted
        self._low_since = None
        return wanted - 1

    def _pressure(self, loads: Sequence[Load], engines: int) -> float:
        """Return the larger of two ratios: waiting requests to their target, time to the first token to its target."""
        waiting = sum(load.waiting for load in loads) / engines / self._queue
        if not self._first_token_s:
            return waiting
        return max(waiting, max(load.first_token_s for load in loads) / self._first_token_s)

    def _has_room(self, loads: Sequence[Load], engines: int) -> bool:
        if engines < self._least or engines == 0:
            return engines >= self._least and not any(load.running or load.waiting for load in loads)
        usage = sum(load.kv_usage for load in loads) / engines
        return usage <= ROOM and self._pressure(loads, engines) <= ROOM
