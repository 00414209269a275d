"""The websocket front end's own figures, under vLLM's names."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)


class SocketMetrics(Collector):
    """Counts sockets. Written on the event loop alone."""

    def __init__(self) -> None:
        self.num_open = self.num_opened = self.num_refused = 0
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0

    def opened(self) -> float:
        """A socket was accepted; the returned time is for `closed`."""
        self.num_open += 1
        self.num_opened += 1
        return time.monotonic()

    def closed(self, opened_s: float) -> None:
        self.num_open -= 1
        seconds = time.monotonic() - opened_s
        self._counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        yield GaugeMetricFamily("vllm:websocket_connections_active", "Sockets that are open.", value=self.num_open)
        yield CounterMetricFamily("vllm:websocket_connections", "Sockets opened.", value=self.num_opened)
        yield CounterMetricFamily("inferengine_websocket_refused", "Sockets refused.", value=self.num_refused)
        running, buckets = 0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), self._counts, strict=True):
            running += count
            buckets.append((str(bound), float(running)))
        text = "From a socket's opening to its end."
        yield HistogramMetricFamily(
            "vllm:websocket_connection_duration_seconds", text, buckets=buckets, sum_value=self._seconds
        )
