"""Measured steps in a file: what was measured comes back, and gives the same cost model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.measured_steps import CALIBRATION, describe, fit_again, read_steps, save_steps
from inferengine.simulation.cost_model import (
    CapturedSteps,
    CostModel,
    DeviceProfile,
    HostCost,
    KindCost,
    StepShape,
)
from inferengine.simulation.fitting import fit

GRAPHS = CapturedSteps((1, 8), ((8, 64),), 4)
COST = CostModel(
    KindCost(((1, 4e-3), (8, 5e-3)), kv_token_s=((1, 5e-8),)), KindCost(((72, 9e-3),), kv_token_s=((1, 5e-8),)), None,
    HostCost(1e-3, 2e-6), GRAPHS,
)  # fmt: skip
PROFILE = DeviceProfile("card", COST, num_blocks=99, max_in_flight=2, source={"device": "a card"})


def make_steps() -> list[StepShape]:
    generator = random.Random(1)
    steps = []
    for _ in range(60):
        decodes, chunk = generator.randint(1, 8), generator.choice((0, 50))
        kv, pairs = generator.randint(100, 9000), 0.5 * chunk * (chunk + 1)
        shape = StepShape(decodes + chunk, decodes + (chunk > 0), decodes, kv, pairs, is_changed=chunk > 0)
        host = COST.host_time(shape)
        steps.append(shape._replace(seconds=COST.seconds(shape), host_s=host.plan_s + host.launch_s))
    return [*steps, steps[0]._replace(seconds=1e-4, is_device_time=False)]


def test_steps_come_back_from_their_file(tmp_path: Path) -> None:
    steps = make_steps()
    save_steps(tmp_path / "steps.json", PROFILE, {CALIBRATION: steps, "load 0": steps[:3]})
    about, graphs, found = read_steps(tmp_path / "steps.json")
    assert (about["name"], about["num_blocks"], graphs) == ("card", 99, GRAPHS)
    assert found["load 0"] == found[CALIBRATION][:3]
    for shape, before in zip(found[CALIBRATION], steps, strict=True):
        assert shape == pytest.approx(before, abs=1e-6)
        assert (shape.is_changed, shape.is_device_time) == (before.is_changed, before.is_device_time)


def test_a_file_of_steps_gives_the_cost_model_again(tmp_path: Path) -> None:
    steps = make_steps()
    save_steps(tmp_path / "steps.json", PROFILE, {CALIBRATION: steps})
    profile, direct = fit_again(tmp_path / "steps.json", "again"), fit(steps, GRAPHS)
    assert (profile.name, profile.num_blocks, profile.source["device"]) == ("again", 99, "a card")
    assert profile.source["measured_steps"] == 61
    assert [profile.cost.seconds(shape) for shape in steps] == pytest.approx(
        [direct.cost.seconds(shape) for shape in steps], rel=1e-3
    )


def test_a_cost_model_is_told_in_a_line_for_each_kind_of_steps() -> None:
    decodes, prompts, host = describe(COST).splitlines()
    assert decodes.startswith("decodes  ms 1: 4.00, 8: 5.00")
    assert prompts.startswith("prompts  ms 72: 9.00")
    assert "1.00" in host
