"""Products with 4-bit weights on the CUDA path, in Triton's interpreter where there is no device, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inferengine.kernels.cuda.gemm.w4_layout import column_order, pack_nibbles, to_numbers
from inferengine.kernels.cuda.gemm.w4_small_m import W4SmallMConfig, small_m_product
from inferengine.kernels.ops import REFERENCE
from inferengine.quantization import cuda
from inferengine.quantization.schemes import int4_groups
from inferengine.quantization.weight import QuantizedWeight, dequantize

ROUNDED = 1e-2  # results in bf16, which the interpreter cuts off where a device rounds


@pytest.fixture
def products(device: torch.device) -> Callable[..., cuda.CudaProducts]:
    return lambda **options: cuda.CudaProducts(REFERENCE, lambda weight: weight, device, **options)


def exact(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ dequantize(weight._replace(scales=weight.scales.double()), torch.float64).t()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_codes_lie_where_the_columns_say(device: torch.device) -> None:
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8, device=device)
    ones = torch.ones(16, 1, device=device)
    words = pack_nibbles(codes, ones, ones, 128).words[0, 0]
    nibbles = (words[..., None] >> (4 * torch.arange(8, device=device))) & 15
    assert torch.equal(nibbles.to(torch.uint8), codes[:, column_order().to(device)])
    assert sorted(column_order().flatten().tolist()) == list(range(128))


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 10_000])
def test_groups_of_any_supported_size(
    group: int, products: Callable[..., cuda.CudaProducts], device: torch.device
) -> None:
    weight = int4_groups(torch.randn(16, 260, device=device), group)  # the last slice is filled up
    packed = cuda.pack(weight)
    x = torch.randn(97, 260, device=device)
    close(products().linear(x[:1], packed), exact(weight, x[:1]))
    close(products().linear(x, packed), exact(weight, x))  # dequantized


@pytest.mark.parametrize(
    ("tuned", "dtype", "rows"),
    [
        (W4SmallMConfig(1, 1, 1), torch.bfloat16, 3),  # one warp: a pass for each slice
        (W4SmallMConfig(2, 1, 2), torch.float16, 1),  # two tiles of weight rows, and a last pass with nothing to load
        (W4SmallMConfig(1, 4, 2), torch.float16, 3),  # warps with nothing to do
        (W4SmallMConfig(1, 2, 2, row_blocks=1), torch.bfloat16, 9),  # a program for every eight rows of x
        (W4SmallMConfig(1, 4, 1), torch.bfloat16, 9),  # one for two blocks of eight
    ],
)
def test_products_of_every_tiling_equal_the_definition(
    tuned: W4SmallMConfig, dtype: torch.dtype, rows: int, device: torch.device
) -> None:
    width = 12 if tuned.tiles == 1 else 28
    weight = int4_groups(torch.randn(width, 261, device=device))  # odd: rows and columns are filled up
    packed = pack_nibbles(weight.codes, weight.scales, weight.zeros, 128)
    x = torch.randn(rows, 261, device=device).to(dtype)
    residual = torch.randn(rows, width, device=device)  # float32, to see more than 16 bits of the sum
    expected = residual.double() + exact(weight, x)
    assert small_m_product(x, packed, tuned, residual=residual) is residual
    close(residual, expected)


def test_numbers_are_the_weight_as_it_was(device: torch.device) -> None:
    weight = int4_groups(torch.randn(21, 200, device=device), 32)
    assert torch.equal(to_numbers(cuda.pack(weight).weight, torch.float32), dequantize(weight))


@pytest.mark.parametrize("rows", [1, 3])
def test_norm_gate_bias_and_residual_around_a_product(
    rows: int, products: Callable[..., cuda.CudaProducts], device: torch.device
) -> None:
    weight = int4_groups(torch.randn(32, 136, device=device))
    ours, packed = products(), cuda.pack(weight)
    x, bias = torch.randn(rows, 136, device=device).bfloat16(), torch.randn(32, device=device).bfloat16()
    gain = (torch.rand(136, device=device) + 0.5).bfloat16()
    product = exact(weight, normed(x, gain)) + bias.double()
    close(ours.norm_linear(x, gain, 1e-5, packed, bias), product, ROUNDED)
    gate, up = product.chunk(2, -1)
    close(ours.norm_gated_linear(x, gain, 1e-5, packed, bias), torch.nn.functional.silu(gate) * up, 2 * ROUNDED)
    residual = torch.randn(rows, 32, device=device).bfloat16()
    expected = residual.double() + exact(weight, x) + bias.double()
    assert ours.linear_add(x, packed, bias, residual) is residual
    close(residual, expected, ROUNDED)


def test_float32_keeps_its_24_bits(products: Callable[..., cuda.CudaProducts], device: torch.device) -> None:
    weight = int4_groups(torch.randn(16, 128, device=device))
    x, bias, residual = (torch.randn(2, width, device=device) for width in (128, 16, 16))
    expected = residual.double() + exact(weight, x) + bias[0].double()
    close(products().linear_add(x, cuda.pack(weight), bias[0], residual), expected, 2e-6)


def test_deterministic_rows_do_not_depend_on_their_neighbours(
    products: Callable[..., cuda.CudaProducts], device: torch.device
) -> None:
    packed = cuda.pack(int4_groups(torch.randn(16, 136, device=device)))
    x = torch.randn(9, 136, device=device).bfloat16()
    ours = products(deterministic=True)
    whole = ours.linear(x, packed)
    for rows in (1, 3):
        assert torch.equal(ours.linear(x[:rows].contiguous(), packed), whole[:rows])
