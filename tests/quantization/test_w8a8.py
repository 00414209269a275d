"""Products whose inputs are quantized to codes, and the kernels that quantize them. FP8 needs a device
(see test_w8a8_stream_hopper.py): Triton's interpreter rounds int8 only."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inferengine.kernels.cuda import activation
from inferengine.kernels.cuda.dispatch import Kernel, Operands, Product, above, rule
from inferengine.kernels.cuda.gemm.quantize_activations import (
    add_parts_norm_and_quantize,
    gate_and_quantize_rows,
)
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.linear import Linear
from inferengine.quantization import cuda
from inferengine.quantization.cuda_w8a8 import QuantizedInputs
from inferengine.quantization.schemes import MADE
from inferengine.quantization.weight import dequantize
from tests.kernels.builders import prefer_rule

ROWS, COLUMNS, INNER = 20, 64, 96
STEP = 1 / 253  # of the largest number of a row: half of what int8 codes are apart, and a little


@pytest.fixture(autouse=True)
def _inputs_are_quantized_from_two_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = rule(Kernel.QUANTIZE_INPUTS, None, above(1))
    prefer_rule(monkeypatch, Operands.W8A8, Product.LINEAR, quantize)


def make_products(device: torch.device, **options: bool) -> cuda.CudaProducts:
    return cuda.CudaProducts(REFERENCE, lambda weight: weight, device, **options)


def rows_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    peak = expected.double().abs().amax(-1, keepdim=True)
    assert ((found.double() - expected.double()).abs() <= tolerance * peak).all()


@pytest.mark.parametrize(
    ("kind", "reference"),
    [(activation.SILU, REFERENCE.silu_and_mul), (activation.GELU_TANH, REFERENCE.gelu_tanh_and_mul)],
)
def test_gated_activations_are_quantized_with_a_scale_for_each_row(kind, reference, device):
    both = torch.randn(5, 2 * 200, device=device) * torch.logspace(-2, 0, 5, device=device)[:, None]
    codes, scales = gate_and_quantize_rows(both, torch.int8, kind)
    rows_close(codes.float() * scales, reference(both), STEP)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_are_added_to_the_residual_whose_norm_is_quantized(parts, device):
    pieces, gain = torch.randn(parts, 5, 200, device=device), torch.rand(200, device=device) + 0.5
    total = residual = torch.randn(5, 200, device=device)
    for piece in pieces:
        total = total + piece
    codes, scales = add_parts_norm_and_quantize(pieces, residual, gain, 1e-5, torch.int8)
    assert torch.equal(residual, total)
    rows_close(codes.float() * scales, REFERENCE.rms_norm(residual, gain, 1e-5), STEP)


def test_codes_are_numbers_by_row_and_by_block_of_columns():
    codes = torch.randint(-127, 128, (3, 256), dtype=torch.int8)
    by_row, by_block = torch.rand(3, 1), torch.rand(2, 3)
    assert torch.equal(QuantizedInputs(codes, by_row, torch.float32).dequantize(), codes.float() * by_row)
    expected = torch.cat([codes[:, :128] * by_block[0][:, None], codes[:, 128:] * by_block[1][:, None]], 1)
    assert torch.equal(QuantizedInputs(codes, by_block, torch.float32).dequantize(), expected)


def test_a_gated_product_hands_codes_to_the_product_after_it(device):
    gate_up = MADE["int8_w8a8"](torch.randn(2 * INNER, COLUMNS, device=device))
    down = MADE["int8_w8a8"](torch.randn(COLUMNS, INNER, device=device))
    x = torch.randn(ROWS, COLUMNS, device=device).bfloat16()
    gain, residual = torch.ones(COLUMNS, device=device).bfloat16(), torch.randn(ROWS, COLUMNS, device=device).bfloat16()
    ours = make_products(device)
    inner = ours.norm_gated_linear(x, gain, 1e-5, cuda.pack(gate_up))
    assert isinstance(inner, QuantizedInputs)
    normed = REFERENCE.rms_norm(x.float(), gain.float(), 1e-5)
    expected = REFERENCE.silu_and_mul(normed @ dequantize(gate_up).t())
    rows_close(inner.dequantize(), expected, 0.03)
    total = residual.float() + inner.dequantize().float() @ dequantize(down).t()
    summed, handed_on = ours.linear_add_norm(inner, cuda.pack(down), None, residual, gain, 1e-5)
    assert summed.data_ptr() == residual.data_ptr()
    assert handed_on is None, "int8 products leave no parts"
    rows_close(summed, total, 0.02)


def test_a_layer_that_reads_no_codes_gets_numbers():
    layer = Linear(dataclasses.replace(REFERENCE, reads_codes=False), 128, 8)
    layer.weight.data.normal_()
    layer.finish()
    codes = QuantizedInputs(torch.randint(-127, 128, (3, 128), dtype=torch.int8), torch.rand(3, 1), torch.float32)
    assert torch.equal(layer(codes), layer(codes.dequantize()))
    residual = torch.randn(3, 8)
    assert torch.equal(layer.add_to(residual.clone(), codes), layer.add_to(residual.clone(), codes.dequantize()))


def test_deterministic_products_quantize_no_inputs(device):
    packed = cuda.pack(MADE["int8_w8a8"](torch.randn(2 * INNER, COLUMNS, device=device)))
    x, gain = torch.randn(ROWS, COLUMNS, device=device).bfloat16(), torch.ones(COLUMNS, device=device).bfloat16()
    ours = make_products(device, deterministic=True)
    whole = ours.norm_gated_linear(x, gain, 1e-5, packed)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(ours.norm_gated_linear(x[:3].contiguous(), gain, 1e-5, packed), whole[:3])
