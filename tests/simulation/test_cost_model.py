"""Cost models: the formula, the fit, the roofline, the file."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from inferengine.core.plan import StepPlan
from inferengine.errors import ConfigError
from inferengine.simulation.cost_model import (
    CapturedSteps,
    CostModel,
    DeviceCeilings,
    DeviceProfile,
    StepShape,
    analytic,
    load_profile,
    profile_names,
    shape_from_config,
    shape_of,
)
from inferengine.simulation.fitting import fit, nonnegative_least_squares

TRUTH = CostModel(
    step_s=3e-4, token_s=2e-5, knee=96.0, chunk_step_s=2e-4, row_s=5e-6, kv_token_s=3e-8, pair_s=8e-10, change_s=1e-4
)
GRAPHS = CapturedSteps(decodes=(1, 8, 32, 128), mixed=((0, 64), (32, 64), (128, 256)), prompt_rows=2)
LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def make_plan(decodes: list[int], chunks: list[tuple[int, int]]) -> StepPlan:
    """Decode rows by context length, chunks as (start, count)."""
    starts = [length - 1 for length in decodes] + [start for start, _ in chunks]
    counts = [1] * len(decodes) + [count for _, count in chunks]
    rows = len(starts)
    return StepPlan(1, list(range(rows)), starts, counts, [True] * rows, len(decodes), sum(counts), [], [])


def test_the_shape_of_a_step_counts_what_attention_reads() -> None:
    plan = make_plan([10, 20], [(100, 3), (0, 2)])
    pairs = (101 + 102 + 103) + (1 + 2)
    assert shape_of(plan) == StepShape(7, 4, 2, 30, float(pairs))
    assert shape_of(make_plan([10, 20], [])) == StepShape(2, 2, 2, 30, 0.0)


def test_a_step_is_changed_when_its_rows_are_not_those_of_the_step_before() -> None:
    plan = make_plan([10, 20], [])
    assert not shape_of(plan, [0, 1]).is_changed
    assert shape_of(plan, [0, 2]).is_changed
    assert not shape_of(plan).is_changed  # nothing is known of a step before


@pytest.mark.parametrize(
    ("decodes", "prompts", "padded"),
    [
        (1, [], 1), (9, [], 32), (129, [], None), (0, [60], 64), (1, [60, 4], 32 + 64), (40, [30], 128 + 256),
        (1, [2, 2, 2], None), (1, [300], None),
    ],
)  # fmt: skip
def test_a_step_is_padded_to_the_smallest_graph_with_room(decodes: int, prompts: list[int], padded: int | None) -> None:
    shape = shape_of(make_plan([5] * decodes, [(0, count) for count in prompts]))
    assert GRAPHS.padded(shape) == padded


def test_a_step_that_no_graph_holds_costs_its_launches() -> None:
    cost = CostModel(step_s=0.0, token_s=1e-3, knee=10.0, eager_knee=400.0, graphs=GRAPHS)
    assert cost.seconds(StepShape(9, 9, 9, 0, 0.0)) == pytest.approx(0.032)
    assert cost.seconds(StepShape(5, 5, 5, 0, 0.0)) == pytest.approx(0.010)
    assert cost.seconds(StepShape(300, 1, 0, 0, 0.0)) == pytest.approx(0.400)
    assert cost.seconds(StepShape(500, 1, 0, 0, 0.0)) == pytest.approx(0.500)


def test_below_the_knee_a_step_costs_the_weights_whatever_it_computes() -> None:
    cost = CostModel(step_s=0.0, token_s=1e-3, knee=50.0)
    seconds = [cost.seconds(StepShape(tokens, tokens, tokens, 0, 0.0)) for tokens in (1, 50, 100)]
    assert seconds == pytest.approx([0.05, 0.05, 0.1])


def make_steps(noise: float, count: int = 300, seed: int = 1, truth: CostModel = TRUTH) -> list[StepShape]:
    generator = random.Random(seed)
    steps = []
    for _ in range(count):
        decodes = [generator.randrange(1, 2000) for _ in range(generator.choice((0, 1, 4, 32, 128)))]
        chunks = [(generator.randrange(1000), generator.randrange(1, 512)) for _ in range(generator.randrange(3))]
        if decodes or chunks:
            shape = shape_of(make_plan(decodes, chunks))._replace(is_changed=generator.random() < 0.5)
            steps.append(shape._replace(seconds=truth.seconds(shape) * (1 + generator.gauss(0, noise))))
    return steps


def test_the_fit_finds_the_coefficients_that_made_the_steps() -> None:
    found = fit(make_steps(noise=0.0))
    assert found.median_error < 1e-6
    assert coefficients(found.cost) == pytest.approx(coefficients(TRUTH), rel=1e-3)


def test_the_fit_finds_what_graphs_and_launches_cost() -> None:
    truth = replace(TRUTH, eager_knee=384.0, graphs=GRAPHS, change_s=0.0)
    found = fit(make_steps(noise=0.0, truth=truth), GRAPHS)
    assert found.cost.graphs == GRAPHS
    assert coefficients(found.cost) == pytest.approx(coefficients(truth), rel=1e-3)


def test_where_steps_are_graphs_nothing_is_put_on_the_change_of_rows() -> None:
    """Steps with prompts change the rows, so that the two are hard to tell apart; a load of decodes pays for it."""
    truth = replace(TRUTH, eager_knee=384.0, graphs=GRAPHS)
    found = fit(make_steps(noise=0.0, truth=truth), GRAPHS).cost
    assert found.change_s == 0.0
    assert found.step_s > truth.step_s


def test_the_fit_is_not_biased_towards_steps_that_happened_to_be_fast() -> None:
    """Relative to measured times, noise of 20 % would make the model 4 % too fast."""
    steps = [step for step in make_steps(noise=0.2, count=700) if step.seconds > 0]
    found = fit(steps)
    bias = sum(found.cost.seconds(step) for step in steps) / sum(TRUTH.seconds(step) for step in steps)
    assert bias == pytest.approx(1.0, abs=0.015)


def coefficients(cost: CostModel) -> dict[str, float]:
    values = asdict(cost)
    del values["graphs"]
    return values


def test_the_fit_is_not_led_astray_by_a_machine_that_was_busy() -> None:
    generator = random.Random(3)
    steps = [step._replace(seconds=step.seconds * generator.choice((1, 1, 1, 1, 3))) for step in make_steps(noise=0.02)]
    found = fit(steps)
    errors = sorted(abs(found.cost.seconds(s) / TRUTH.seconds(s) - 1) for s in steps)
    assert errors[len(errors) // 2] < 0.05


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot fix"):
        fit(make_steps(noise=0.0)[:3])


def test_least_squares_without_negative_coefficients() -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        matrix = generator.random((30, 5)) * np.array([1.0, 1e3, 1e-6, 10.0, 1.0])
        target = generator.random(30)
        solution = nonnegative_least_squares(matrix, target)
        gradient = matrix.T @ (target - matrix @ solution) / np.linalg.norm(matrix, axis=0)
        assert (solution >= 0).all()
        assert gradient.max() < 1e-8  # no coefficient would help by growing,
        assert np.abs(gradient[solution > 0]).max(initial=0.0) < 1e-8  # and those that are used are at their best


def test_the_roofline_of_an_8b_on_an_h200() -> None:
    """Weights of 7.5 billion in bf16 read at 4.45 TB/s take 3.4 ms; a prompt of 8,192 is bound by arithmetic."""
    shape = shape_from_config(LLAMA)
    assert shape.num_matmul_weights == pytest.approx(7.5e9, rel=0.01)
    cost = analytic(shape, DeviceCeilings(4.45e12, 696e12, step_s=0.0))
    assert cost.seconds(StepShape(1, 1, 1, 128, 0.0)) == pytest.approx(3.38e-3, rel=0.02)
    prompt = cost.seconds(StepShape(8192, 1, 0, 0, 8192 * 8193 / 2))
    assert 8192 / prompt == pytest.approx(43_000, rel=0.1)


def test_a_config_without_a_shape_is_refused_by_the_missing_key() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_from_config({name: value for name, value in LLAMA.items() if name != "vocab_size"})


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    cost = replace(TRUTH, eager_knee=384.0, graphs=GRAPHS)
    profile = DeviceProfile("x", cost, num_blocks=99, max_in_flight=2, source={"machine": "y"})
    profile.save(tmp_path / "x.json")
    assert load_profile(str(tmp_path / "x.json")) == profile


@pytest.mark.parametrize("name", profile_names())
def test_the_profiles_that_come_along_can_be_loaded_and_say_where_they_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.source["method"]
    assert 0 < profile.cost.seconds(StepShape(1, 1, 1, 100, 0.0)) < 1


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"name": "x", "cost": {"speed": 1}}'])
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_profile(str(path))


def test_an_unknown_cost_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h200-llama"):
        load_profile("nothing")
