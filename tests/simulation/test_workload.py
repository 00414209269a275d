"""Workloads: the right number of requests, at the right times, of the right lengths, equal for equal seeds."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from inferengine.errors import ConfigError
from inferengine.simulation.workload import SyntheticWorkload, TraceWorkload, WorkloadOptions
from tests.simulation.builders import make_workload


def gaps_of(**options: Any) -> list[float]:
    times = [item.arrival_s for item in make_workload(4000, output_tokens="1", prompt_tokens="4", **options).arrivals()]
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("poisson", 1.0), ("steady", 0.0), ("gamma", 3.0), ("burst", 9.95)]
)
def test_arrivals_have_the_rate_and_the_variation_of_their_process(arrivals: str, variation: float) -> None:
    gaps = gaps_of(arrivals=arrivals, rate=50.0, variation=3.0, burst_size=100)
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.15)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, rel=0.15, abs=1e-6)


def test_at_once_has_all_arrivals_at_one_time() -> None:
    assert set(gaps_of(arrivals="at_once")) == {0.0}


def test_equal_seeds_give_equal_requests() -> None:
    first, again, other = (list(make_workload(50, num_prefixes=3, seed=seed).arrivals()) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("text", "median"), [("128", 128), ("uniform:64-256", 160), ("exponential:200", 139), ("lognormal:200:0.8", 200)]
)
def test_lengths_follow_their_distribution(text: str, median: float) -> None:
    lengths = [len(item.prompt_ids) for item in make_workload(3000, prompt_tokens=text, max_tokens=1 << 20).arrivals()]
    assert statistics.median(lengths) == pytest.approx(median, rel=0.08)


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:9-3", "uniform:5", "lognormal:10", "normal:3:4", "1.5", "x:"])
def test_a_length_that_is_none_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        make_workload(1, prompt_tokens=text)


@pytest.mark.parametrize(("options", "named"), [({"arrivals": "sometimes"}, "--arrivals"), ({"rate": 0.0}, "--rate")])
def test_an_impossible_process_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        list(make_workload(1, **options).arrivals())


def test_prompts_share_prefixes_and_nothing_else() -> None:
    prompts = [bytes(item.prompt_ids) for item in make_workload(300, num_prefixes=4, prefix_tokens=64).arrivals()]
    heads = [prompt[: 4 * 64] for prompt in prompts]
    assert len(set(heads)) == 4
    assert heads.count(max(set(heads), key=heads.count)) > 300 / 4  # after Zipf the first is the most popular
    tails = [prompt[4 * 64 : 4 * 64 + 16] for prompt in prompts]
    assert len(set(tails)) == 300


def test_a_turn_repeats_the_conversation_and_its_answer() -> None:
    workload = make_workload(10, turns=3, think_s=1.0)
    first = next(workload.arrivals())
    second = workload.follow_up(first, now=5.0)
    assert second is not None
    begin = len(first.prompt_ids) + first.num_output
    assert second.prompt_ids[:begin].tolist() == first.prompt_ids.tolist() + [first.seed] * first.num_output
    assert len(second.prompt_ids) > begin
    assert second.arrival_s > 5.0
    third = workload.follow_up(second, now=9.0)
    assert third is not None
    assert workload.follow_up(third, now=20.0) is None


def test_no_request_is_longer_than_the_model_allows() -> None:
    options = WorkloadOptions(500, prompt_tokens="exponential:900", output_tokens="exponential:900", max_tokens=1024)
    for item in SyntheticWorkload(options).arrivals():
        assert len(item.prompt_ids) + item.num_output <= 1024
        assert item.num_output >= 1


def write_lines(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_trace_in_mooncakes_form_shares_what_its_hash_ids_share(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        {"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [7, 8, 9]},
        {"timestamp": 500, "input_length": 1100, "output_length": 20, "hash_ids": [7, 8, 10]},
    )
    first, second = TraceWorkload(path, speed=2.0).arrivals()
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.25)
    assert (len(first.prompt_ids), first.num_output) == (1200, 50)
    assert first.prompt_ids[:1024] == second.prompt_ids[:1024]
    assert first.prompt_ids[1024] != second.prompt_ids[1024]


def test_a_trace_in_this_projects_format_is_read(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path,
        {"arrival_s": 0.5, "prompt_tokens": 90, "output_tokens": 3, "prefix": "a", "prefix_tokens": 40, "tenant": "x"},
        "",
        {"arrival_s": 1, "prompt_tokens": 80, "output_tokens": 3, "prefix": "a", "prefix_tokens": 40, "priority": 2},
    )
    first, second = TraceWorkload(path).arrivals()
    assert (first.tenant, second.priority) == ("x", 2)
    assert first.prompt_ids[:40] == second.prompt_ids[:40]
    assert not set(first.prompt_ids[40:]) & set(second.prompt_ids[40:])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no request"),
        ({"arrival_s": 1, "prompt_tokens": 4}, "has no 'output_tokens'"),
        ({"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}, "at least 1"),
        ({"arrival_s": -1, "prompt_tokens": 4, "output_tokens": 1}, "at least 0"),
        ({"arrival_s": 0.1, "prompt_tokens": 4, "output_tokens": 1}, "before the line above"),
        ({"arrival_s": 1, "prompt_tokens": 1e999, "output_tokens": 1}, "line 2 is no request"),
        ({"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 1, "priority": "high"}, "line 2 is no request"),
        ({"timestamp": "soon", "input_length": 4, "output_length": 1}, "line 2 is no request"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: Any, said: str) -> None:
    path = write_lines(tmp_path, {"arrival_s": 0.5, "prompt_tokens": 4, "output_tokens": 1}, line)
    with pytest.raises(ConfigError, match=said):
        list(TraceWorkload(path).arrivals())


def test_requests_too_long_for_the_model_are_cut_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"arrival_s": 0, "prompt_tokens": 5000, "output_tokens": 9})
    workload = TraceWorkload(path, max_tokens=1000)
    (item,) = workload.arrivals()
    assert (len(item.prompt_ids), item.num_output, workload.num_cut) == (999, 1, 1)
