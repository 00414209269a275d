"""4-bit weights in groups as the CUDA kernels hold them: ((codes - zeros) * scales), eight codes to an int32 word.

The words lie in the order in which mma instructions want them in the registers of their threads (w4_small_m.py,
w4_tiles.py). Beside them lies one int32 for each group of a row, its scale and zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 16  # weight rows that lie together
SLICE = 128  # columns of a row that lie together
WORDS = 16  # of a slice


class NibbleWeight(NamedTuple):
    """`words` [tiles, slices, 16 rows, 16] int32. `points` [tiles, slices * parts, 8, 2] int32: fp16 scale below, fp16
    zero above, of rows r and r + 8 in the 128 / parts columns that share them. Tiles and slices are filled up."""

    words: torch.Tensor
    points: torch.Tensor
    rows: int
    columns: int

    @property
    def parts(self) -> int:
        """Groups of a slice of 128 columns that have a scale each."""
        return self.points.shape[1] // self.words.shape[1]


def column_order() -> torch.Tensor:
    """Return [16, 8]: the column of the slice that nibble i of word j holds. The low and the high half of a word make
    pairs of neighbouring columns. Word 4 t + s belongs to thread t of four, who together multiply 16 columns in an
    instruction."""
    word, nibble = torch.arange(WORDS)[:, None], torch.arange(8)[None, :]
    thread, step, pair, odd = word // 4, word % 4, nibble % 4, nibble // 4
    return step * 32 + pair // 2 * 16 + thread * 4 + pair % 2 * 2 + odd


def pack_nibbles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> NibbleWeight:
    """Pack codes [N, K] uint8 below 16, scales and zeros [N, ceil(K / group)]. `group`: 16, 32, 64, a multiple of 128,
    or at least K."""
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % SLICE, 0, -rows % TILE))
    tiles, slices = padded.shape[0] // TILE, padded.shape[1] // SLICE
    order = column_order().flatten().to(codes.device)
    lanes = padded.view(tiles, TILE, slices, SLICE).transpose(1, 2)[..., order].unflatten(-1, (WORDS, 8))
    words = torch.zeros(tiles, slices, TILE, WORDS, dtype=torch.int32, device=codes.device)
    for nibble in range(8):
        words |= lanes[..., nibble].to(torch.int32) << (4 * nibble)
    part = min(group, SLICE)
    of_group = torch.arange(slices * (SLICE // part), device=codes.device) * part // group
    of_group = of_group.clamp_(max=scales.shape[1] - 1)  # what fills up a slice has any scale
    low = scales.half()[:, of_group].view(torch.int16).to(torch.int32) & 0xFFFF
    high = zeros.half()[:, of_group].view(torch.int16).to(torch.int32) << 16
    points = torch.nn.functional.pad(low | high, (0, 0, 0, -rows % TILE))
    return NibbleWeight(words, points.view(tiles, 2, 8, -1).permute(0, 3, 2, 1).contiguous(), rows, columns)


def to_numbers(weight: NibbleWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize the weight to [N, K], for products of so many rows that this costs little beside them."""
    tiles, slices = weight.words.shape[:2]
    out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.words.device)
    _numbers_kernel[(tiles, slices)](
        weight.words, weight.points, out, N=weight.rows, K=weight.columns, SLICES=slices, PARTS=weight.parts
    )
    return out


@triton.jit
def _numbers_kernel(
    words_ptr,
    points_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Dequantize packed 4-bit codes to out [N, K]. Grid: (tiles of 16 rows, slices of 128 columns). A program writes
    one tile's slice."""
    tile = tl.program_id(0).to(tl.int64)
    part = tile * SLICES + tl.program_id(1)
    row = tl.arange(0, 16)
    column = tl.arange(0, 128)
    inside = column % 32  # where column_order has it
    word = inside % 16 // 4 * 4 + column // 32
    nibble = inside // 16 * 2 + inside % 4 // 2 + inside % 2 * 4
    words = tl.load(words_ptr + part * 256 + row[:, None] * 16 + word[None, :])
    points_at = points_ptr + part * (PARTS * 16) + (row % 8 * 2 + row // 8)[:, None]
    points = tl.load(points_at + (column // (128 // PARTS) * 16)[None, :])
    scale = (points & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (points >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    number = (((words >> (4 * nibble)[None, :]) & 15).to(tl.float32) - zero) * scale
    n = tile * 16 + row[:, None]
    k = tl.program_id(1) * 128 + column[None, :]
    tl.store(out_ptr + n * K + k, number.to(out_ptr.dtype.element_ty), mask=(n < N) & (k < K))
