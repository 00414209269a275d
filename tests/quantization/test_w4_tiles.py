"""4-bit weights times some rows, by tiles, in Triton's interpreter where there is no device, against float64."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.cuda.gemm.w4_layout import column_order
from inferengine.kernels.cuda.gemm.w4_tiles import W4TileConfig, in_word_order, nibble_tile_product
from inferengine.kernels.ops import REFERENCE
from inferengine.quantization import cuda
from inferengine.quantization.schemes import int4_groups
from inferengine.quantization.weight import dequantize
from tests.kernels.builders import make_scratch, relative_error

ROUNDED = 2e-3  # weights and results in fp16


def test_columns_of_x_come_in_the_order_of_the_words(device: torch.device) -> None:
    x = torch.arange(2 * 200, device=device).view(2, 200)
    expected = torch.nn.functional.pad(x, (0, 56)).view(2, 2, 128)[..., column_order().flatten().to(device)]
    assert torch.equal(in_word_order(x, 2, whole_slices=False), expected.reshape(2, 256))


@pytest.mark.parametrize("group", [32, 64, 128, 256, 10_000])
def test_groups_of_any_size_from_a_words_columns_on(group: int, device: torch.device) -> None:
    weight = int4_groups(torch.randn(40, 260, device=device), group)  # rows and columns are filled up
    x = torch.randn(5, 260, device=device).half()
    out = nibble_tile_product(x, cuda.pack(weight).weight, W4TileConfig(16, 32, 1, 4, 2), make_scratch(device))
    assert relative_error(out, x.double() @ dequantize(weight, torch.float64).t()) < ROUNDED


@pytest.mark.parametrize(
    ("tuned", "rows"),
    [
        (W4TileConfig(16, 32, 1, 4, 2), 33),  # tiles of x, the last one of one row
        (W4TileConfig(32, 64, 2, 4, 2), 20),  # two programs sum, more weight rows than there are
        (W4TileConfig(16, 32, 8, 4, 3), 16),  # more chunks than slices
    ],
)
def test_products_of_every_tiling_add_bias_and_residual(tuned: W4TileConfig, rows: int, device: torch.device) -> None:
    weight = int4_groups(torch.randn(48, 384, device=device))
    x, bias = torch.randn(rows, 384, device=device).half(), torch.randn(48, device=device).half()
    residual = torch.randn(rows, 48, device=device).half()
    expected = x.double() @ dequantize(weight, torch.float64).t() + bias.double() + residual.double()
    scratch = make_scratch(device)
    for _ in range(2):  # the counters are as they were
        out = residual.clone()
        assert nibble_tile_product(x, cuda.pack(weight).weight, tuned, scratch, bias=bias, residual=out) is out
        assert relative_error(out, expected) < ROUNDED


@pytest.mark.parametrize("rows", [16, 17, 128, 129])
def test_a_product_is_the_same_on_both_sides_of_each_change_of_kernel(rows: int, device: torch.device) -> None:
    weight = int4_groups(torch.randn(32, 256, device=device))
    x = torch.randn(rows, 256, device=device).half()
    products = cuda.CudaProducts(REFERENCE, lambda weight: weight, device)
    out = products.linear(x, cuda.pack(weight))
    assert relative_error(out, x.double() @ dequantize(weight, torch.float64).t()) < ROUNDED
