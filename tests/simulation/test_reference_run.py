"""`inferengine simulate s1`: the reference's figures, all of its metrics, and what a long run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferengine.cli import main as cli
from inferengine.core.kv_cache import BlockPool
from inferengine.errors import ExitCode
from inferengine.simulation import reference_run
from inferengine.simulation.reference_run import ReferenceWorkload, external_fragmentation

METRICS = [
    "submitted_requests",
    "completed_requests",
    "failed_requests",
    "total_generated_tokens",
    "total_prefill_tokens",
    "total_decode_tokens",
    "step_count",
    "elapsed_ms",
    "request_throughput_rps",
    "token_throughput_tps",
    "p50_latency_ms",
    "p95_latency_ms",
    "p99_latency_ms",
    "p50_queue_wait_ms",
    "p95_queue_wait_ms",
    "p99_queue_wait_ms",
    "avg_batch_size",
    "max_batch_size_seen",
    "avg_step_duration_ms",
    "p99_step_duration_ms",
    "avg_memory_utilization",
    "peak_memory_utilization",
    "avg_internal_fragmentation_ratio",
    "peak_internal_fragmentation_ratio",
    "avg_external_fragmentation_ratio",
    "peak_external_fragmentation_ratio",
]


def test_the_reference_workload_takes_the_references_tokens_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "s1", "--json", str(tmp_path / "s1.json")]) == ExitCode.OK
    found = json.loads((tmp_path / "s1.json").read_text())
    assert list(found["metrics"]) == METRICS
    assert found["golden"].items() <= found["metrics"].items()
    assert (found["metrics"]["completed_requests"], found["metrics"]["failed_requests"]) == (1000, 0)
    assert found["metrics"]["max_batch_size_seen"] == 32
    assert found["environment"]["seed"] == 7
    assert capsys.readouterr().out.count("13,904") == 2, "ours beside the reference's"


def test_other_figures_than_the_references_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference_run.GOLDEN, "step_count", 1)
    assert cli.main(["simulate", "s1"]) == ExitCode.CRASH


def test_rounds_are_of_one_engine_and_other_workloads_have_no_golden_figures() -> None:
    found = reference_run.run(ReferenceWorkload(requests=20, cache_num_blocks=64, rounds=3))
    assert [row["finished"] for row in found["rounds"]] == [20, 40, 60]
    assert "golden" not in found
    assert found["metrics"]["peak_memory_utilization"] > 0.2


def test_external_fragmentation_is_how_scattered_the_free_blocks_are() -> None:
    pool = BlockPool(8)
    assert (pool.num_free, pool.longest_free_run()) == (8, 8)
    blocks, _ = pool.take(8)
    assert pool.longest_free_run() == 0
    pool.release([block for block in blocks if block % 2])
    assert (pool.num_free, pool.longest_free_run()) == (4, 1)
    assert external_fragmentation(4, 1) == 0.75
    assert external_fragmentation(0, 0) == 0.0


def test_lengths_the_wrong_way_round_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "s1", "--min-prompt-tokens", "97"]) == ExitCode.USAGE
    assert "--min-prompt-tokens" in capsys.readouterr().err
