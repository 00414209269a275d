"""Figures of requests that went on after their engine was lost, in the cells that the workers of a front end share."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from frontends.common.worker_cells import WorkerCells

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0)
NUM_CELLS = len(BUCKETS_S) + 2  # buckets, +Inf, sum


class ResumeCells:
    """NUM_CELLS of `cells` from `start` on."""

    def __init__(self, cells: WorkerCells, start: int) -> None:
        self._cells = cells
        self._start = start

    def observe(self, pause_s: float) -> None:
        """A request went on `pause_s` after its engine was lost."""
        own, start = self._cells.own, self._start
        own[start + bisect.bisect_left(BUCKETS_S, pause_s)] += 1
        own[start + NUM_CELLS - 1] += pause_s

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client: the sum over the workers."""
        total = [self._cells.total(self._start + place) for place in range(NUM_CELLS)]
        running, buckets = 0.0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), total[:-1], strict=True):
            running += count
            buckets.append((str(bound), running))
        text = "Requests that went on after their engine was lost."
        yield CounterMetricFamily("inferengine_resumed_requests", text, value=running)
        text = "From an engine's loss until an engine had taken the request again."
        yield HistogramMetricFamily("inferengine_resume_pause_seconds", text, buckets=buckets, sum_value=total[-1])
