"""Figures from replies."""

from __future__ import annotations

import pytest

from inferengine.bench.load_generator import LoadReply
from inferengine.bench.report import report, table


def reply(*event_s: float, ended_s: float, tokens: int) -> LoadReply:
    """Return a reply that began at 0 and ended well."""
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return LoadReply(0.0, 200, ended_s, list(event_s), usage, finish_reason="length")


def test_the_figures_of_two_replies() -> None:
    found = report([reply(0.1, 0.2, 0.4, ended_s=0.4, tokens=3), reply(0.3, ended_s=0.5, tokens=1)], 2.0, {})
    assert (found["completed"], found["failed"], found["requests_per_s"]) == (2, 0, 1.0)
    assert (found["output_tokens"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (4, 2.0, 12.0)
    assert found["ttft_ms"] | {"mean": 200.0, "p99": 300.0} == found["ttft_ms"]
    assert found["itl_ms"]["mean"] == pytest.approx(150.0)
    assert found["tpot_ms"]["mean"] == pytest.approx(150.0), "one token has no time per further token"
    assert found["e2e_ms"]["p99"] == 500.0
    assert "goodput_per_s" not in found


@pytest.mark.parametrize(
    ("limits", "met"), [({"ttft": 200}, 1), ({"e2e": 450}, 1), ({"e2e": 600}, 2), ({"tpot": 1}, 1)]
)
def test_goodput_counts_what_met_every_limit(limits: dict[str, float], met: int) -> None:
    replies = [reply(0.1, 0.4, ended_s=0.4, tokens=2), reply(0.3, ended_s=0.5, tokens=1)]
    assert report(replies, 1.0, limits)["goodput_per_s"] == met


def test_failures_are_counted_by_cause_and_measured_nowhere() -> None:
    found = report([LoadReply(0.0, 503, 9.0, error="no room")] * 3 + [LoadReply(0.0, 200, 9.0)], 1.0, {"e2e": 1e9})
    assert (found["completed"], found["failed"], found["goodput_per_s"]) == (0, 4, 0)
    assert found["errors"] == {"503 no room": 3, "200 the stream ended without a finish_reason": 1}
    assert found["ttft_ms"] == found["e2e_ms"] == {}
    assert "3 times: 503 no room" in table(found)
