"""Cost models from the measured times of matrix products: steps of models that were not calibrated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import shapes
from benchmarks.calibrate import product_times
from inferengine.errors import ConfigError
from inferengine.layers.parallel import VOCABULARY_UNIT
from inferengine.simulation.cost_model import StepShape, load_profile, shape_from_config
from inferengine.simulation.measured_products import (
    CALIBRATED,
    CALIBRATED_SHAPE,
    CARD,
    HEAD_UNIT,
    ProductTimes,
    profile_of_config,
    tuned_profile,
)

MEASURED = Path(__file__).parents[2] / "benchmarks/results/compare-shapes-h200.json"
CONTEXT = 128 + 96  # tokens of a sequence in the middle of the measured steps


def decodes(rows: int) -> StepShape:
    return StepShape(rows, rows, rows, rows * CONTEXT, 0.0)


def test_the_calibrated_models_own_products_give_its_calibration() -> None:
    known = load_profile(CALIBRATED)
    profile = tuned_profile("again", CALIBRATED_SHAPE, product_times(CARD))
    for rows in (1, 20, 64, 300):
        assert profile.cost.seconds(decodes(rows)) == pytest.approx(known.cost.seconds(decodes(rows)))
    chunk = StepShape(2048, 1, 0, 0, 2048 * 2049 / 2)
    assert profile.cost.seconds(chunk) == pytest.approx(known.cost.seconds(chunk))
    assert profile.num_blocks == known.num_blocks
    assert profile.exchange == pytest.approx(known.exchange)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-14b"])
def test_decodes_of_other_models_take_what_was_measured(name: str) -> None:
    measured = {
        row["workload"]: row["ours"] * 1e-3
        for row in json.loads(MEASURED.read_text())["rows"]
        if row["model"] == name and row["workload"].startswith("decode")
    }
    cost = tuned_profile(name, shape_from_config(shapes.SHAPES[name]), product_times(CARD)).cost
    for rows in (1, 16, 64, 128, 256):
        assert cost.seconds(decodes(rows)) == pytest.approx(measured[f"decode {rows}"], rel=0.07)


def test_times_between_measured_rows_lie_on_a_line_and_grow_in_proportion_beyond() -> None:
    times = ProductTimes(CALIBRATED_SHAPE, product_times(CARD))
    middle = (times.seconds(64, 1) + times.seconds(96, 1)) / 2
    assert times.seconds(80, 1) == pytest.approx(middle)
    head = times.seconds(8192, 1) - times.seconds(4096, 1)
    assert times.seconds(16384, 1) > times.seconds(8192, 1) + head


def test_the_product_of_a_head_is_that_of_its_padded_rows() -> None:
    assert HEAD_UNIT == VOCABULARY_UNIT
    products = product_times(CARD)
    whole, short = (ProductTimes(CALIBRATED_SHAPE._replace(vocab_size=size), products) for size in (128256, 128200))
    assert short.seconds(64, 64) == whole.seconds(64, 64)


def test_a_model_whose_products_were_not_measured_is_refused_with_the_products_size() -> None:
    config = {**shapes.QWEN3_14B, "hidden_size": 1000, "head_dim": 8}
    with pytest.raises(ConfigError, match=r"\[448, 1000\].*inferengine tune"):
        profile_of_config("other", config, product_times(CARD))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"num_hidden_layers": 4000}, "do not fit"),
    ],
)
def test_what_the_tables_do_not_hold_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        profile_of_config("other", {**shapes.QWEN3_14B, **changes}, product_times(CARD))


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-14b", "qwen3-32b"])
def test_the_packages_cost_models_of_other_models_are_those_of_its_tables(name: str) -> None:
    """`python -m benchmarks.calibrate --shape NAME --name h200-NAME --products` writes them."""
    profile = profile_of_config(f"h200-{name}", shapes.SHAPES[name], product_times(CARD))
    assert load_profile(f"h200-{name}") == profile
