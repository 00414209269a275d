"""Streamed products of FP8 codes. They need a Hopper card; without, they are compiled for one, and that is all."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.cuda.gemm.quantize_activations import (
    add_parts_norm_and_quantize,
    gate_and_quantize_rows,
    quantize_rows,
)
from inferengine.kernels.cuda.gemm.w8a8_stream_hopper import (
    StreamConfig,
    fits,
    stream_gated,
    stream_parts,
    stream_product,
)
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.kernels.ops import REFERENCE

FP8 = torch.float8_e4m3fn
WIDTH, COLUMNS = 512, 1024
ROUNDED = 2e-3  # bf16 results; the tensor cores keep fewer than 24 bits of sums of FP8 products


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


hopper = pytest.mark.skipif(not on_hopper(), reason="needs a CUDA device: Hopper")


def make_codes(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales by row, and the numbers that they stand for in float64."""
    codes, scales = quantize_rows(torch.randn(rows, columns, device=device).bfloat16(), FP8)
    return codes, scales, codes.double() * scales.double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


TUNINGS = [
    (2, StreamConfig(8, 64, 128, 1, 4, 4)),
    (16, StreamConfig(16, 64, 256, 1, 4, 4)),
    (30, StreamConfig(32, 128, 128, 1, 4, 3)),
    (64, StreamConfig(64, 128, 256, 1, 8, 2)),
    (97, StreamConfig(128, 64, 128, 1, 4, 3)),
    (128, StreamConfig(128, 128, 128, 1, 8, 3)),
]


@hopper
@pytest.mark.parametrize(("rows", "tuned"), TUNINGS)
def test_a_product_with_what_surrounds_it(rows, tuned, device):
    codes, scales, x = make_codes(rows, COLUMNS, device)
    weight, weight_scales, numbers = make_codes(WIDTH, COLUMNS, device)
    weight_scales = weight_scales.view(-1)
    assert fits(rows, weight, tuned)
    expected = x @ numbers.t()
    found = stream_product(codes, scales, weight, weight_scales, tuned, torch.bfloat16)
    assert relative_error(found, expected) < ROUNDED
    bias = torch.randn(WIDTH, device=device).bfloat16()
    residual = torch.randn(rows, WIDTH, device=device).bfloat16()
    expected = expected + bias.double() + residual.double()
    found = stream_product(codes, scales, weight, weight_scales, tuned, torch.bfloat16, bias=bias, residual=residual)
    assert found.data_ptr() == residual.data_ptr()
    assert relative_error(found, expected) < ROUNDED


@hopper
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("rows", "tuned"), TUNINGS)
def test_parts_add_up_to_the_product(rows, tuned, splits, device):
    codes, scales, x = make_codes(rows, COLUMNS, device)
    weight, weight_scales, numbers = make_codes(WIDTH, COLUMNS, device)
    tuned = tuned._replace(splits=splits)
    parts = stream_parts(codes, scales, weight, weight_scales.view(-1), tuned, Scratch(device))
    assert parts.shape == (splits, rows, WIDTH)
    assert relative_error(parts.sum(0), x @ numbers.t()) < ROUNDED


