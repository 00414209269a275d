"""The ladder on a simulated device: every rung gives what its workload was made to show, and less of an executor is
given back whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.device import switched
from benchmarks.ladder import longest_for, make_rungs, measure, sizes_for
from inferengine.bench.load_options import WORKLOADS
from inferengine.simulation.cost_model import DeviceProfile, linear_cost
from inferengine.simulation.virtual_engine import VirtualClock, VirtualExecutor

CPU = DeviceProfile(
    "cpu", linear_cost(step_s=2e-3, token_s=3.5e-4, knee=8.0, row_s=5e-4, kv_token_s=4e-6), num_blocks=4096,
    max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048,
)  # fmt: skip
CARD = DeviceProfile(
    "card", linear_cost(step_s=4e-4, token_s=2.4e-5, knee=156.0, row_s=4e-6, kv_token_s=3e-8, pair_s=8e-10),
    num_blocks=50_000, max_in_flight=2,
)  # fmt: skip
GAINS = {"continuous": 1.5, "paged": 1.5, "chunked": 1.5, "prefix": 3.0}


def figure(profile: DeviceProfile, on_cuda: bool, name: str, workload: str) -> float:
    rung = next(rung for rung in make_rungs(on_cuda) if rung.name == name)
    clock = VirtualClock()
    capacity = profile.capacity()
    executor: Any = VirtualExecutor(capacity, profile.cost, clock, 2 if rung.overlap else 1)
    seconds: Any = SimpleNamespace(now=clock.read)
    max_len = longest_for(capacity, on_cuda)
    return measure(executor, capacity, rung, workload, sizes_for(on_cuda, max_len), seconds, 1, max_len)


@pytest.mark.parametrize(("profile", "on_cuda"), [(CPU, False), (CARD, True)], ids=["cpu", "card"])
@pytest.mark.parametrize(
    ("workload", "below", "rung"),
    [
        ("continuous_batching", "static", "+ continuous"),
        ("paged_attention", "+ continuous", "+ paged"),
        ("chunked_prefill", "+ paged", "+ chunked"),
        ("prefix_caching", "+ chunked", "+ prefix"),
    ],
)
def test_a_rung_gives_what_its_workload_shows(
    profile: DeviceProfile, on_cuda: bool, workload: str, below: str, rung: str
) -> None:
    before, after = (figure(profile, on_cuda, name, workload) for name in (below, rung))
    higher_is_better = WORKLOADS[workload].higher_is_better
    gain = after / before if higher_is_better else before / after
    assert gain > GAINS[rung.removeprefix("+ ")]


def test_an_executor_has_its_graphs_and_its_overlap_back() -> None:
    executor = SimpleNamespace(graphs="graphs", mixed="mixed", max_in_flight=2)
    with switched(executor, graphs=False, overlap=False):
        assert (executor.graphs, executor.mixed, executor.max_in_flight) == (None, None, 1)
    with switched(executor, graphs=True, overlap=False):
        assert (executor.graphs, executor.max_in_flight) == ("graphs", 1)
    assert (executor.graphs, executor.mixed, executor.max_in_flight) == ("graphs", "mixed", 2)
