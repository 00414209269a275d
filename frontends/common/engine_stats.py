"""What every front end reports of its engines at /stats and /metrics: their statistics, and resumed requests."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inferengine.client import AsyncClient, EnginePool
from inferengine.client.circuit_breaker import CircuitState
from inferengine.errors import InferEngineError
from inferengine.observability.prometheus import render
from inferengine.process.workers import WorkerCells
from inferengine.wire.messages import READY

__all__ = ["CONTENT_TYPE", "engine_figures", "metrics_text", "stats_document", "together"]

ENGINE_ANSWER_S = 2.0  # after this the last STATUS of an engine is shown
# Keys of the statistics that are not added up over several engines; a section's rule holds for all below it.
OF_THE_FIRST = {
    *("engine", "epoch", "model", "progress", "config", "buckets", "page_size", "policy", "method", "sleep_state"),
    *("peak_bytes_per_s", "peak_operations_per_s", "peak_source", "last_error"),
}
HIGHEST = {"percentiles", "startup_seconds", "loop_age_ms", "uptime_s", "max_batch_observed", "gpu"}
MEANS = {  # and what beside them weighs them; empty: nothing
    "kv_usage": "",
    "utilization": "",
    "roofline_share": "",
    "internal_fragmentation": "used_pages",
    "acceptance_rate": "drafted",
    "mean_accepted_length": "verified",
    "average_batch_size": "decode_steps",
}
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 120.0)
NUM_BUCKET_CELLS = len(BUCKETS_S) + 2  # buckets, +Inf, sum
BALANCING = {  # by the pool's event: the counter's name and help
    "moved": ("inferengine_moved_requests", "Requests that went to another engine, or again to their own."),
    "hedged": ("inferengine_hedged_requests", "Requests that got a second run at another engine."),
    "hedge_won": ("inferengine_hedges_won", "Second runs that had output first."),
    "circuit_opened": ("inferengine_circuits_opened", "Times that an engine failed so often that it got no requests."),
}
NUM_CELLS = NUM_BUCKET_CELLS + len(BALANCING)  # of ResumeCells
CIRCUIT_LEVELS = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}


async def engine_figures(engines: EnginePool) -> list[dict[str, Any]]:
    """Return the statistics of each engine, in the order of their addresses."""
    return await asyncio.gather(*(_figures_of(client) for client in engines.clients))


async def stats_document(engines: EnginePool) -> dict[str, Any]:
    """Return the content of /stats: the engine's statistics. With several engines: those of all `together`, and those
    of each under `engines`."""
    figures = await engine_figures(engines)
    if len(figures) == 1:
        return figures[0]
    document = together([one for one in figures if one["running"]] or figures)
    document["engines"] = dict(zip([client.address for client in engines.clients], figures, strict=True))
    return document


def together(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of several engines into one map of the same shape.

    Counts are added, shares and means averaged; of percentiles, durations of the start and figures of a card the
    highest is taken. Names and settings are the first engine's; `state` is READY where any engine is."""
    merged = _merge_maps(figures)
    if READY in (one.get("state") for one in figures):
        merged["state"] = READY
    return merged


def _merge_maps(maps: Sequence[Mapping[str, Any]], rule: Callable[[list[Any]], Any] | None = None) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in maps for name in one):
        having = [one for one in maps if name in one]
        values = [one[name] for one in having]
        if name in OF_THE_FIRST:
            merged[name] = values[0]
        elif name in MEANS:
            merged[name] = _merge(values, partial(_mean, weights=[one.get(MEANS[name], 1) for one in having]))
        else:
            merged[name] = _merge(values, max if name in HIGHEST else rule)
    return merged


def _merge(values: list[Any], rule: Callable[[list[Any]], Any] | None) -> Any:
    first = values[0]
    if all(isinstance(value, Mapping) for value in values):
        return _merge_maps(values, rule)
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [_merge(list(column), rule) for column in zip(*values, strict=True)]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return (rule or sum)(values)
    return first


def _mean(values: list[float], weights: list[float]) -> float:
    """Return the weighted mean; unweighted where a map of them lacks some, or all weights are 0."""
    if len(values) != len(weights) or not sum(weights):
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


async def metrics_text(engines: EnginePool, *collectors: Collector) -> bytes:
    """Return Prometheus text: the metrics of the engines, then those of `collectors`."""
    figures = await engine_figures(engines)
    up = Gauge("inferengine_engines_connected", "Engines that this front end is connected to.", registry=None)
    up.set(sum(client.connected for client in engines.clients))
    circuits = Gauge(
        "inferengine_engine_circuit", "0: closed, 1: half-open, 2: open (few probes).", ["address"], registry=None
    )
    for health in engines.health():
        circuits.labels(health.address).set(CIRCUIT_LEVELS[health.circuit])
    return render([one for one in figures if "engine" in one], up, circuits, *collectors)


async def _figures_of(client: AsyncClient) -> dict[str, Any]:
    if not client.connected:
        return {"running": False, "last_error": "no engine is connected"}
    try:
        async with asyncio.timeout(ENGINE_ANSWER_S):
            answer = await client.admin("stats")
    except (TimeoutError, InferEngineError):
        answer = {**(client.status or {}), "stale": True}
    if not isinstance(answer, dict):
        return {"running": True}
    # JSON has no bytes, such as those of the epoch
    readable = {name: value.hex() if isinstance(value, bytes) else value for name, value in answer.items()}
    return {"running": True, **readable}


class ResumeCells:
    """Counts requests that continued after their engine was lost, and the pool's events, in NUM_CELLS of `cells` from
    `start` on."""

    def __init__(self, cells: WorkerCells, start: int) -> None:
        self._cells = cells
        self._start = start

    def observe(self, pause_s: float) -> None:
        """Count a request that continued `pause_s` after its engine was lost."""
        own, start = self._cells.own, self._start
        own[start + bisect.bisect_left(BUCKETS_S, pause_s)] += 1
        own[start + NUM_BUCKET_CELLS - 1] += pause_s

    def count(self, event: str) -> None:
        """Count one of the pool's events."""
        self._cells.own[self._start + NUM_BUCKET_CELLS + list(BALANCING).index(event)] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield the sums over all workers, for prometheus-client."""
        total = [self._cells.total(self._start + place) for place in range(NUM_BUCKET_CELLS)]
        running, buckets = 0.0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), total[:-1], strict=True):
            running += count
            buckets.append((str(bound), running))
        text = "Requests that went on after their engine was lost."
        yield CounterMetricFamily("inferengine_resumed_requests", text, value=running)
        text = "From an engine's loss until an engine had taken the request again."
        yield HistogramMetricFamily("inferengine_resume_pause_seconds", text, buckets=buckets, sum_value=total[-1])
        for place, (name, text) in enumerate(BALANCING.values(), self._start + NUM_BUCKET_CELLS):
            yield CounterMetricFamily(name, text, value=self._cells.total(place))
