"""Float weights into codes and back, and what the CPU makes of them."""

from __future__ import annotations

import pytest
import torch

from inferengine.quantization import cpu
from inferengine.quantization.checkpoints.layout import AWQ_ORDER, IN_ORDER, listed, unpack_rows
from inferengine.quantization.schemes import MADE
from inferengine.quantization.weight import Block, by_row, dequantize, spread, stack
from tests.executor.engine import Engine
from tests.models.checkpoints import make_model, save
from tests.quantization.checkpoints import pack_rows

# Largest error of a code in units of its scale: e4m3 has steps of 32 at its top, whole codes one of 1.
HALF_STEP = {"fp8": 16.0, "int8": 0.51, "int4": 0.51}


@pytest.mark.parametrize("scheme", sorted(MADE))
@pytest.mark.parametrize("shape", [(40, 272), (96, 128), (3, 50)])
def test_every_weight_is_within_half_a_step(scheme: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-2, 1, shape[0])[:, None]
    made = MADE[scheme](weight)
    assert made.shape == shape
    error = (dequantize(made) - weight).abs()
    steps = HALF_STEP[made.kind] * (2 if made.kind == "int4" else 1)  # the zero point is rounded too
    assert (error <= steps * spread(made.scales, made) + 1e-7).all()


@pytest.mark.parametrize("scheme", sorted(MADE))
def test_zeros_stay_zeros_and_extremes_finite(scheme: str) -> None:
    weight = torch.zeros(8, 256)
    weight[1, 7], weight[2, 200] = 3e4, -3e4
    back = dequantize(MADE[scheme](weight))
    assert torch.isfinite(back).all()
    assert (back[3:] == 0).all()
    assert back[1, 7] == pytest.approx(3e4, rel=0.02)
    assert back[2, 200] == pytest.approx(-3e4, rel=0.02)


@pytest.mark.parametrize("scheme", sorted(MADE))
@pytest.mark.parametrize("rows", [1, 5, cpu.FEW + 1])
def test_products_on_the_cpu(scheme: str, rows: int) -> None:
    weight, x = MADE[scheme](torch.randn(96, 320)), torch.randn(rows, 320)
    expected = x.double() @ dequantize(weight).double().t()
    error = (cpu.pack(weight).multiply(x).double() - expected).norm() / expected.norm()
    rounded = {"int8": 0.01 if rows <= cpu.FEW else 1e-5, "int8_w8a8": 0.02}
    assert error < rounded.get(scheme, 1e-5)


def test_rounded_inputs_have_a_scale_for_each_token() -> None:
    packed = cpu.pack(MADE["int8_w8a8"](torch.randn(64, 128)))
    x = torch.randn(6, 128)
    loud = torch.cat((x, 1e4 * torch.randn(2, 128)))
    assert torch.equal(packed.multiply(loud)[:6], packed.multiply(x))


@pytest.mark.parametrize("order", [IN_ORDER, AWQ_ORDER])
def test_nibbles_come_back_in_their_order(order: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    assert torch.equal(unpack_rows(pack_rows(codes, order), order), codes)


def test_awq_interleaves_columns() -> None:
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert unpack_rows(word, AWQ_ORDER).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_blocks_that_a_seam_cuts_become_rows() -> None:
    parts = [MADE["fp8_block"](torch.randn(rows, 200)) for rows in (80, 56)]
    whole = stack(parts)
    assert whole.block == Block(1, 128)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))
    even = stack([MADE["fp8_block"](torch.randn(128, 200)), parts[0]])
    assert even.block == Block(128, 128)
    assert torch.equal(dequantize(by_row(even)), dequantize(even))


def test_exceptions_are_named_in_full_in_part_or_by_pattern() -> None:
    check = listed(["lm_head", "model.layers.3", "gate", r"re:.*\.down_proj$"])
    assert check("lm_head")
    assert check("model.layers.3.mlp.up_proj")
    assert check("model.layers.1.mlp.gate")
    assert check("model.layers.0.mlp.down_proj")
    assert not check("model.layers.30.mlp.up_proj")
    assert not check("model.layers.1.mlp.gate_proj")


@pytest.mark.parametrize("scheme", sorted(MADE))
@pytest.mark.parametrize("family", ["llama-tied-biases", "gpt2", "gemma3"])
def test_any_family_runs_in_any_scheme(scheme: str, family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save(make_model(family), tmp_path_factory.mktemp("model"))
    prompts = [[5, 9, 200, 31, 7], [77, 3] * 9]
    engine = Engine(folder, model={"quantization": scheme})
    assert engine.executor.quantization == scheme
    first = engine.generate(prompts, 6)
    assert first == Engine(folder, model={"quantization": scheme}).generate(prompts, 6)
    assert {row.reason for row in engine.finished.values()} == {"length"}
