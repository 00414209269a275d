"""The comparison of simulator and engine, where the engine's device is itself a simulated one: no error may be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.calibrate import Grid
from benchmarks.device import Pause, TimedStep
from benchmarks.pace import Pace, Sample, Yardstick, work_of
from benchmarks.simulation_accuracy import Recorded, Results, errors_by_class, predict, run_real, step_class
from inferengine.core.executor import Capacity
from inferengine.simulation.cost_model import (
    CapturedSteps,
    CostModel,
    DeviceProfile,
    HostCost,
    KindCost,
    StepShape,
)
from inferengine.simulation.fitting import fit
from inferengine.simulation.virtual_engine import VirtualClock, VirtualExecutor
from inferengine.simulation.workload import WorkloadOptions

GRAPHS = CapturedSteps(decodes=(1, 4, 16), mixed=((4, 64), (16, 64)), prompt_rows=4)
COST = CostModel(
    decodes=KindCost(((1, 1e-3), (4, 1.2e-3), (16, 2e-3)), kv_token_s=((1, 1e-7),), change_s=2e-4),
    prompts=KindCost(((32, 2e-3), (128, 4e-3)), row_s=2e-5, kv_token_s=((1, 1e-7),), pair_s=1e-9, change_s=2e-4),
    launched=KindCost(((64, 4e-3), (256, 8e-3)), row_s=2e-5, kv_token_s=((1, 1e-7),), pair_s=1e-9),
    graphs=GRAPHS,
)
ANY_ROWS = replace(  # graphs cost the same whose rows they have
    COST, decodes=replace(COST.decodes, change_s=0.0), prompts=replace(COST.prompts, change_s=0.0)
)


class MachineClock:
    """Stands for benchmarks.device.Clock: the time of a simulated device."""

    kind = "virtual"

    def __init__(self) -> None:
        self.virtual = VirtualClock()

    def now(self) -> float:
        return self.virtual.now

    def sleep(self, seconds: float) -> None:
        self.virtual.now += max(0.0, seconds)

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        yield Pause()


def make_profile(max_in_flight: int) -> DeviceProfile:
    return DeviceProfile(
        "test", COST, num_blocks=512, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
        max_in_flight=max_in_flight,
    )  # fmt: skip


def make_machine(profile: DeviceProfile, **options: Any) -> tuple[Any, Capacity, Any, Yardstick]:
    clock: Any = MachineClock()
    capacity = profile.capacity()
    executor = VirtualExecutor(capacity, profile.cost, clock.virtual, profile.max_in_flight, **options)
    return executor, capacity, clock, Yardstick(clock)


def make_load(load: str = "poisson", rate: float = 150.0) -> WorkloadOptions:
    return WorkloadOptions(
        60, load, rate, prompt_tokens="uniform:4-90", output_tokens="uniform:1-30", max_tokens=512, vocab_size=1000
    )


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("load", ["at_once", "poisson"])
def test_a_device_that_does_what_the_model_says_is_predicted_without_error(load: str, max_in_flight: int) -> None:
    profile, real = make_profile(max_in_flight), Results()
    executor, capacity, clock, yardstick = make_machine(profile)
    item = run_real(executor, capacity, clock, yardstick, make_load(load), real)
    row = predict(0.6, real, [item], profile, capacity, Pace([]))
    assert row["error"] == pytest.approx(dict.fromkeys(row["error"], 0.0), abs=1e-3)
    assert row["error_of_the_rest"] == pytest.approx(dict.fromkeys(row["error"], 0.0), abs=1e-3)
    assert row["steps_of_another_shape"] == 0


def test_a_machine_whose_pace_changes_is_predicted_from_its_measured_pace() -> None:
    """It is half as fast from the second tenth of a second on, and the yardstick has seen that."""
    profile, real = make_profile(1), Results()
    executor, capacity, clock, yardstick = make_machine(profile, pace=lambda now, shape: 1.0 if now < 0.1 else 2.0)
    item = run_real(executor, capacity, clock, yardstick, make_load(), real)
    row = predict(0.6, real, [item], profile, capacity, StepPace([]))
    assert row["error"] == pytest.approx(dict.fromkeys(row["error"], 0.0), abs=0.01)
    assert row["error_at_one_pace"]["end_to_end_ms_p50"] < -0.2


class StepPace(Pace):
    """What the yardstick has seen of that machine."""

    def at(self, time_s: float, work: int) -> float:
        return 1.0 if time_s < 0.1 else 2.0


def test_calibration_finds_the_cost_model_of_the_device_with_steps_in_flight_and_graphs() -> None:
    profile = make_profile(2)
    profile = replace(profile, cost=ANY_ROWS)
    executor, capacity, clock, yardstick = make_machine(profile)
    grid = Grid(executor, capacity, clock, yardstick, token_limit=3000)
    for part in grid.deal(2):
        grid.run(part)
    found = fit(grid.steps(yardstick.pace()), GRAPHS)
    assert found.median_error < 0.02
    assert found.cost.launched is not None
    assert found.cost.launched.at(200) == pytest.approx(COST.launched.at(200), rel=0.1)


def test_a_host_that_launches_longer_than_the_device_computes_is_measured_and_predicted() -> None:
    """The news of a step wait for the launches of the next one, whose own come the sooner for it: steps' times between
    news are neither the device's nor the host's, and yet both are found."""
    host = HostCost(step_s=3e-4, row_s=5e-6, launch_s=7e-3)
    profile = make_profile(2)
    profile, real = replace(profile, cost=replace(ANY_ROWS, host=host)), Results()
    executor, capacity, clock, yardstick = make_machine(profile)
    grid = Grid(executor, capacity, clock, yardstick, token_limit=2000)
    grid.run(grid.deal(1)[0])
    found = fit(grid.steps(yardstick.pace()), GRAPHS)
    assert found.median_error < 0.03
    assert found.cost.host.launch_s == pytest.approx(host.launch_s, rel=0.05)
    item = run_real(executor, capacity, clock, yardstick, make_load(rate=60.0), real)
    error = predict(0.6, real, [item], replace(profile, cost=found.cost), capacity, Pace([]))["error"]
    medians = {name: value for name, value in error.items() if name.endswith(("p50", "per_s"))}
    assert medians == pytest.approx(dict.fromkeys(medians, 0.0), abs=0.05)


def make_samples(*works: Callable[[float], float]) -> list[Sample]:
    """Return works that took so long at each second from 0 to 99."""
    return [Sample(time_s, tuple(work(time_s) for work in works)) for time_s in range(100)]


def test_each_kind_of_step_has_the_pace_of_the_moment_relative_to_its_reference() -> None:
    pace = Pace(make_samples(lambda time_s: 0.010, lambda time_s: 0.020 if time_s < 50 else 0.060), (0.010, 0.020))
    assert [pace.at(time_s, 0) for time_s in (-5, 20, 80)] == pytest.approx([1.0, 1.0, 1.0])
    assert [pace.at(time_s, 1) for time_s in (-5, 20, 40, 49.5, 60, 200)] == pytest.approx([1, 1, 1, 2, 3, 3])
    assert pace.mean(0, 40) == [1.0, 1.0]
    assert pace.summary()["slowest"] == [1.0, 3.0]


def test_steps_go_with_the_yardstick_of_their_kind() -> None:
    shapes = [StepShape(1, 1, 1, 10, 0.0), StepShape(30, 30, 30, 900, 0.0), StepShape(64, 2, 1, 10, 2000.0)]
    assert [work_of(shape) for shape in shapes] == [0, 1, 2]


def test_one_measurement_that_was_disturbed_does_not_count() -> None:
    pace = Pace(make_samples(lambda time_s: 0.100 if time_s == 7 else 0.010))
    assert pace.at(7, 0) == pytest.approx(1.0)


def test_recorded_steps_give_each_shape_its_own_times_in_their_order() -> None:
    decode, chunk = StepShape(1, 1, 1, 10, 0.0), StepShape(64, 1, 0, 0, 100.0)
    steps = [
        TimedStep(shape._replace(seconds=s), 0.0, True) for shape, s in ((decode, 1.0), (chunk, 2.0), (decode, 3.0))
    ]
    recorded = Recorded(steps, COST)
    assert [recorded.seconds(shape) for shape in (chunk, decode, decode)] == [2.0, 1.0, 3.0]
    assert recorded.seconds(decode) == COST.seconds(decode)
    assert recorded.num_others == 1


def test_errors_are_told_by_class_of_steps() -> None:
    decode = StepShape(1, 1, 1, 10, 0.0)
    slow = decode._replace(seconds=2 * COST.seconds(decode))
    changed = decode._replace(is_changed=True)
    exact = changed._replace(seconds=COST.seconds(changed))
    rows = errors_by_class(COST, [TimedStep(slow, 0.0, True), TimedStep(exact, 0.0, True)], Pace([]))
    assert rows["decodes, the same rows"]["error_of_their_time"] == pytest.approx(-0.5)
    assert rows["decodes, other rows than before"]["error_of_their_time"] == pytest.approx(0.0)
    assert step_class(StepShape(300, 1, 0, 0, 1.0), COST) == "launched kernel by kernel"
    assert step_class(StepShape(30, 1, 0, 0, 1.0), COST) == "with prompts"


def test_steps_that_the_host_did_not_wait_for_are_in_no_class() -> None:
    step = StepShape(1, 1, 1, 10, 0.0, seconds=1.0, is_device_time=False)
    assert errors_by_class(COST, [TimedStep(step, 0.0, True)], Pace([])) == {}
