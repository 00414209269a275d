"""The same scheduler, another clock: what the virtual engine does is what EngineCore does step by step."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.cost_model import linear_cost, shape_of
from inferengine.simulation.fleet import Fleet
from inferengine.simulation.virtual_engine import EngineOptions, VirtualEngine
from tests.simulation.builders import COST, Written, make_arrival, make_options, make_workload, run

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(ignore_eos=True)


def make_requests(count: int, seed: int) -> list[Request]:
    generator = random.Random(seed)
    prompts = [list(range(i * 1000, i * 1000 + generator.randrange(1, 300))) for i in range(count)]
    return [
        Request(uid, prompts[generator.randrange(uid + 1)], PARAMS, generator.randrange(1, 60), seed=uid)
        for uid in range(count)
    ]


class PlainExecutor:
    """Draws the seed as the virtual one does, and answers at once; keeps the plans."""

    max_in_flight = 1

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.seeds: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> PlainExecutor:
        self.plans.append(plan)
        self.seeds |= {item.slot: item.seed for item in plan.admitted}
        self.tokens = [self.seeds[slot] for slot, draws in zip(plan.slots, plan.samples, strict=True) if draws]
        return self

    def result(self) -> StepResult:
        return StepResult(self.tokens)


OPTIONS = {
    "plain": make_options(),
    "pressure": make_options(num_blocks=40),
    "static": make_options(policy="static"),
    "whole prompts": make_options(chunked_prefill=False, budget=512),
    "small chunks": make_options(prefill_chunk=48, max_num_decodes=3),
    "shortest": make_options(policy="shortest", prefix_caching=False),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_virtual_time_plans_and_draws_what_stepping_the_core_does(options: EngineOptions) -> None:
    requests = make_requests(30, seed=3)
    plain = PlainExecutor()
    core = EngineCore(plain, options.capacity, options.scheduler, clock=lambda: float(len(plain.plans)))  # type: ignore[arg-type]
    expected: list[tuple[list[int], list[int], list[int]]] = []
    for request in requests:
        core.submit(request)
    while core.has_work:
        output = core.step()
        assert output is not None
        expected.append((output.uids, output.token_ids, [row.uid for row in output.finished]))

    engine = VirtualEngine(options)
    seen: list[tuple[list[int], list[int], list[int]]] = []
    for request in requests:
        engine.submit(request, 0.0)
    while engine.has_work:
        output = engine.step(engine.clock.now)
        assert output is not None
        seen.append((output.uids, output.token_ids, [row.uid for row in output.finished]))

    assert seen == expected
    seconds = sum(COST.seconds(shape_of(plan)) for plan in plain.plans)
    assert engine.clock.now == pytest.approx(seconds)
    assert engine.executor.busy_s == pytest.approx(seconds)


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    fleet = Fleet(make_options(), Written(make_arrival(1, 2.0, prompt=100, output=3)))
    report = run(fleet)
    prefill, decode = 0.010 + 100 * 0.0001, 0.010 + 0.0001
    assert list(fleet.recorder.first_token_s) == pytest.approx([prefill])
    assert list(fleet.recorder.total_s) == pytest.approx([prefill + 2 * decode])
    assert list(fleet.recorder.interval_values) == pytest.approx([decode, decode])
    assert report["duration_s"] == pytest.approx(prefill + 2 * decode, abs=1e-4)  # from the first arrival on


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    first, second = make_arrival(1, 0.0, prompt=200, output=2), make_arrival(2, 0.001, prompt=10, output=1)
    fleet = Fleet(make_options(), Written(first, second))
    run(fleet)
    step_1, step_2 = 0.010 + 200 * 0.0001, 0.010 + (1 + 10) * 0.0001
    assert min(fleet.recorder.queued_s) == 0.0
    assert max(fleet.recorder.queued_s) == pytest.approx(step_1 - 0.001)
    assert max(fleet.recorder.first_token_s) == pytest.approx(step_1 + step_2 - 0.001)


def test_with_two_steps_in_flight_the_device_never_waits_for_the_scheduler() -> None:
    """The news of a step come when it is over, and the next one has begun by then."""
    fleet = Fleet(make_options(max_in_flight=2), Written(make_arrival(1, prompt=100, output=10)))
    report = run(fleet)
    assert report["requests"]["finished"] == 1
    assert list(fleet.recorder.interval_values) == pytest.approx([0.0101] * 9)


def test_a_deadline_ends_a_request_in_virtual_time() -> None:
    fleet = Fleet(make_options(), Written(make_arrival(1, prompt=16, output=1000, deadline_s=0.5)))
    report = run(fleet)
    assert report["requests"]["reasons"] == {"error": 1}
    assert report["duration_s"] == pytest.approx(0.5, abs=0.02)


def test_equal_seeds_give_equal_reports_and_others_do_not() -> None:
    reports = [run(Fleet(make_options(), make_workload(60, rate=30.0, seed=seed), num_engines=3)) for seed in (1, 1, 2)]
    assert reports[0] == reports[1] != reports[2]


def test_one_engine_is_simulated_without_the_wires_library() -> None:
    """Calibration and its check run on machines that have the device and no pyzmq."""
    program = (
        "import sys; sys.modules['zmq'] = None; sys.modules['msgpack'] = None\n"
        "from inferengine.simulation.fleet import Fleet\n"
        "from tests.simulation.builders import make_options, make_workload, run\n"
        "print(run(Fleet(make_options(), make_workload(20)))['requests']['finished'])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (ran.stdout.strip(), ran.stderr) == ("20", "")


def test_requests_of_the_same_moment_share_the_first_step() -> None:
    """As in the service's loop, which takes what is there before it steps."""
    arrivals = [make_arrival(uid, 1.0, prompt=16, output=1) for uid in range(1, 5)]
    fleet = Fleet(make_options(), Written(*arrivals))
    run(fleet)
    assert list(fleet.recorder.first_token_s) == pytest.approx([0.010 + 64 * 0.0001] * 4)


def test_a_machine_that_slows_down_takes_longer_from_then_on() -> None:
    options = make_options()._replace(pace=lambda now, shape: 1.0 if now < 1.0 else 2.0)
    fleet = Fleet(options, Written(make_arrival(1, 0.0, output=1), make_arrival(2, 2.0, output=1)))
    run(fleet)
    step_s = 0.010 + 16 * 0.0001
    assert list(fleet.recorder.first_token_s) == pytest.approx([step_s, 2 * step_s])


def test_a_step_whose_rows_changed_costs_more() -> None:
    """Six steps, of which the one that lets the second request in has other rows than the step before."""
    cost = linear_cost(step_s=0.010, token_s=0.0, change_s=0.001)
    fleet = Fleet(make_options(cost=cost), Written(make_arrival(1, 0.0, output=6), make_arrival(2, 0.035, output=2)))
    run(fleet)
    (engine,) = (host.engine for host in fleet.hosts)
    assert engine.executor.busy_s == pytest.approx(6 * 0.010 + 0.001)
