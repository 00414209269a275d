"""A histogram as Prometheus wants it, with percentiles of its latest samples."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any

RECENT = 4096  # samples behind the percentiles


class Histogram:
    """Counts per bucket, as Prometheus wants them, and the latest samples for percentiles."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0
        self.count = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, value: float, times: int = 1) -> None:
        """Add a sample, or `times` equal ones at once."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times
        self.count += times
        self._recent.append(value)

    def to_map(self) -> dict[str, Any]:
        """Return bounds, counts and sum. `counts` are per bucket, not cumulative; the last one is above every bound."""
        return {"buckets": list(self.buckets), "counts": list(self.counts), "sum": self.sum, "count": self.count}

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the latest samples, by name; empty without samples."""
        ordered = sorted(self._recent)
        if not ordered:
            return {}
        last = len(ordered) - 1
        return {f"p{share}": ordered[round(last * share / 100)] for share in (50, 95, 99)}
