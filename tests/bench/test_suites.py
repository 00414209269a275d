"""Series of loads: what is measured in which order, and what follows from it."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferengine.bench import suites
from inferengine.bench.environment import ROOT, environment, write_result
from inferengine.bench.load_options import WORKLOADS, LoadOptions, request_bodies, sizes_of
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
    dip = [
        {"concurrency": number, "output_tokens_per_s": rate} for number, rate in ((1, 100), (2, 99), (4, 300), (8, 290))
    ]
    assert suites.saturation(dip) == 4, "one slow load is not the end of growth"


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
    assert len({load.seed for load in server.loads}) == 6, "no load finds the prompts of another cached"
    assert [load.burstiness for load in server.loads[2:]] == [suites.STEADY, suites.STEADY, 1.0, 1.0]


def test_a_pair_is_measured_in_turn_and_each_is_first_as_often_as_second() -> None:
    server = Server(lambda load: 92.0 if load.model == "ours" else 100.0)
    found = suites.paired(server.measure, LoadOptions(model="ours"), LoadOptions(model="theirs"), 4)
    assert [load.model for load in server.loads] == ["ours", "theirs", "theirs", "ours"] * 2
    assert (found["ratio"], found["interval"], found["passed"]) == (0.92, [0.92, 0.92], True)


def test_a_feature_is_held_against_the_plain_load_of_its_server_and_against_the_other_server() -> None:
    speeds = {"ours": {"drawn": 100.0, "n": 80.0}, "theirs": {"drawn": 50.0, "n": 50.0}}
    server = Server(lambda load: speeds[load.model]["n" if "n" in load.body else "drawn"])
    load = LoadOptions(model="ours", concurrency=8, requests=64)
    found = suites.features(server.measure, load, replace(load, model="theirs"), ["n"])
    assert [(row["feature"], row["ratio"], row["share"]) for row in found["rows"]] == [
        ("drawn", 2.0, {"ours": 1.0, "theirs": 1.0}),
        ("n", 1.6, {"theirs": 1.0, "ours": 0.8}),
    ]
    assert [load.model for load in server.loads] == ["ours", "theirs", "theirs", "ours"]
    assert [load.requests for load in server.loads] == [64, 64, 16, 16], "as many outputs, four of a request"
    assert all(load.warm_up == 8 for load in server.loads), "what a feature costs once is not measured"
    assert len({load.seed for load in server.loads}) == 2, "no load finds the prompts of another cached"


def test_the_fields_of_a_feature_are_in_every_request() -> None:
    with serving() as server:
        words = ["features", "--url", server.url, "--features", "filters,schema", "--requests", "2", "--input", "3"]
        assert cli.main(["bench", *words, "--concurrency", "2"]) == ExitCode.OK
    for name in ("filters", "schema"):
        fields = suites.FEATURES[name]
        sent = [body for body in server.bodies if fields.items() <= body.items()]
        assert len(sent) == 4, "two before the clock starts and two after"


def test_a_grammar_is_asked_for_all_tokens_of_the_output() -> None:
    """A server that ends with the text, and one that goes on without the grammar, would do different work."""
    body = suites.FEATURES["regex"]
    for request in request_bodies(LoadOptions(url="http://127.0.0.1:1", requests=3, output="5:9", body=body), "fake"):
        sent = json.loads(request)
        assert sent["min_tokens"] == sent["max_tokens"]


def test_the_loads_of_a_series_that_is_ended_early_are_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(options: LoadOptions, stream: object) -> dict[str, Any]:
        if options.body == suites.FEATURES["greedy"]:
            raise KeyboardInterrupt
        return {"output_tokens_per_s": 7.0, "failed": 0}

    monkeypatch.setattr("inferengine.cli.bench.measure", ended)
    with suppress(KeyboardInterrupt):
        cli.main(["bench", "features", "--features", "n,greedy", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [load["fields"] for load in found["unfinished"]] == [suites.FEATURES["drawn"], suites.FEATURES["n"]]
    assert found["environment"]["revision"]


def test_an_unknown_feature_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "features", "--features", "n,wings"]) == ExitCode.USAGE
    assert "'wings'" in capsys.readouterr().err


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
        (["batch", "--batches", "1,3", "--repeats", "1"], 2),
        (["fragmentation", "--block-sizes", "2,4"], 3),
        (["ladder", "--repeats", "1", "--context", "128"], 1),
        (["paired", "--runs", "1"], 2),
        (["features", "--features", "n,logprobs", "--concurrency", "2"], 3),
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
    files = {name: tmp_path / name for name in ("json", "markdown")}
    with serving() as server:
        pair = ["--ours", server.url, "--theirs", server.url, "--gate", "0"]
        where = pair if series[0] == "paired" else ["--url", server.url]
        count = [] if series[0] == "batch" else ["--requests", "4"]
        words = [*series, *where, *count, "--warm-up", "0", "--input", "3"]
        written = [word for name, file in files.items() for word in (f"--{name}", str(file))]
        monkeypatch.setattr(sys, "argv", ["inferengine", "bench", *words, *written, "--api-key", "sesame"])
        assert cli.main() == ExitCode.OK
    found = json.loads(files["json"].read_text())
    measured = found.get("rows") or [row for pair in found["pairs"] for row in pair.values()]
    assert len(measured) == rows
    loads = [found["load"]] if series[0] == "fragmentation" else [] if series[0] == "ladder" else measured
    loads = [row["ours"] for row in measured] if series[0] == "features" else loads
    assert all(row.keys() >= VLLM_FIELDS and row["environment"]["revision"] for row in loads)
    assert found["environment"]["command"].endswith("(hidden)")
    assert "sesame" not in files["json"].read_text()
    assert files["markdown"].read_text() == capsys.readouterr().out.removesuffix("\n")


def test_a_page_has_the_table_the_plots_and_where_it_was_measured() -> None:
    found = suites.sweep(Server(lambda load: 100.0).measure, LoadOptions(), [1, 2])
    page = suites.html(found, {"revision": "abc", "command": "<sweep>"})
    assert page.count("<svg") == len(suites.plots(found)) == 2
    assert page.count("<tr>") == 3
    assert "abc" in page
    assert "&lt;sweep&gt;" in page


def verifies(folder: Path) -> bool:
    """Return what S2's verifier decides of two files each: the same workload, all of it done, the gate reached."""
    ratios = []
    for ours_file in sorted(folder.glob("*-ours.json")):
        ours, theirs = (json.loads((folder / ours_file.name.replace("ours", name)).read_text()) for name in SIDES)
        if any(found[name] <= 0 for found in (ours, theirs) for name in ("num_prompts", "output_throughput")):
            return False
        if not (ours["model_id"] and theirs["model_id"]) or ours["completed"] != ours["num_prompts"]:
            return False
        if any(ours[name] != theirs[name] for name in ("num_prompts", "total_input_tokens")):
            return False
        ratios.append(ours["output_throughput"] / theirs["output_throughput"])
    return bool(ratios) and statistics.median(ratios) >= json.loads((folder / "verdict.json").read_text())["gate"]