@hopper
@pytest.mark.parametrize(("rows", "tuned"), TUNINGS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_what_is_gated_leaves_as_numbers_or_as_codes_that_the_next_product_reads(rows, tuned, activation, device):
    codes, scales, x = make_codes(rows, COLUMNS, device)
    weight, weight_scales, numbers = make_codes(2 * WIDTH, COLUMNS, device)
    weight_scales = weight_scales.view(-1) / COLUMNS**0.5
    kind, reference = {"silu": (0, REFERENCE.silu_and_mul), "gelu_tanh": (1, REFERENCE.gelu_tanh_and_mul)}[activation]
    expected = reference(x @ numbers.t() / COLUMNS**0.5)
    tuned = tuned._replace(num_stages=2)
    found = stream_gated(codes, scales, weight, weight_scales, tuned, kind, torch.bfloat16)
    assert relative_error(found, expected) < 2 * ROUNDED
    large = tuned._replace(block_n=128, num_warps=8 if tuned.block_m > 64 else tuned.num_warps)
    handed_on = stream_gated(codes, scales, weight, weight_scales, large, kind)
    blocks = handed_on.codes.double().view(rows, -1, 128) * handed_on.scales.t().double()[:, :, None]
    assert (blocks - expected.view(rows, -1, 128)).abs().max() < 0.04 * expected.abs().max()
    down, down_scales, down_numbers = make_codes(WIDTH, WIDTH, device)
    expected = blocks.view(rows, WIDTH) @ down_numbers.t()
    for splits in (1, 2):
        split = tuned._replace(splits=splits)
        parts = stream_parts(*handed_on, down, down_scales.view(-1), split, Scratch(device))
        assert relative_error(parts.sum(0), expected) < ROUNDED


@hopper
def test_a_rows_sum_does_not_depend_on_its_neighbours(device):
    codes, scales, _ = make_codes(13, COLUMNS, device)
    weight, weight_scales, _ = make_codes(WIDTH, COLUMNS, device)
    tuned = StreamConfig(16, 64, 128, 1, 4, 6)
    whole = stream_product(codes, scales, weight, weight_scales.view(-1), tuned, torch.bfloat16)
    few = stream_product(codes[:3], scales[:3], weight, weight_scales.view(-1), tuned, torch.bfloat16)
    assert torch.equal(few, whole[:3])


@hopper
def test_gating_and_sums_leave_quantized_codes(device):
    both, gain = torch.randn(33, 2 * WIDTH, device=device).bfloat16(), torch.ones(WIDTH, device=device).bfloat16()
    codes, scales = gate_and_quantize_rows(both, FP8, 0)
    gated = REFERENCE.silu_and_mul(both.double())
    assert ((codes.double() * scales - gated).abs() <= gated.abs().amax(-1, keepdim=True) / 27).all()
    parts, residual = torch.randn(3, 33, WIDTH, device=device), torch.randn(33, WIDTH, device=device).bfloat16()
    total = (residual.float() + parts[0] + parts[1] + parts[2]).bfloat16()
    codes, scales = add_parts_norm_and_quantize(parts, residual, gain, 1e-5, FP8)
    assert torch.equal(residual, total)
    normed = REFERENCE.rms_norm(total.double(), gain.double(), 1e-5)
    assert ((codes.double() * scales - normed).abs() <= normed.abs().amax(-1, keepdim=True) / 27).all()


COMPILE = """
import torch
from inferengine.kernels.cuda.gemm.w8a8_stream_hopper import StreamConfig, descriptors, stream_kernel

codes = torch.zeros(16, 1024, dtype=torch.float8_e4m3fn)
weight = torch.zeros(512, 1024, dtype=torch.float8_e4m3fn)
floats = torch.zeros(4096)
for gated, blocks in ((True, False), (False, True)):
    tuned = StreamConfig(16, 128, 128, 1, 4, 3)
    kernel = stream_kernel.warmup(
        *descriptors(codes, weight, tuned), floats, floats, floats, floats, codes if gated else floats, floats, 16,
        N=256 if gated else 512, CHUNK=1024, BLOCK_K=128, STAGES=3, PARTS=not gated, BLOCKS=blocks, ADD=False,
        BIAS=False, GATED=gated, ACTIVATION=0, CODES=gated, PDL=True, num_warps=4, launch_pdl=True, grid=(1,),
    )
    ptx = kernel.asm["ptx"]
    before_input, _, rest = ptx.partition("griddepcontrol.wait")
    print("cp.async.bulk.tensor" in before_input, "cp.async.bulk.tensor" in rest, "e4m3.e4m3" in rest)
"""


def test_the_kernel_compiles_for_hopper_and_loads_its_weight_before_it_waits(compile_program):
    done = compile_program(COMPILE)
    assert done.stdout.split() == ["True"] * 6, done.stderr[-2000:]
