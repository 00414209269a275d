"""The block formats of GGUF files: read and multiplied, against the reference in numpy of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from inferengine.kernels.block_codes import FORMATS, BlockWeight, gather, multiply, numbers, read_blocks, stack
from inferengine.kernels.cuda.dispatch import BlockTileConfig
from inferengine.kernels.cuda.gemm import block_tiles
from inferengine.kernels.ops import REFERENCE
from inferengine.quantization.gguf import BlockProducts, PackedBlocks
from tests.kernels.builders import make_scratch, relative_error
from tests.models.gguf_files import random_blocks

ROWS = 37  # no multiple of a tile
WIDTHS = [(name, columns) for name in FORMATS for columns in (512, 96) if columns % FORMATS[name].block == 0]


def make(name: str, columns: int, device: torch.device | None = None) -> tuple[BlockWeight, torch.Tensor]:
    """Return a weight in planes, and its numbers by the package."""
    raw = random_blocks(name, ROWS, columns, seed=len(name) + columns)
    expected = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name]))
    codes = read_blocks(name, torch.from_numpy(raw))
    return (codes if device is None else codes.tensors(lambda plane: plane.to(device))), expected


@pytest.mark.parametrize(("name", "columns"), WIDTHS)
def test_numbers_are_the_references_bit_by_bit(name: str, columns: int) -> None:
    codes, expected = make(name, columns)
    assert codes.shape == (ROWS, columns)
    assert torch.equal(numbers(codes, 0, ROWS).view(torch.int32), expected.view(torch.int32))
    assert torch.equal(gather(codes, torch.tensor([5, 0, 36])), expected[[5, 0, 36]])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
def test_planes_take_no_more_than_the_file_and_a_little(name: str) -> None:
    codes, _ = make(name, 512)
    held = sum(plane.nbytes for plane in codes if isinstance(plane, torch.Tensor))
    assert held <= 1.03 * ROWS * 512 * FORMATS[name].num_bytes / FORMATS[name].block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_multiplies_tile_by_tile(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.kernels.block_codes.TILE_VALUES", 5 * 512)  # five rows at a time
    codes, expected = make("Q6_K", 512)
    x = torch.randn(3, 512).to(dtype)
    out = multiply(x, codes)
    assert out.dtype == dtype
    assert relative_error(out, x.double() @ expected.double().t()) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("name", "columns"), WIDTHS)
def test_kernels_dequantize_rows_and_all(name: str, columns: int, device: torch.device) -> None:
    codes, expected = make(name, columns, device)
    arranged = block_tiles.arrange(codes)
    assert torch.equal(block_tiles.to_numbers(arranged, torch.float32).cpu(), expected)
    ids = torch.tensor([5, 0, 36], device=device)
    assert torch.equal(block_tiles.gather(arranged, ids, torch.float32).cpu(), expected[[5, 0, 36]])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize(
    ("tuned", "rows", "dtype"),
    [
        (BlockTileConfig(1, 16, 2, 4, 2), 1, torch.float32),  # the vector units; two programs sum
        (BlockTileConfig(16, 32, 2, 4, 2), 5, torch.float32),  # the tensor cores
        (BlockTileConfig(16, 32, 1, 4, 2), 20, torch.float16),  # tiles of x
    ],
)
def test_kernels_multiply_into_a_part_of_a_result(
    name: str, tuned: BlockTileConfig, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    codes, expected = make(name, 512, device)
    x, out = torch.randn(rows, 512).to(device, dtype), torch.randn(rows, 50).to(device, dtype)
    bias = torch.randn(ROWS).to(device, dtype)
    wanted = out.double().clone()
    wanted[:, 4:41] += x.double() @ expected.double().t().to(device) + bias.double()
    scratch = make_scratch(device)
    block_tiles.block_product(
        x, block_tiles.arrange(codes), tuned, scratch, out=out[:, 4:41], bias=bias, add=True
    )  # fmt: skip
    assert relative_error(out, wanted) < (1e-5 if dtype == torch.float32 else 2e-3)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("rows", [1, 16, 33, 65])
def test_a_weight_of_several_formats_is_one_product(rows: int, device: torch.device) -> None:
    (low, one), (high, other) = make("Q4_K", 512, device), make("Q6_K", 512, device)
    plain = torch.randn(8, 512, device=device).half()
    expected = torch.cat((one, other, plain.float().cpu())).double().to(device)
    products = BlockProducts(REFERENCE, device)
    products.kernels, products.scratch = block_tiles, make_scratch(device)
    arranged = [block_tiles.arrange(stack([each])) for each in (low, high)]
    weight = PackedBlocks((*arranged, plain), torch.float16)
    x, residual = torch.randn(rows, 512, device=device).half(), torch.randn(rows, 82, device=device).half()
    wanted = x.double() @ expected.t()
    assert relative_error(products.linear(x, weight), wanted) < 2e-3
    added = products.linear_add(x, weight, None, residual.clone())
    assert relative_error(added, wanted + residual.double()) < 2e-3


def test_random_blocks_of_tests_hold_every_code() -> None:
    assert len(np.unique(random_blocks("Q4_K", ROWS, 512, seed=0)[:, 16:144])) == 256
