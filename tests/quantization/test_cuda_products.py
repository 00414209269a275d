"""The CUDA path (in Triton's interpreter where there is no device) against the same codes as numbers, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferengine.kernels.cuda.gemm.quantize_activations import quantize_rows
from inferengine.kernels.ops import REFERENCE
from inferengine.quantization import cuda
from inferengine.quantization.schemes import MADE
from inferengine.quantization.weight import QuantizedWeight, dequantize, stack

SCHEMES = sorted(MADE)
BYTES = [scheme for scheme in SCHEMES if scheme != "int4"]  # 4-bit weights have a kernel of their own: see below
WIDTH, COLUMNS = 96, 272  # neither is a multiple of a tile or of a block


def products(device: torch.device, **options: Any) -> cuda.CudaProducts:
    return cuda.CudaProducts(REFERENCE, lambda weight: weight, device, **options)


def exact(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ dequantize(weight._replace(scales=weight.scales.double()), torch.float64).t()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("scheme", BYTES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_product_of_few_rows(scheme: str, rows: int, device: torch.device) -> None:
    weight = MADE[scheme](torch.randn(WIDTH, COLUMNS, device=device))
    x, bias = torch.randn(rows, COLUMNS, device=device), torch.randn(WIDTH, device=device)
    found = products(device).linear(x, cuda.pack(weight), bias)
    close(found, exact(weight, x) + bias.double())


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_norm_gate_and_residual_around_a_product(scheme: str, rows: int, device: torch.device) -> None:
    weight = MADE[scheme](torch.randn(WIDTH, COLUMNS, device=device))
    x, gain = torch.randn(rows, COLUMNS, device=device), torch.rand(COLUMNS, device=device) + 0.5
    residual = torch.randn(rows, WIDTH, device=device)
    ours, packed = products(device), cuda.pack(weight)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
    product = exact(weight, normed)
    close(ours.norm_linear(x, gain, 1e-5, packed), product)
    gate, up = product.chunk(2, -1)
    close(ours.norm_gated_linear(x, gain, 1e-5, packed), torch.nn.functional.silu(gate) * up)
    expected = residual.double() + exact(weight, x)
    summed = ours.linear_add(x, packed, None, residual)
    assert summed.data_ptr() == residual.data_ptr()
    close(summed, expected)


@pytest.mark.parametrize("scheme", ["fp8_block", "int8", "int4"])
def test_many_rows_are_multiplied_by_the_dequantized_weight(scheme: str, device: torch.device) -> None:
    weight = MADE[scheme](torch.randn(WIDTH, COLUMNS, device=device))
    x = torch.randn(260, COLUMNS, device=device)
    close(products(device).linear(x, cuda.pack(weight)), exact(weight, x))


def test_a_seam_inside_a_block_of_rows(device: torch.device) -> None:
    parts = [MADE["fp8_block"](torch.randn(rows, COLUMNS, device=device)) for rows in (80, 144, 32)]
    weight = stack(parts)
    for rows in (1, 6):
        x = torch.randn(rows, COLUMNS, device=device)
        expected = torch.cat([exact(part, x) for part in parts], -1)
        close(products(device).linear(x, cuda.pack(weight)), expected)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_deterministic_products_do_not_depend_on_the_number_of_rows(scheme: str, device: torch.device) -> None:
    packed = cuda.pack(MADE[scheme](torch.randn(WIDTH, COLUMNS, device=device)))
    x = torch.randn(70, COLUMNS, device=device)
    ours = products(device, deterministic=True)
    whole = ours.linear(x, packed)
    for rows in (1, 17):
        assert torch.equal(ours.linear(x[:rows].contiguous(), packed), whole[:rows])


FP8_ROUNDS = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: Triton's interpreter drops the carry when it rounds to e4m3",
)


@pytest.mark.parametrize("dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=FP8_ROUNDS)])
def test_rows_are_rounded_with_a_scale_each(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 200, device=device) * torch.logspace(-3, 3, 5, device=device)[:, None]
    gain = torch.rand(200, device=device)
    codes, scales = quantize_rows(x, dtype)
    step = 1 / 253 if dtype == torch.int8 else 1 / 27
    assert ((codes.float() * scales - x).abs() <= step * x.abs().amax(-1, keepdim=True)).all()
    codes, scales = quantize_rows(x, dtype, gain, 1e-6)
    normed = REFERENCE.rms_norm(x, gain, 1e-6)
    assert ((codes.float() * scales - normed).abs() <= 1.01 * step * normed.abs().amax(-1, keepdim=True)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_in_bfloat16_on_the_device(scheme: str, rows: int, device: torch.device) -> None:
    weight = MADE[scheme](torch.randn(1536, 1024, device=device))
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)
    found = products(device).linear(x, cuda.pack(weight))
    rounded = rows > 1 and scheme in ("fp8", "fp8_tensor", "int8_w8a8")
    close(found, exact(weight, x), 0.05 if rounded else 0.01)
