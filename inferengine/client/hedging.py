"""Decides when a request without output is sent to a second engine too. Pure: no clock, no I/O.

Hedged requests follow Dean and Barroso, "The tail at scale", 2013. The delay before a hedge is the QUANTILE of recent
times to first token for prompts of similar size, so about one request in twenty is late. At most `share` of all
requests are hedged: each submitted request adds `share` to a budget, which saves up at most BURST hedges. The limit
keeps hedges from doubling the load in an overload, when every request is late.
"""

from __future__ import annotations

from collections import deque

QUANTILE = 0.95
LEAST_SAMPLES = 50  # samples of a size class before its requests are hedged
WINDOW = 256  # latest samples of a size class that count
RECOMPUTED = 16  # new samples after which the delay is computed again
LEAST_DELAY_S = 0.05
BURST = 8.0  # most hedges in the budget


class _Size:
    """Times to first token of prompts whose lengths have the same number of bits."""

    __slots__ = ("delay_s", "num_new", "samples")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=WINDOW)
        self.num_new = 0
        self.delay_s: float | None = None


class HedgeBudget:
    """The hedging delay for each size of prompt, and the budget of hedges."""

    def __init__(self, share: float) -> None:
        """`share`: largest share of requests that are hedged, 0 to 1; 0: none."""
        self._share = share
        self._budget = 0.0
        self._sizes: dict[int, _Size] = {}

    def submitted(self, num_prompt: int) -> float | None:
        """Count a request. Returns the seconds without output after which it may be hedged; None: do not hedge it."""
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
        """Take one hedge out of the budget. Returns False if the budget is spent."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True