SIDES = ("ours", "theirs")


def test_a_verifier_reads_the_raw_files_of_a_pair_and_agrees(tmp_path: Path) -> None:
    with serving() as ours, serving() as theirs:
        words = ["--ours", ours.url, "--theirs", theirs.url, "--requests", "6", "--input", "3", "--warm-up", "0"]
        code = cli.main(["bench", "paired", *words, "--runs", "2", "--gate", "0.01", "--raw", str(tmp_path)])
    assert code == ExitCode.OK
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "1-ours.json",
        "1-theirs.json",
        "2-ours.json",
        "2-theirs.json",
        "verdict.json",
    ]
    assert verifies(tmp_path)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"]
    assert verdict["environment"]["revision"]
    assert json.loads((tmp_path / "1-ours.json").read_text())["gpu"]
    (tmp_path / "verdict.json").write_text(json.dumps({"gate": 1e9}))
    assert not verifies(tmp_path)


def test_a_batch_keeps_the_median_run_and_tells_the_mfu() -> None:
    rates = iter([100.0, 300.0, 200.0])
    server = Server(lambda load: next(rates))
    measure = lambda load: server.measure(load) | {"total_tokens_per_s": 1000.0}  # noqa: E731
    found = suites.batch(
        measure, LoadOptions(url="http://127.0.0.1:9"), [4], 3, parameters=1e9, peak_operations_per_s=4e12
    )
    assert found["rows"][0]["output_tokens_per_s"] == 200.0
    assert found["rows"][0]["mfu"] == 0.5
    assert [load.requests for load in server.loads] == [4, 4, 4]
    assert len({load.seed for load in server.loads}) == 3, "no run finds the prompts of another cached"


