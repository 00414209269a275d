"""The report of a simulated run. It is recorded in columns; percentiles are exact, never from buckets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class Objective(NamedTuple):
    """What a request must hold to count as served well: time to first token, and mean time per further token."""

    first_token_s: float = 1.0
    token_s: float = 0.1


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Return the percentile by nearest rank: the smallest value that at least this share of all does not exceed. NaN
    without values."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(quantile * len(ordered) - 1e-9) - 1)]


def weighted_percentiles(values: Sequence[float], weights: Sequence[int], quantiles: Sequence[float]) -> list[float]:
    """Return the percentiles where `values[i]` occurs `weights[i]` times."""
    total = sum(weights)
    if not total:
        return [math.nan] * len(quantiles)
    ranks = [max(1, math.ceil(quantile * total - 1e-9)) for quantile in quantiles]
    found: list[float] = []
    seen = 0
    for value, weight in sorted(zip(values, weights, strict=True)):
        seen += weight
        while len(found) < len(ranks) and seen >= ranks[len(found)]:
            found.append(value)
    return found


class TokenIntervals:
    """Times between a stream's tokens, from the columns of one engine's steps. Where a step has the rows of the step
    before, all of them had the same interval: one entry, whatever the batch."""

    def __init__(self, values: array[float], weights: array[int]) -> None:
        self._values, self._weights = values, weights
        self._layout = -2
        self._now = 0.0
        self._members: set[int] = set()
        self._paused: dict[int, float] = {}  # streams without a token in the last step -> time of their last one

    def add(self, output: StepOutput, now: float) -> None:
        """Add one step's output, at the time when it is ready."""
        interval = now - self._now
        if output.layout == self._layout:
            if output.uids:
                self._record(interval, len(output.uids))
        elif output.uids:
            members = set(output.uids)
            num_kept = len(members & self._members)
            if num_kept:
                self._record(interval, num_kept)
            for uid in members - self._members:
                since = self._paused.pop(uid, None)
                if since is not None:
                    self._record(now - since, 1)
            for uid in self._members - members:
                self._paused[uid] = self._now
            self._members, self._layout = members, output.layout
        if output.uids:
            self._now = now
        for row in output.finished:
            self._members.discard(row.uid)
            self._paused.pop(row.uid, None)

    def _record(self, interval: float, count: int) -> None:
        self._values.append(interval)
        self._weights.append(count)


class Sample(NamedTuple):
    """Gauges of the whole fleet at one moment."""

    time_s: float
    num_running: int
    num_waiting: int
    kv_usage: float
    num_output_tokens: int


class Timeline:
    """Evenly spaced samples, at most `limit`: when there are more, every other one goes and the spacing doubles."""

    def __init__(self, limit: int = 1024) -> None:
        self.samples: list[Sample] = []
        self.interval_s = 0.05
        self.due_s = 0.0
        self._limit = limit

    def add(self, sample: Sample) -> None:
        """Add a sample, thinning all of them when there are `limit`."""
        self.samples.append(sample)
        if len(self.samples) >= self._limit:
            self.samples = self.samples[::2]
            self.interval_s *= 2
        self.due_s = sample.time_s + self.interval_s


@dataclass
class RunRecorder:
    """The columns of a run under way."""

    objective: Objective = field(default_factory=Objective)
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    token_s: array[float] = field(default_factory=lambda: array("d"))  # per request: mean of its intervals
    total_s: array[float] = field(default_factory=lambda: array("d"))
    queued_s: array[float] = field(default_factory=lambda: array("d"))
    interval_values: array[float] = field(default_factory=lambda: array("d"))
    interval_weights: array[int] = field(default_factory=lambda: array("L"))
    reasons: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    num_good: int = 0
    num_submitted: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_moved: int = 0  # to another engine, after a refusal or a failure
    fragmentation: array[float] = field(default_factory=lambda: array("d"))
    kv_usage: array[float] = field(default_factory=lambda: array("d"))

    def intervals(self) -> TokenIntervals:
        """Return a recorder of the token intervals of one engine."""
        return TokenIntervals(self.interval_values, self.interval_weights)

    def finished(self, row: Finished) -> None:
        """Record a terminal event."""
        self.reasons[row.reason] = self.reasons.get(row.reason, 0) + 1
        self.num_prompt_tokens += row.num_prompt
        self.num_output_tokens += row.num_output
        if row.first_token_s is None or row.reason not in ("stop", "length"):
            return
        self.first_token_s.append(row.first_token_s)
        self.total_s.append(row.total_s)
        self.queued_s.append(row.queued_s or 0.0)
        token_s = (row.total_s - row.first_token_s) / (row.num_output - 1) if row.num_output > 1 else 0.0
        if row.num_output > 1:
            self.token_s.append(token_s)
        if row.first_token_s <= self.objective.first_token_s and token_s <= self.objective.token_s:
            self.num_good += 1

    def refused(self, code: str) -> None:
        """Record a request that no engine accepted, or that was lost with its engine after it had begun."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    @property
    def num_terminal(self) -> int:
        """Requests that have ended or were refused."""
        return sum(self.reasons.values()) + sum(self.refusals.values())

    def gauge(self, kv_usage: float, fragmentation: float) -> None:
        """Add a sample of one engine's cache."""
        self.kv_usage.append(kv_usage)
        self.fragmentation.append(fragmentation)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Return mean and exact percentiles, in milliseconds."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
    row = {"mean": mean, **{f"p{q * 100:g}": percentile(ordered, q) for q in QUANTILES}}
    row["max"] = ordered[-1] if ordered else math.nan
    return {name: _milliseconds(value) for name, value in row.items()}


