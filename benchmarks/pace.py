"""The pace of a machine that others use: fixed steps of the model, timed again and again between those of a run.

A thread's own processor time leaves out what others compute meanwhile, but what neighbours do with shared caches,
memory and cores makes the very same step take 20 % longer a second later, and one kind of step more than another: over
windows of four seconds a decode of one row and a prompt of 256 tokens go together by a correlation of 0.5. So the
yardstick is a decode of one row, one of eight, and a prompt, through the scratch slot, and each kind of step has a
pace. The clock of the run stands still meanwhile. A GPU that nobody shares needs no yardstick: its pace is 1.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.device import Clock
from inferengine.executor.warm_up import scratch_plan
from inferengine.kernels.cpu import DecodeKvCache
from inferengine.simulation.cost_model import StepShape

INTERVAL_S = 0.4
WINDOW_S = 4.0  # to both sides: one measurement scatters by 15 %, twenty of them by 4 %
WORKS = ((1, 0, 2), (8, 0, 2), (0, 64, 1))  # decodes, prompt tokens, times in a measurement
FEW = 4  # rows from which on a decode goes with the yardstick of eight


def work_of(shape: StepShape) -> int:
    """Return the index of the yardstick that a step goes with."""
    if shape.has_chunks:
        return 2
    return 0 if shape.num_rows < FEW else 1


class Sample(NamedTuple):
    """One measurement: when, by the run's clock, and how long each of the works took."""

    at_s: float
    seconds: tuple[float, ...]


class Yardstick:
    """Measures while it is looked at; to be looked at between steps."""

    def __init__(self, clock: Clock, works: Sequence[Callable[[], object]] = ()) -> None:
        """`works`: one for each of WORKS (`works_of`); none: the pace is 1."""
        self.samples: list[Sample] = []
        self._clock = clock
        self._works = works
        self._due_s = -1.0

    def look(self) -> None:
        """Measure if it is time to."""
        if not self._works or self._clock.now() < self._due_s:
            return
        seconds = []
        for work in self._works:
            with self._clock.paused() as pause:
                work()
            seconds.append(pause.seconds)
        self.samples.append(Sample(self._clock.now(), tuple(seconds)))
        self._due_s = self._clock.now() + INTERVAL_S

    def pace(self, reference_s: Sequence[float] = ()) -> Pace:
        """Return the pace found, relative to `reference_s`; empty: to the medians."""
        return Pace(self.samples, reference_s)


def works_of(executor: Any) -> list[Callable[[], object]]:
    """Return WORKS on a TorchExecutor, for a Yardstick. They leave no trace in what it keeps from step to step."""
    spare = DecodeKvCache(len(executor.kv.layers))

    def work(decodes: int, chunk: int, times: int) -> None:
        plan = scratch_plan(executor.slots.num_slots, len(executor.kv.groups), decodes=decodes, chunk=chunk)
        with _replaced_decode_kv(executor, spare):
            for _ in range(times):
                executor.execute(plan).result()

    return [lambda sizes=sizes: work(*sizes) for sizes in WORKS]  # type: ignore[misc]


@contextmanager
def _replaced_decode_kv(executor: Any, other: DecodeKvCache) -> Iterator[None]:
    """Keep the copies of the run's own rows as they are, whatever steps run inside."""
    own, executor.decode_kv_cache = executor.decode_kv_cache, other
    try:
        yield
    finally:
        executor.decode_kv_cache = own


class Pace:
    """How many times longer each of the works took at a time of the run's clock than it takes at the reference."""

    def __init__(self, samples: Sequence[Sample], reference_s: Sequence[float] = ()) -> None:
        self._times = [sample.at_s for sample in samples]
        columns = list(zip(*(sample.seconds for sample in samples), strict=True))
        self.reference_s = tuple(reference_s) or tuple(statistics.median(column) for column in columns)
        self._factors: list[list[float]] = []  # by work, then by measurement
        for column, reference in zip(columns, self.reference_s, strict=False):
            around = [
                column[bisect_left(self._times, at - WINDOW_S) : bisect_right(self._times, at + WINDOW_S)]
                for at in self._times
            ]
            self._factors.append([statistics.median(seconds) / reference for seconds in around])

    def at(self, time_s: float, work: int) -> float:
        """Return the pace at a time: between two measurements in proportion, before the first and after the last as
        there."""
        if not self._factors:
            return 1.0
        factors = self._factors[work]
        index = bisect_left(self._times, time_s)
        if index == 0 or index == len(self._times):
            return factors[min(index, len(factors) - 1)]
        before, after = self._times[index - 1], self._times[index]
        share = (time_s - before) / (after - before) if after > before else 0.0
        return factors[index - 1] + share * (factors[index] - factors[index - 1])

    def mean(self, begin_s: float, end_s: float) -> list[float]:
        """Return the mean pace of each work over a part of the run."""
        if not self._factors:
            return [1.0]
        inside = slice(bisect_left(self._times, begin_s), bisect_right(self._times, end_s))
        return [
            round(statistics.fmean(factors[inside]) if factors[inside] else self.at(begin_s, work), 3)
            for work, factors in enumerate(self._factors)
        ]

    def summary(self) -> dict[str, Any]:
        """Return, for a report, what the machine did while it was measured; lists have an item for each work."""
        if not self._factors:
            return {"measurements": 0}
        ordered = [sorted(factors) for factors in self._factors]
        last = len(self._times) - 1

        def quantile(share: float) -> list[float]:
            return [round(factors[int(share * last)], 3) for factors in ordered]

        return {
            "measurements": len(self._times),
            "yardstick_ms": [round(1e3 * seconds, 3) for seconds in self.reference_s],
            "slowest": quantile(1.0),
            "p90": quantile(0.9),
            "p10": quantile(0.1),
            "fastest": quantile(0.0),
        }
