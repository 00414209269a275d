"""Percentiles are exact, intervals are counted once each, and the timeline does not grow."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.simulation.report import (
    Objective,
    RunRecorder,
    Sample,
    Timeline,
    TokenIntervals,
    percentile,
    weighted_percentiles,
)


def make_row(uid: int, reason: str = "length", first: float = 0.1, total: float = 1.0, output: int = 10) -> Finished:
    return Finished(uid, reason, None, 5, 0, output, 0.0, first, total, "", 0)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, q) for q in (0.01, 0.5, 0.9, 0.99, 1.0)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert math.isnan(percentile([], 0.5))


def test_weighted_percentiles_equal_those_of_the_values_written_out() -> None:
    generator = random.Random(4)
    values = [generator.random() for _ in range(200)]
    weights = [generator.randrange(1, 9) for _ in range(200)]
    written_out = sorted(v for v, w in zip(values, weights, strict=True) for _ in range(w))
    quantiles = (0.0, 0.001, 0.25, 0.5, 0.9, 0.99, 1.0)
    assert weighted_percentiles(values, weights, quantiles) == [percentile(written_out, q) for q in quantiles]


def test_intervals_equal_those_of_each_stream_by_itself() -> None:
    """Random batches with streams that pause, come back and end."""
    generator = random.Random(6)
    values, weights = array("d"), array("L")
    intervals = TokenIntervals(values, weights)
    expected: list[float] = []
    last: dict[int, float] = {}
    alive, next_uid, now, layout, uids = list(range(5)), 5, 0.0, 0, list[int]()
    for _ in range(400):
        now += generator.choice((0.25, 0.5, 1.0))
        chosen = uids if uids and generator.random() < 0.6 else [u for u in alive if generator.random() < 0.7]
        if chosen is not uids:
            layout, uids = layout + 1, chosen
        ended = [u for u in uids if generator.random() < 0.02]
        intervals.add(StepOutput(0, uids, [0] * len(uids), [make_row(u) for u in ended], layout), now)
        for uid in uids:
            if uid in last:
                expected.append(now - last[uid])
            last[uid] = now
        if ended:
            alive = [u for u in alive if u not in ended] + list(range(next_uid, next_uid + len(ended)))
            next_uid += len(ended)
            uids = []
    written_out = sorted(v for v, w in zip(values, weights, strict=True) for _ in range(w))
    assert written_out == sorted(expected)
    assert len(values) < len(expected)  # that is what the columns are for


def test_a_step_that_only_ends_requests_is_no_token() -> None:
    intervals = TokenIntervals(values := array("d"), array("L"))
    intervals.add(StepOutput(1, [1], [0], [], 1), 1.0)
    intervals.add(StepOutput(0, [], [], [make_row(2, "error")], -1), 2.0)
    intervals.add(StepOutput(2, [1], [0], [], 1), 3.0)
    assert list(values) == [2.0]


@pytest.mark.parametrize(
    ("first", "total", "output", "good"), [(0.1, 1.0, 10, 1), (0.3, 1.0, 10, 0), (0.1, 2.0, 10, 0), (0.2, 0.2, 1, 1)]
)
def test_goodput_counts_requests_within_both_limits(first: float, total: float, output: int, good: int) -> None:
    recorder = RunRecorder(Objective(first_token_s=0.2, token_s=0.1))
    recorder.finished(make_row(1, first=first, total=total, output=output))
    assert recorder.num_good == good


def test_a_request_that_failed_has_no_latency() -> None:
    recorder = RunRecorder()
    recorder.finished(make_row(1, "error"))
    assert recorder.num_terminal == 1
    assert not recorder.total_s
    assert recorder.num_good == 0


def test_the_timeline_thins_out_instead_of_growing() -> None:
    timeline = Timeline(limit=64)
    time_s = 0.0
    while time_s < 10_000.0:
        if time_s >= timeline.due_s:
            timeline.add(Sample(time_s, 0, 0, 0.0, 0))
        time_s += 0.01
    gaps = [b.time_s - a.time_s for a, b in zip(timeline.samples, timeline.samples[1:], strict=False)]
    assert 16 <= len(timeline.samples) <= 64
    assert max(gaps) < 3 * min(gaps)