def test_the_share_of_the_roofline_is_that_of_the_time_between_two_looks() -> None:
    before = {"roofline": {"step_seconds": {"decode": 1.0}, "least_seconds": {"decode": 0.1}}}
    after = {
        "roofline": {"step_seconds": {"decode": 3.0, "mixed": 1.0}, "least_seconds": {"decode": 1.1, "mixed": 0.25}}
    }
    assert suites._roofline_share(before, after) == {"decode": 0.5, "mixed": 0.25}


def test_waste_follows_from_the_lengths_at_each_moment() -> None:
    load = {
        "start_times": [0.0, 0.0],
        "ttfts": [1.0, 1.0],
        "itls": [[1.0], [1.0]],
        "input_lens": [5, 16],
        "output_lens": [2, 0],
        "errors": ["", ""],
    }
    held = suites.held_tokens(load)
    assert held[0] == [6, 16]
    assert suites._waste(held, 16) == {"block_size": 16, "average": 0.3125, "peak": 0.3125, "peak_blocks": 2}
    assert suites._waste(held, 2)["average"] == 0.0


def test_a_ladder_tells_what_each_workloads_own_rung_gives() -> None:
    rungs = suites.rung_flags()
    assert rungs["static"][:2] == ["--scheduler.policy", "static"]
    assert len(rungs["+ prefix"]) == len(rungs["static"]), "a rung switches what the first switched off"
    speed = {"a": 100.0, "b": 250.0}
    measure = lambda load: {  # noqa: E731
        "output_tokens_per_s": speed[load.url[-1]],
        "itl_ms": {},
        "ttft_ms": {"p50": 1000 / speed[load.url[-1]]},
        "failed": 0,
    }
    servers = [("static", nullcontext("http://a")), ("+ continuous", nullcontext("http://b"))]
    found = suites.ladder(measure, LoadOptions(), servers, 1)
    assert found["gains"] == {"continuous_batching": 2.5}


def test_a_workload_fits_the_context() -> None:
    for context in (128, 2048, 131_072):
        for workload in WORKLOADS.values():
            for item in workload.items(sizes_of(context)):
                assert 0 < 2 * item.num_prompt + item.num_output <= context, "words may take two tokens each"


RIGHT: dict[str, Any] = {
    "choices": [{"text": "once upon", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28},
}


def right(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as a server should."""
    if body["max_tokens"] < 0 or not isinstance(body["prompt"], str):
        return 400, {}
    if body["model"] != "m":
        return 404, {}
    if "stop" in body:
        return 200, {"choices": [{"text": "", "finish_reason": "stop"}]}
    return 200, RIGHT


def test_a_right_server_passes_and_each_fault_is_named() -> None:
    assert suites.sanity(right, lambda body: "once upon", "m")["passed"]
    found = suites.sanity(lambda body: (200, RIGHT), lambda body: "once up", "m")
    assert [row["check"] for row in found["rows"] if not row["passed"]] == [
        "a stream gives the text of the whole answer",
        "a stop string ends the text and is not in it",
        "a length that is none is refused",
        "a model that is not there is refused",
        "a prompt that is none is refused",
    ]
    assert "5 of 10 checks failed" in suites.markdown(found)


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


def test_the_command_names_neither_a_key_nor_where_the_checkout_is(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{ROOT}/inferengine/cli/__main__.py", "bench", "--json", f"{ROOT}/docs/r.json", "--api-key", "sesame"]
    monkeypatch.setattr(sys, "argv", words)
    assert environment()["command"] == "inferengine bench --json docs/r.json --api-key (hidden)"


def test_what_a_benchmark_says_of_its_device_is_added(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", {"rows": [], "environment": {"device": "a card", "cpus": 3}})
    whole = json.loads((tmp_path / "r.json").read_text())
    assert list(whole) == ["environment", "rows"]
    assert whole["environment"].keys() == environment().keys() | {"device"}
    assert whole["environment"]["cpus"] == 3
