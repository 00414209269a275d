"""The table of kernels against recorded decisions: `dispatch_golden.json` holds, for each pair of operands, product and
shape, the last row of each run of rows with the same candidates.

A change of the table is meant to change that file: `python -m tests.kernels.test_dispatch` writes it anew, and its diff
shows which shapes changed kernels.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferengine.kernels.cuda.dispatch import (
    PRODUCTS,
    Operands,
    Product,
    candidates,
    decode_rule,
    hopper_prefill_config,
    hopper_prefill_is_faster,
    hopper_prefill_tokens,
    prefill_config,
)

GOLDEN = Path(__file__).with_name("dispatch_golden.json")
LAST_ROW = 1024
SHAPES = (
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),  # an 8B model
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),  # a 0.6B model
    *((37888, 3584), (3584, 18944), (8192, 28672), (17408, 1024), (8192, 1536), (1000, 260), (576, 576), (160, 1088)),
)


def describe(operands: Operands, product: Product, rows: int, width: int, columns: int) -> str:
    choices = candidates(operands, product, rows, width, columns)
    return "; ".join(f"{choice.kernel.name}{list(choice.config or ())}" for choice in choices)


def runs(descriptions: list[str]) -> list[list[int | str]]:
    """Return [last number, description] of each run of equal descriptions, counted from 1."""
    following = [*descriptions[1:], None]
    pairs = enumerate(zip(descriptions, following, strict=True), 1)
    return [[number, this] for number, (this, after) in pairs if this != after]


def decisions(operands: Operands) -> dict[str, list[list[int | str]]]:
    return {
        f"{product.name} {width}x{columns}": runs(
            [describe(operands, product, rows, width, columns) for rows in range(1, LAST_ROW + 1)]
        )
        for product in PRODUCTS[operands]
        for width, columns in SHAPES
    }


def attention() -> dict[str, list[list[int | str]]]:
    found = {
        f"decode, head_dim {head_dim}": runs(
            [str(list(decode_rule(rows, 1, head_dim))) for rows in range(1, 2 * LAST_ROW + 1)]
        )
        for head_dim in (64, 128, 256)
    }
    for head_dim in (64, 128, 256):
        sizes = [str(list(prefill_config(head_dim, size))) for size in range(1, 129)]
        found[f"prefill, head_dim {head_dim}"] = runs(sizes)
        configs = [str(list(hopper_prefill_config(head_dim, tokens))) for tokens in range(1, 2 * LAST_ROW + 1)]
        found[f"Hopper's prefill, head_dim {head_dim}"] = runs(configs)
        for rows in (1, 16, 64):  # a captured step has 16, most of them empty
            faster = [str(hopper_prefill_is_faster(tokens, rows, head_dim)) for tokens in range(1, 2 * LAST_ROW + 1)]
            found[f"Hopper's prefill is faster, head_dim {head_dim}, {rows} rows"] = runs(faster)
    return found


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, list[list[int | str]]]]:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("operands", Operands, ids=lambda operands: operands.name)
def test_products_take_the_recorded_kernels(operands: Operands, golden) -> None:
    assert decisions(operands) == golden[operands.name]


def test_attention_takes_the_recorded_configurations(golden) -> None:
    assert attention() == golden["ATTENTION"]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_steps_that_compile_prompt_attention_have_each_configuration(head_dim: int) -> None:
    """A step of some number of tokens is compiled with both numbers around it."""
    compiled = sorted(hopper_prefill_tokens(head_dim))
    assert hopper_prefill_config(head_dim, 1).min_tokens in compiled
    for tokens in range(1, 10_000):
        after, before = (
            min([each for each in compiled if each >= tokens], default=10_000),
            max([each for each in compiled if each <= tokens], default=1),
        )
        config = hopper_prefill_config(head_dim, tokens)
        assert config in (hopper_prefill_config(head_dim, before), hopper_prefill_config(head_dim, after))


def test_decode_attention_counts_rows_times_kv_heads() -> None:
    assert decode_rule(8, 16, 128) == decode_rule(128, 1, 128) == decode_rule(16, 8, 128)


if __name__ == "__main__":
    recorded = {operands.name: decisions(operands) for operands in Operands} | {"ATTENTION": attention()}
    lines = (
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in cases.items()) + "}"
        for name, cases in recorded.items()
    )
    GOLDEN.write_text("{" + ",\n".join(lines) + "}\n")