def interval_distribution(values: Sequence[float], weights: Sequence[int]) -> dict[str, float]:
    """Return the same as `distribution` for weighted values."""
    total = sum(weights)
    mean = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else math.nan
    found = weighted_percentiles(values, weights, (*QUANTILES, 1.0))
    row = {"mean": mean, **dict(zip([f"p{q * 100:g}" for q in QUANTILES] + ["max"], found, strict=True))}
    return {name: _milliseconds(value) for name, value in row.items()}


def summarize(recorder: RunRecorder, duration_s: float, engines: Mapping[str, float]) -> dict[str, Any]:
    """Return the report for JSON. `engines`: totals over the fleet."""
    duration = duration_s or math.nan
    finished = recorder.reasons.get("stop", 0) + recorder.reasons.get("length", 0)
    return {
        "requests": {
            "submitted": recorder.num_submitted,
            "finished": finished,
            "reasons": recorder.reasons,
            "refused": recorder.refusals,
            "moved_to_another_engine": recorder.num_moved,
        },
        "duration_s": round(duration_s, 4),
        "throughput": {
            "requests_per_s": round(finished / duration, 3),
            "output_tokens_per_s": round(recorder.num_output_tokens / duration, 1),
            "prompt_tokens_per_s": round(recorder.num_prompt_tokens / duration, 1),
            "output_tokens": recorder.num_output_tokens,
            "prompt_tokens": recorder.num_prompt_tokens,
        },
        "latency_ms": {
            "first_token": distribution(recorder.first_token_s),
            "between_tokens": interval_distribution(recorder.interval_values, recorder.interval_weights),
            "per_output_token": distribution(recorder.token_s),
            "end_to_end": distribution(recorder.total_s),
            "queue": distribution(recorder.queued_s),
        },
        "goodput": {
            "objective": {
                "first_token_ms": recorder.objective.first_token_s * 1e3,
                "per_output_token_ms": recorder.objective.token_s * 1e3,
            },
            "good_requests": recorder.num_good,
            "share": round(recorder.num_good / recorder.num_submitted, 4) if recorder.num_submitted else 0.0,
            "requests_per_s": round(recorder.num_good / duration, 3),
        },
        "engine": {
            "engines": int(engines["engines"]),
            "steps": int(engines["steps"]),
            "mean_batch": _share(engines["rows"], engines["steps"], 2),
            "mean_step_tokens": _share(engines["scheduled_tokens"], engines["steps"], 2),
            "max_batch": int(engines["max_batch"]),
            "device_utilization": _share(engines["busy_s"], duration_s * engines["engines"]),
            "mean_kv_usage": _mean(recorder.kv_usage),
            "max_kv_usage": round(max(recorder.kv_usage, default=0.0), 4),
            "mean_internal_fragmentation": _mean(recorder.fragmentation),
            "prefix_hit_rate": _share(engines["hit_tokens"], engines["lookup_tokens"]),
            "prefix_hit_tokens": int(engines["hit_tokens"]),
            "preemptions": int(engines["preemptions"]),
            "pressure_events": int(engines["pressure_events"]),
            "evictions": int(engines["evictions"]),
            "failures": int(engines["failures"]),
        },
    }


def table(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    requests, throughput, engine, goodput = (report[key] for key in ("requests", "throughput", "engine", "goodput"))
    refused = sum(requests["refused"].values())
    lines = [
        f"requests    {requests['submitted']:,} submitted, {requests['finished']:,} finished, {refused:,} refused, "
        f"{requests['moved_to_another_engine']:,} moved to another engine",
        f"time        {report['duration_s']:,.2f} s (virtual)",
        f"throughput  {throughput['requests_per_s']:,.2f} requests/s, {throughput['output_tokens_per_s']:,.0f} output "
        f"tokens/s, {throughput['prompt_tokens_per_s']:,.0f} prompt tokens/s",
        f"goodput     {goodput['requests_per_s']:,.2f} requests/s ({goodput['share']:.1%}) with first token within "
        f"{goodput['objective']['first_token_ms']:g} ms, {goodput['objective']['per_output_token_ms']:g} ms per token",
        f"engines     {engine['engines']:,}, {engine['device_utilization']:.1%} busy; {engine['steps']:,} steps, mean "
        f"batch {engine['mean_batch']:g}, largest {engine['max_batch']}",
        f"cache       {engine['mean_kv_usage']:.1%} used (most {engine['max_kv_usage']:.1%}), fragmentation "
        f"{engine['mean_internal_fragmentation']:.1%}, prefix hits {engine['prefix_hit_rate']:.1%} of tokens looked up",
        f"pressure    {engine['preemptions']:,} preemptions, {engine['pressure_events']:,} pressure events, "
        f"{engine['evictions']:,} evictions, {engine['failures']} failures",
        "",
        f"{'milliseconds':<18}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p95", "p99", "max")),
    ]
    for name, row in report["latency_ms"].items():
        lines.append(f"{name.replace('_', ' '):<18}" + "".join(f"{value:>12,.2f}" for value in row.values()))
    return "\n".join(lines)


def _milliseconds(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else round(seconds * 1e3, 4)


def _share(part: float, whole: float, digits: int = 4) -> float:
    return round(part / whole, digits) if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return round(math.fsum(values) / len(values), 4) if values else 0.0
