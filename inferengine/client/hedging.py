"""When a request that has produced nothing is sent to a second engine as well. Pure.

A hedged request (Dean and Barroso, "The tail at scale", 2013): the delay is the QUANTILE of the times to first token
measured lately for prompts of its size, so that about one request in twenty is late by this measure. Of all requests at
most `share` are hedged: each one submitted earns that part of a hedge, and at most BURST are saved up. So an overload,
where every request is late, does not double itself.
"""

from __future__ import annotations

from collections import deque

QUANTILE = 0.95
LEAST_SAMPLES = 50  # of a size, before its requests are hedged
WINDOW = 256  # latest samples of a size
RECOMPUTED = 16  # after so many new samples the delay is computed again
LEAST_DELAY_S = 0.05
BURST = 8.0


class _Size:
    """Times to first token of prompts whose lengths have the same number of bits."""

    __slots__ = ("delay_s", "num_new", "samples")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=WINDOW)
        self.num_new = 0
        self.delay_s: float | None = None


class HedgeBudget:
    """Delays by prompt size, and the budget of hedges."""

    def __init__(self, share: float) -> None:
        """`share`: most hedges, as a part of all requests; 0: none."""
        self._share = share
        self._budget = 0.0
        self._sizes: dict[int, _Size] = {}

    def submitted(self, num_prompt: int) -> float | None:
        """Count a request. Returns after how many seconds without output it may be hedged; None: not known yet."""
        self._budget = min(BURST, self._budget + self._share)
        size = self._sizes.get(num_prompt.bit_length())
        return None if size is None or not self._share else size.delay_s

    def observed(self, num_prompt: int, first_token_s: float) -> None:
        """Record how long the first token of a request took."""
        size = self._sizes.setdefault(num_prompt.bit_length(), _Size())
        size.samples.append(first_token_s)
        size.num_new += 1
        if len(size.samples) >= LEAST_SAMPLES and (size.delay_s is None or size.num_new >= RECOMPUTED):
            ordered = sorted(size.samples)
            size.delay_s = max(LEAST_DELAY_S, ordered[int(QUANTILE * len(ordered))])
            size.num_new = 0

    def take(self) -> bool:
        """Take a hedge out of the budget. False: it is spent."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True
