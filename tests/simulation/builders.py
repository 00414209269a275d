"""Builders for tests in virtual time: a device whose steps cost round numbers, and workloads written out by hand."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from inferengine.core.scheduler.queues import AdmissionLimits
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.simulation.cost_model import CostModel, DeviceProfile, linear_cost
from inferengine.simulation.fleet import Fleet
from inferengine.simulation.virtual_engine import EngineOptions
from inferengine.simulation.workload import Arrival, SyntheticWorkload, WorkloadOptions

COST = linear_cost(step_s=0.010, token_s=0.0001)


def make_options(
    *,
    cost: CostModel = COST,
    num_blocks: int = 256,
    max_num_seqs: int = 8,
    budget: int = 256,
    max_queued_requests: int = 10_000,
    max_in_flight: int = 1,
    **options: Any,
) -> EngineOptions:
    """Return one kind of engine: 16 tokens per block, prompts and outputs of up to 2,048 tokens."""
    profile = DeviceProfile(
        "test", cost, 16, num_blocks, max_num_seqs, max_num_batched_tokens=budget, max_model_len=2048
    )
    limits = AdmissionLimits(2048, num_blocks * 16, max_queued_requests, 10**9)
    return EngineOptions(
        profile.capacity(), cost, SchedulerOptions(budget, max_num_seqs, **options), limits, max_in_flight
    )


def make_arrival(
    uid: int, arrival_s: float = 0.0, prompt: int | Sequence[int] = 16, output: int = 4, **changes: Any
) -> Arrival:
    """Return a request; `prompt` is token ids or a length of tokens that nobody else has."""
    ids = range(uid << 12, (uid << 12) + prompt) if isinstance(prompt, int) else prompt
    return Arrival(uid, arrival_s, array("I", ids), output, seed=uid, **changes)


class Written:
    """A workload written out: implements `Workload`."""

    def __init__(self, *arrivals: Arrival) -> None:
        self._arrivals = sorted(arrivals, key=lambda item: item.arrival_s)

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        return None


def make_workload(count: int, **options: Any) -> SyntheticWorkload:
    """Make short requests, unless `options` say otherwise."""
    values: dict[str, Any] = {"prompt_tokens": "uniform:16-64", "output_tokens": "uniform:4-32", "max_tokens": 2048}
    return SyntheticWorkload(WorkloadOptions(count, **{**values, **options}))


def run(fleet: Fleet) -> dict[str, Any]:
    """Return the report of a run whose books must balance: one terminal event for each request, no block left
    behind."""
    report = fleet.run()
    recorder = fleet.recorder
    assert recorder.num_terminal == recorder.num_submitted
    assert report["requests"]["finished"] + sum(recorder.refusals.values()) + recorder.reasons.get("error", 0) == (
        recorder.num_submitted
    )
    for host in fleet.hosts:
        assert not host.engine.has_work or not host.alive
        if host.alive:
            host.engine.scheduler.check()
            assert not host.arrivals
            assert not host.begun
    return report
