"""Cost models: the formula, the fit, the roofline, the file."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferengine.core.executor import StepPlan
from inferengine.errors import ConfigError
from inferengine.simulation.cost_model import (
    ALL_REDUCE_S,
    CapturedSteps,
    CostModel,
    DeviceCeilings,
    DeviceProfile,
    Exchange,
    HostCost,
    KindCost,
    StepShape,
    analytic,
    linear_cost,
    load_profile,
    profile_names,
    shape_from_config,
    shape_of,
)
from inferengine.simulation.fitting import fit, nonnegative_least_squares
from tests.models.published import PUBLISHED_V2_LITE, PUBLISHED_V3, PUBLISHED_V25

KV_TOKEN_S = ((1.0, 6e-8), (16.0, 4e-8), (128.0, 3e-8))
TRUTH = CostModel(
    decodes=KindCost(((1, 1e-3), (32, 1.1e-3), (64, 1.2e-3), (128, 3e-3)), kv_token_s=KV_TOKEN_S, change_s=1e-4),
    prompts=KindCost(((1, 2e-3), (128, 2e-3), (1024, 2e-2)), 5e-6, KV_TOKEN_S, pair_s=8e-10, change_s=1e-4),
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


def test_each_kind_of_step_has_costs_of_its_own() -> None:
    cost = CostModel(
        decodes=KindCost(((1, 1.0), (8, 2.0), (32, 3.0))),
        prompts=KindCost(((64, 10.0), (96, 20.0))),
        launched=KindCost(((1, 100.0), (301, 400.0))),
        graphs=GRAPHS,
    )
    assert cost.seconds(shape_of(make_plan([5] * 9, []))) == 3.0  # as the graph of 32
    assert cost.seconds(shape_of(make_plan([5] * 3, [(0, 60)]))) == 20.0  # as the graph of 32 decodes and 64 tokens
    assert cost.seconds(shape_of(make_plan([], [(0, 401)]))) == pytest.approx(500.0)  # no graph holds it
    assert replace(cost, launched=None).seconds(shape_of(make_plan([], [(0, 401)]))) > 100.0  # beyond all points


def test_a_curve_is_flat_before_its_points_straight_between_them_and_goes_on_as_it_ended() -> None:
    kind = KindCost(((4, 1.0), (8, 2.0), (16, 6.0)))
    assert [kind.at(tokens) for tokens in (1, 4, 6, 8, 12, 16, 20)] == pytest.approx([1, 1, 1.5, 2, 4, 6, 8])
    assert KindCost(((4, 1.0),)).at(100) == 1.0


def test_a_token_of_kv_costs_what_it_does_with_that_many_rows() -> None:
    kind = KindCost(((1, 0.0),), kv_token_s=((2, 4.0), (10, 2.0)))
    assert [kind.seconds(1, StepShape(n, n, n, 100, 0.0)) for n in (1, 2, 6, 10, 50)] == [400, 400, 300, 200, 200]


def test_only_what_no_graph_holds_is_launched_kernel_by_kernel() -> None:
    cost = replace(TRUTH, host=HostCost(1e-3, 1e-5, 6e-3), graphs=GRAPHS)
    assert cost.host_time(shape_of(make_plan([5] * 9, []))) == pytest.approx((1.09e-3, 0.0))
    assert cost.host_time(shape_of(make_plan([], [(0, 300)]))) == pytest.approx((1.01e-3, 6e-3))


def test_below_the_knee_a_step_costs_the_weights_whatever_it_computes() -> None:
    cost = linear_cost(step_s=0.0, token_s=1e-3, knee=50.0)
    seconds = [cost.seconds(StepShape(tokens, tokens, tokens, 0, 0.0)) for tokens in (1, 50, 100)]
    assert seconds == pytest.approx([0.05, 0.05, 0.1])


def make_steps(noise: float, count: int = 400, seed: int = 1, truth: CostModel = TRUTH) -> list[StepShape]:
    generator = random.Random(seed)
    steps = []
    for _ in range(count):
        batch = generator.choice((0, 1, 4, 8, 16, 24, 32, 48, 64, 100, 128))
        decodes = [generator.randrange(1, 2000) for _ in range(batch)]
        chunks = [(generator.randrange(1000), generator.randrange(1, 512)) for _ in range(generator.randrange(3))]
        if decodes or chunks:
            shape = shape_of(make_plan(decodes, chunks))._replace(is_changed=generator.random() < 0.5)
            steps.append(shape._replace(seconds=truth.seconds(shape) * (1 + generator.gauss(0, noise))))
    return steps


def test_the_fit_finds_the_costs_that_made_the_steps() -> None:
    found = fit(make_steps(noise=0.0))
    assert found.median_error < 1e-3
    for kind, truth in ((found.cost.decodes, TRUTH.decodes), (found.cost.prompts, TRUTH.prompts)):
        others = [(item.row_s, item.pair_s, item.change_s) for item in (kind, truth)]
        assert others[0] == pytest.approx(others[1], rel=0.01, abs=1e-12)
        assert np.array(kind.kv_token_s) == pytest.approx(np.array(truth.kv_token_s), rel=0.01)
        assert [kind.at(tokens) for tokens in (1, 32, 100, 128)] == pytest.approx(
            [truth.at(tokens) for tokens in (1, 32, 100, 128)], rel=0.01
        )


def test_where_steps_are_graphs_nothing_is_put_on_the_change_of_rows() -> None:
    """Steps with prompts change the rows, so that the two are hard to tell apart; a load of decodes pays for it."""
    found = fit(make_steps(noise=0.0, truth=replace(TRUTH, graphs=GRAPHS)), GRAPHS).cost
    assert found.decodes.change_s == found.prompts.change_s == 0.0
    assert found.decodes.at(1) > TRUTH.decodes.at(1)


def test_steps_that_no_graph_holds_are_fitted_by_themselves() -> None:
    launched = KindCost(((1, 5e-3), (1024, 3e-2)))
    truth = replace(TRUTH, decodes=replace(TRUTH.decodes, change_s=0.0), launched=launched, graphs=GRAPHS)
    truth = replace(truth, prompts=replace(TRUTH.prompts, change_s=0.0))
    found = fit(make_steps(noise=0.0, truth=truth), GRAPHS).cost
    assert found.launched is not None
    assert found.launched.at(600) == pytest.approx(launched.at(600), rel=0.01)
    assert found.prompts.at(96) == pytest.approx(TRUTH.prompts.at(96), rel=0.01)


def test_steps_that_the_host_did_not_wait_for_say_nothing_about_the_device() -> None:
    steps = make_steps(noise=0.0)
    waited_for = [step._replace(host_s=4e-4 + 1e-6 * step.num_rows) for step in steps]
    others = [step._replace(seconds=0.5 * step.seconds, is_device_time=False, host_s=0.0) for step in steps]
    found = fit([*waited_for, *others])
    assert found.cost.seconds(steps[5]) == pytest.approx(TRUTH.seconds(steps[5]), rel=0.01)
    assert found.cost.host.step_s == pytest.approx(4e-4, rel=0.01)
    assert found.cost.host.row_s == pytest.approx(1e-6, rel=0.01)


def test_a_curve_has_a_point_only_where_steps_were_measured() -> None:
    shapes = [StepShape(count, count, count, 10 * count, 0.0, 1e-3 * count) for count in (1, 2, 400)] * 5
    prompts = [StepShape(count, 1, 0, 0, 0.0, 1e-3) for count in range(10, 30)]
    assert [tokens for tokens, _ in fit([*shapes, *prompts]).cost.decodes.curve] == [1, 2, 400]


def test_the_fit_is_not_biased_towards_steps_that_happened_to_be_fast() -> None:
    """Relative to measured times, noise of 20 % would make the model 4 % too fast."""
    steps = [step for step in make_steps(noise=0.2, count=700) if step.seconds > 0]
    found = fit(steps)
    bias = sum(found.cost.seconds(step) for step in steps) / sum(step.seconds for step in steps)
    assert bias == pytest.approx(1.0, abs=0.015)


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


@pytest.mark.parametrize(
    ("published", "passed", "whole"),
    [(PUBLISHED_V2_LITE, 2.66e9, 15.7e9), (PUBLISHED_V25, 21.4e9, 235.7e9), (PUBLISHED_V3, 37.6e9, 671e9)],
    ids=["V2-Lite", "V2.5", "V3"],
)
def test_the_weights_and_the_cache_of_deepseek(published: dict[str, Any], passed: float, whole: float) -> None:
    """Passed by a token, and all: as published, with the embedding, which is looked up."""
    shape = shape_from_config(published)
    embedding = published["vocab_size"] * published["hidden_size"]
    assert shape.num_matmul_weights + embedding == pytest.approx(passed, rel=2e-3)
    assert shape.num_read_weights(1) == pytest.approx(shape.num_matmul_weights)
    assert shape.num_read_weights(math.inf) + embedding == pytest.approx(whole, rel=2e-3)
    assert shape.kv_numbers_per_token == published["num_hidden_layers"] * 576


def test_a_mixture_reads_more_experts_the_more_tokens_choose() -> None:
    """V2-Lite: one token passes 6 of 64 experts, 32 tokens 61 of them; a prompt multiplies with 6 of each token."""
    device = DeviceCeilings(4.45e12, 696e12, step_s=0.0)
    shape, cost = shape_from_config(PUBLISHED_V2_LITE), analytic(shape_from_config(PUBLISHED_V2_LITE), device)
    experts = 26 * 64 * 3 * 2048 * 1408
    common = shape.num_matmul_weights - experts * 6 / 64
    assert cost.decodes.at(1) == pytest.approx(2 * (common + experts * 6 / 64) / 4.45e12)
    assert cost.decodes.at(32) == pytest.approx(2 * (common + experts * (1 - (58 / 64) ** 32)) / 4.45e12)
    assert cost.decodes.at(8192) == pytest.approx(8192 * 2 * shape.num_matmul_weights / 696e12)


def test_a_config_without_a_shape_is_refused_by_the_missing_key() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        shape_from_config({name: value for name, value in LLAMA.items() if name != "vocab_size"})


def test_ranks_share_a_step_but_for_its_undivided_part_and_what_they_exchange() -> None:
    """65 sums of a row of 8 KiB for each token; the parts that grow with context and pairs are divided."""
    profile = DeviceProfile("x", TRUTH, num_blocks=50, exchange=Exchange(sums=65, row_bytes=8192, undivided_s=4e-4))
    two = profile.divided(2)
    sums = dict(ALL_REDUCE_S[2])
    one_s, two_s = (each.cost.seconds(StepShape(128, 128, 128, 1000, 0.0)) for each in (profile, two))
    assert two_s == pytest.approx(4e-4 + (one_s - 4e-4) / 2 + 65 * sums[1 << 20])
    one_s, two_s = (each.cost.seconds(StepShape(8192, 0, 0, 0, 1e6)) for each in (profile, two))
    assert two_s == pytest.approx(4e-4 + (one_s - 4e-4) / 2 + 65 * sums[64 << 20]), "beyond the curve's last point too"
    assert two.num_blocks == 100, "each holds half of every block"
    assert profile.divided(1) == profile


@pytest.mark.parametrize(
    ("rows", "measured_ms"), [(1, (3.83, 2.37)), (16, (4.30, 2.84)), (64, (4.84, 3.28)), (128, (5.95, 4.11))]
)
def test_a_measured_profile_foretells_what_two_cards_were_measured_to_do(
    rows: int, measured_ms: tuple[float, float]
) -> None:
    """docs/executor.md; contexts of 100 to 196 tokens."""
    profile, shape = load_profile("h200-llama-3.1-8b"), StepShape(rows, rows, rows, 148 * rows, 0.0)
    found = [1e3 * profile.divided(ranks).cost.seconds(shape) for ranks in (1, 2)]
    assert found == pytest.approx(measured_ms, rel=0.12)


def test_what_was_not_measured_is_not_divided() -> None:
    with pytest.raises(ConfigError, match="not over 4"):
        load_profile("h200-llama-3.1-8b").divided(4)
    with pytest.raises(ConfigError, match="exchange"):
        DeviceProfile("x", TRUTH).divided(2)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    cost = replace(TRUTH, launched=TRUTH.prompts, host=HostCost(1e-3, 1e-6, 6e-3), graphs=GRAPHS)
    exchange = Exchange(3, 1024, 1e-4)
    profile = DeviceProfile("x", cost, num_blocks=99, max_in_flight=2, source={"machine": "y"}, exchange=exchange)
    profile.save(tmp_path / "x.json")
    assert load_profile(str(tmp_path / "x.json")) == profile


@pytest.mark.parametrize("name", profile_names())
def test_the_profiles_that_come_along_can_be_loaded_and_say_where_they_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.source["method"]
    assert 0 < profile.cost.seconds(StepShape(1, 1, 1, 100, 0.0)) < 1


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"name": "x"}', '{"name": "x", "cost": {"speed": 1}}',
        '{"name": "x", "cost": {"decodes": {"curve": []}, "prompts": {"curve": [[1, 1]]}}}',
        '{"name": "x", "cost": {"decodes": {"curve": [[2, 1], [1, 1]]}, "prompts": {"curve": [[1, 1]]}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_profile(str(path))


def test_an_unknown_cost_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h200-llama"):
        load_profile("nothing")
