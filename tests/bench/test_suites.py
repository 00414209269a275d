"""Series of loads: what is measured in which order, and what follows from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from inferengine.bench import suites
from inferengine.bench.environment import environment, write_result
from inferengine.bench.load_options import LoadOptions
from inferengine.cli import main as cli
from inferengine.errors import ExitCode
from tests.bench.servers import serving

S2_FIELDS = {"model_id", "num_prompts", "output_throughput", "total_input_tokens"}
VLLM_FIELDS = S2_FIELDS | {
    "request_throughput",
    "mean_ttft_ms",
    "p99_tpot_ms",
    "median_itl_ms",
    "std_e2el_ms",
    "duration",
}


class Server:
    """Gives the output tokens per second that a function says for a load, and remembers the loads."""

    def __init__(self, throughput: Any, failed: int = 0) -> None:
        self.throughput = throughput
        self.failed = failed
        self.loads: list[LoadOptions] = []

    def measure(self, load: LoadOptions) -> dict[str, Any]:
        self.loads.append(load)
        tokens = self.throughput(load)
        return {
            "output_tokens_per_s": tokens,
            "requests_per_s": tokens / 10,
            "failed": self.failed,
            "ttft_ms": {"p50": 1.0, "p99": 2.0},
            "itl_ms": {},
        }


def test_a_sweep_finds_where_throughput_stops_to_grow() -> None:
    server = Server(lambda load: min(load.concurrency, 8) * 100.0)
    found = suites.sweep(server.measure, LoadOptions(requests=16), [1, 2, 4, 8, 16, 32])
    assert found["saturation"] == 8
    assert [load.requests for load in server.loads] == [16, 16, 16, 32, 64, 128], "four for each that is in flight"
    assert suites.sweep(server.measure, LoadOptions(), [1, 2, 4])["saturation"] is None


def test_arrivals_are_shares_of_the_saturated_rate() -> None:
    server = Server(lambda load: 400.0)
    found = suites.arrivals(server.measure, LoadOptions(), [0.5, 1.0])
    assert found["saturated_requests_per_s"] == 40.0
    assert [(row["pattern"], row["rate"]) for row in found["rows"]] == [
        ("closed", None),
        ("burst", None),
        ("steady", 20.0),
        ("steady", 40.0),
        ("poisson", 20.0),
        ("poisson", 40.0),
    ]
    assert [load.burstiness for load in server.loads[2:]] == [suites.STEADY, suites.STEADY, 1.0, 1.0]


def test_a_pair_is_measured_in_turn_and_each_is_first_as_often_as_second() -> None:
    server = Server(lambda load: 92.0 if load.model == "ours" else 100.0)
    found = suites.paired(server.measure, LoadOptions(model="ours"), LoadOptions(model="theirs"), 4)
    assert [load.model for load in server.loads] == ["ours", "theirs", "theirs", "ours"] * 2
    assert (found["ratio"], found["interval"], found["passed"]) == (0.92, [0.92, 0.92], True)


@pytest.mark.parametrize(("ours", "failed"), [(90.0, 0), (200.0, 1)])
def test_a_pair_fails_below_the_gate_or_where_a_request_failed(ours: float, failed: int) -> None:
    server = Server(lambda load: ours if load.model == "ours" else 100.0, failed)
    assert not suites.paired(server.measure, LoadOptions(model="ours"), LoadOptions(), 2)["passed"]


def test_the_interval_holds_the_median_and_is_the_same_for_the_same_seed() -> None:
    values = [0.9, 1.0, 1.1, 1.2, 0.95]
    low, high = suites.bootstrap(values, 3)
    assert 0.9 <= low < 1.0 < high <= 1.2
    assert suites.bootstrap(values, 3) == [low, high]


def test_counters_are_summed_over_their_labels() -> None:
    text = '# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{engine="0"} 2.0\n'
    text += 'vllm:num_preemptions_total{engine="1"} 3.0\n'
    assert suites._sum_of(text, "vllm:num_preemptions_total") == 5.0
    assert suites._sum_of(text, "vllm:request_success_total") is None


@pytest.mark.parametrize(
    ("series", "rows"),
    [
        (["sweep", "--concurrencies", "1,2"], 2),
        (["arrivals", "--shares", "1", "--concurrency", "2"], 4),
        (["pressure"], 1),
        (["paired", "--runs", "1"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_series_is_measured_and_written(
    series: list[str],
    rows: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {name: tmp_path / name for name in ("json", "markdown", "html")}
    with serving() as server:
        where = ["--ours", server.url, "--theirs", server.url, "--gate", "0"] if series[0] == "paired" else []
        words = [*series, "--url", server.url, *where, "--requests", "4", "--warm-up", "0", "--input", "3"]
        written = [word for name, file in files.items() for word in (f"--{name}", str(file))]
        monkeypatch.setattr(sys, "argv", ["inferengine", "bench", *words, *written, "--api-key", "sesame"])
        assert cli.main() == ExitCode.OK
    found = json.loads(files["json"].read_text())
    measured = found.get("rows") or [row for pair in found["pairs"] for row in pair.values()]
    assert len(measured) == rows
    assert all(row.keys() >= VLLM_FIELDS and row["environment"]["revision"] for row in measured)
    assert found["environment"]["command"].endswith("(hidden)")
    assert "sesame" not in files["json"].read_text()
    assert files["markdown"].read_text() == capsys.readouterr().out.removesuffix("\n")
    assert files["html"].read_text().count("<rect") == rows


@pytest.mark.parametrize("value", ["", "0", "1,,2", "1,x", "-1"])
def test_a_list_that_is_none_is_refused_by_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sweep", f"--concurrencies={value}"]) == ExitCode.USAGE
    assert "--concurrencies" in capsys.readouterr().err


def test_a_result_tells_what_it_was_measured_with(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", {"rows": []}, seed=7)
    about = json.loads((tmp_path / "r.json").read_text())["environment"]
    assert about.keys() == environment().keys()
    assert about["seed"] == 7
    assert about["packages"]["msgpack"]


def test_what_a_benchmark_says_of_its_device_is_added(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", {"rows": [], "environment": {"device": "a card", "cpus": 3}})
    whole = json.loads((tmp_path / "r.json").read_text())
    assert list(whole) == ["environment", "rows"]
    assert whole["environment"].keys() == environment().keys() | {"device"}
    assert whole["environment"]["cpus"] == 3
