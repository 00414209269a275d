"""How fast the machine is from moment to moment: a fixed piece of work, timed again and again between steps.

A virtual machine's processor time is not a constant measure: what the neighbours do with shared caches, memory and
cores makes the very same step take 20 % longer a second later. The yardstick reads 24 MB of weights for 16 rows and
launches small operations, as a step of the embedded model does, and takes about 5 % of the time. The clock of the run
stands still meanwhile. A GPU that nobody shares needs no yardstick: its pace is 1.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.device import Clock

INTERVAL_S = 0.2
WINDOW_S = 1.0  # to both sides: one measurement scatters by 15 %
_MATRICES, _ROWS, _SMALL = 3, 16, 200


class Sample(NamedTuple):
    """One measurement: when, by the run's clock, and how long the work took."""

    at_s: float
    seconds: float


class Yardstick:
    """Measures while it is looked at; to be looked at between steps."""

    def __init__(self, clock: Clock, *, enabled: bool) -> None:
        self.samples: list[Sample] = []
        self._clock = clock
        self._enabled = enabled
        self._due_s = -1.0
        generator = torch.Generator().manual_seed(0)
        self._weights = [torch.randn(2048, 1024, generator=generator) for _ in range(_MATRICES)] if enabled else []
        self._rows, self._small = torch.randn(_ROWS, 1024, generator=generator), torch.zeros(64, 64)

    def look(self) -> None:
        """Measure if it is time to."""
        if self._enabled and self._clock.now() >= self._due_s:
            with self._clock.paused() as pause:
                self._work()
            self.samples.append(Sample(self._clock.now(), pause.seconds))
            self._due_s = self._clock.now() + INTERVAL_S

    @torch.inference_mode()
    def _work(self) -> None:
        for weights in self._weights:
            torch.mm(self._rows, weights.T)
        for _ in range(_SMALL):
            self._small.add_(0.0)

    def pace(self, reference_s: float | None = None) -> Pace:
        """What was found, relative to `reference_s`; None: to the median."""
        return Pace(self.samples, reference_s)


class Pace:
    """How many times longer things took at a time of the run's clock than they take at the reference."""

    def __init__(self, samples: Sequence[Sample], reference_s: float | None = None) -> None:
        self._times = [sample.at_s for sample in samples]
        seconds = [sample.seconds for sample in samples]
        self.reference_s = reference_s or (statistics.median(seconds) if seconds else 0.0)
        self._factors: list[float] = []
        for time_s in self._times:
            begin, end = bisect_left(self._times, time_s - WINDOW_S), bisect_right(self._times, time_s + WINDOW_S)
            self._factors.append(statistics.median(seconds[begin:end]) / self.reference_s)

    def at(self, time_s: float) -> float:
        """Between two measurements in proportion; before the first and after the last as there."""
        if not self._factors:
            return 1.0
        index = bisect_left(self._times, time_s)
        if index == 0 or index == len(self._times):
            return self._factors[min(index, len(self._factors) - 1)]
        before, after = self._times[index - 1], self._times[index]
        share = (time_s - before) / (after - before) if after > before else 0.0
        return self._factors[index - 1] + share * (self._factors[index] - self._factors[index - 1])

    def mean(self, begin_s: float, end_s: float) -> float:
        """Over a part of the run."""
        inside = self._factors[bisect_left(self._times, begin_s) : bisect_right(self._times, end_s)]
        return statistics.fmean(inside) if inside else self.at(begin_s)

    def summary(self) -> dict[str, Any]:
        """For a report: what the machine did while it was measured."""
        if not self._factors:
            return {"measurements": 0}
        ordered = sorted(self._factors)
        return {
            "measurements": len(ordered),
            "yardstick_ms": round(1e3 * self.reference_s, 3),
            "slowest": round(ordered[-1], 3),
            "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 3),
            "p10": round(ordered[int(0.1 * (len(ordered) - 1))], 3),
            "fastest": round(ordered[0], 3),
        }
