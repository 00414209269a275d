"""Prometheus metrics of the websocket front end, under vLLM's names."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontends.common.connection_limits import RefusalMetrics
from frontends.common.engine_stats import NUM_CELLS, ResumeCells
from inferengine.process.workers import WorkerCells

BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
_OPEN, _OPENED, _REFUSED, _SECONDS, _FIRST_BUCKET = range(5)
_NUM_BUCKETS = len(BUCKETS_S) + 1


class SocketMetrics(Collector):
    """Counts sockets. Each worker writes its own cells on its event loop; `collect` sums over all workers."""

    def __init__(self, num_workers: int = 1) -> None:
        self.refusals = RefusalMetrics("inferengine_websocket", num_workers)
        self.cells = WorkerCells(_FIRST_BUCKET + _NUM_BUCKETS + NUM_CELLS, num_workers)
        self.resumed = ResumeCells(self.cells, _FIRST_BUCKET + _NUM_BUCKETS)

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork. A restarted worker continues the counters of the one before
        it; open sockets start at 0, because they died with that worker."""
        self.cells.choose_worker(worker)
        self.refusals.choose_worker(worker)
        self.cells.own[_OPEN] = 0.0

    @property
    def num_open(self) -> int:
        """Open sockets of all workers."""
        return int(self.cells.total(_OPEN))

    def refused(self) -> None:
        """Count a socket that was not accepted."""
        self.cells.own[_REFUSED] += 1

    def opened(self) -> float:
        """Count an accepted socket. Pass the returned time to `closed`."""
        self.cells.own[_OPEN] += 1
        self.cells.own[_OPENED] += 1
        return time.monotonic()

    def closed(self, opened_s: float) -> None:
        """Count the end of a socket, with its duration since `opened_s`."""
        own, seconds = self.cells.own, time.monotonic() - opened_s
        own[_OPEN] -= 1
        own[_FIRST_BUCKET + bisect.bisect_left(BUCKETS_S, seconds)] += 1
        own[_SECONDS] += seconds

    def collect(self) -> Iterable[Metric]:
        """Yield the sums over all workers, for prometheus-client."""
        total = [self.cells.total(place) for place in range(self.cells.num_cells)]
        yield GaugeMetricFamily("vllm:websocket_connections_active", "Sockets that are open.", value=total[_OPEN])
        yield CounterMetricFamily("vllm:websocket_connections", "Sockets opened.", value=total[_OPENED])
        yield CounterMetricFamily("inferengine_websocket_refused", "Sockets refused.", value=total[_REFUSED])
        yield from self.refusals.collect()
        running, buckets = 0.0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), total[_FIRST_BUCKET : _FIRST_BUCKET + _NUM_BUCKETS], strict=True):
            running += count
            buckets.append((str(bound), running))
        text = "From a socket's opening to its end."
        yield HistogramMetricFamily(
            "vllm:websocket_connection_duration_seconds", text, buckets=buckets, sum_value=total[_SECONDS]
        )
        yield from self.resumed.collect()
