"""The table of a Chrome trace: time, calls and share by kernel, or by operation of the host."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from inferengine.cli.main import main
from inferengine.cli.profile import TraceRow, covered, own_times, read_trace, summarize, table
from inferengine.errors import ConfigError, ExitCode


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


STEPS = [event("step 0", 0, 50, "user_annotation"), event("step 1", 50, 70, "user_annotation")]
KERNELS = [
    event("gemm", 10, 20, "kernel"),
    event("attention", 25, 10, "kernel"),  # begins while gemm runs: a dependent launch
    event("gemm", 60, 30, "kernel"),
    event("Memcpy HtoD", 90, 20, "gpu_memcpy"),
]


def test_kernels_are_what_counts_where_there_are_any() -> None:
    summary = summarize({"traceEvents": [*STEPS, *KERNELS, event("aten::mm", 0, 100)]})
    assert summary.on_device
    assert summary.rows == [
        TraceRow("gemm", 50.0, 2, 50 / 80),
        TraceRow("Memcpy HtoD", 20.0, 1, 20 / 80),
        TraceRow("attention", 10.0, 1, 10 / 80),
    ]
    assert summary.steps_us == [50.0, 70.0]


def test_the_device_is_idle_where_no_kernel_runs() -> None:
    summary = summarize({"traceEvents": KERNELS})
    assert summary.idle_share == pytest.approx(25 / 100), "from 35 to 60, of 10 to 110"
    assert covered([(0, 10), (2, 3), (5, 12), (20, 21)]) == 13


def test_an_operation_of_the_host_counts_without_what_it_calls() -> None:
    events = [event("linear", 0, 100), event("mm", 10, 60), event("copy", 20, 5), event("add", 80, 10)]
    elsewhere = event("mm", 15, 7, tid=2)
    assert sorted(own_times([*events, elsewhere])) == [("add", 10), ("copy", 5), ("linear", 30), ("mm", 7), ("mm", 55)]
    summary = summarize({"traceEvents": [*STEPS, *events]})
    assert (summary.on_device, summary.idle_share) == (False, None)
    assert [(row.name, row.total_us) for row in summary.rows] == [("mm", 55), ("linear", 30), ("add", 10), ("copy", 5)]


def test_an_empty_trace_has_an_empty_table() -> None:
    summary = summarize({"traceEvents": [{"ph": "M", "name": "process_name"}]})
    assert (summary.rows, summary.steps_us) == ([], [])
    assert len(table(summary, 5)) == 2


def test_the_table_names_the_rest_in_one_line() -> None:
    shown = table(summarize({"traceEvents": [*STEPS, *KERNELS]}), 1)
    assert shown[0].startswith("2 steps: median 0.06 ms, longest 0.07 ms")
    assert shown[-2].split() == ["0.05", "62.5%", "2", "1.0", "25.00", "gemm"]
    assert shown[-1].endswith("(2 more)")


def test_a_trace_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed, table = tmp_path / "trace.json", tmp_path / "trace.json.gz", tmp_path / "table.json"
    plain.write_text(json.dumps({"traceEvents": KERNELS}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed)
    assert main(["profile", "--read", str(packed), "--top=2", "--summary", str(table)]) == ExitCode.OK
    assert "gemm" in capsys.readouterr().out
    assert json.loads(table.read_text())["rows"][0] == {"name": "gemm", "total_us": 50.0, "calls": 2, "share": 0.625}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"other": 1}', b'{"traceEvents": [1]}', b"\x1f\x8bbroken", b"[" * 100_000],
    ids=lambda content: content[:20].hex(),
)
def test_what_is_no_trace_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(ConfigError, match="odd"):
        read_trace(tmp_path / "odd")


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "none"],
        ["--steps", "0"],
        ["--steps"],
        ["--read", "/nowhere/trace.json"],
        ["--out", "/nowhere/trace.json"],
        ["--step", "3"],
    ],
)
def test_a_bad_option_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == ExitCode.USAGE
    assert words[0].lstrip("-") in capsys.readouterr().err
