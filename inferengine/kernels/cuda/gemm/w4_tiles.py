"""Products of some rows with 4-bit weights, x [M, K] @ weight [N, K]^T, by tiles, in w4_layout.py's layout.

From about a dozen rows on reading x costs more than reading the weight, so x has to be shared: a program multiplies 64
or more weight rows with up to 128 rows of x. It takes a slice of 128 columns at a time, makes its codes into 16-bit
numbers and multiplies. The inner columns come in the order in which a word holds its codes, so x is put into that order
once, before. As in dense_small_m.py the inner dimension may be cut in chunks whose sums are
reduced in scratch memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.codes import nibble_numbers
from inferengine.kernels.cuda.dispatch import W4TileConfig
from inferengine.kernels.cuda.gemm.w4_layout import SLICE, NibbleWeight
from inferengine.kernels.cuda.mma import half_to_float
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch, store_part, sum_parts

MOST_PARTS = 4  # groups of 32 columns; smaller ones cut through a word


def in_word_order(x: torch.Tensor, slices: int, *, whole_slices: bool) -> torch.Tensor:
    """Reorder x [M, K] -> [M, slices * 128], zeros where x has none: the columns in the order of `column_order` or,
    where whole slices share a scale, those of the first nibble of each half word, then those of the second and so on.
    """
    rows = x.shape[0]
    if x.shape[1] != slices * SLICE:
        x = torch.nn.functional.pad(x, (0, slices * SLICE - x.shape[1]))
    # step, half, thread, pair, odd -> word = (thread, step), nibble = (odd, half, pair)
    order = (0, 1, 3, 5, 4, 2, 6) if whole_slices else (0, 1, 4, 2, 6, 3, 5)
    return x.reshape(rows, slices, 4, 2, 4, 2, 2).permute(order).reshape(rows, slices * SLICE)


def nibble_tile_product(
    x: torch.Tensor,
    weight: NibbleWeight,
    tuned: W4TileConfig,
    scratch: Scratch,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] of 16-bit numbers -> [M, N]. `residual` [M, N]: added in place and returned."""
    num_rows, width = x.shape[0], weight.rows
    out = x.new_empty(num_rows, width) if residual is None else residual
    if num_rows == 0:
        return out
    every_tile, slices = weight.words.shape[:2]
    x = in_word_order(x, slices, whole_slices=weight.parts == 1)
    m_tiles, n_tiles = triton.cdiv(num_rows, tuned.block_m), triton.cdiv(width, tuned.block_n)
    tiles = m_tiles * n_tiles
    splits = scratch.splits(min(tuned.chunks, slices), tiles, tuned.block_m * tuned.block_n)
    _nibble_kernel[(tiles, splits)](
        x,
        weight.words.view(torch.int16) if weight.parts == 1 else weight.words,
        weight.points,
        out if bias is None else bias,
        out,
        scratch.partial,
        scratch.arrived,
        num_rows,
        x.stride(0),
        out.stride(0),
        N=width,
        TILES=every_tile,
        SLICES=slices,
        PARTS=weight.parts,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        CHUNK=triton.cdiv(slices, splits),
        SPLITS=splits,
        ADD=residual is not None,
        BIAS=bias is not None,
        HARDWARE=x.is_cuda,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit
def _numbers(words, points, dtype: tl.constexpr):
    """[N, 16] words -> [N, 128] numbers, eight of each word side by side; `points` [N, 16]."""
    scale = half_to_float(points)
    zero = half_to_float(points >> 16)
    numbers = ()
    for nibble in tl.static_range(8):
        code = ((words >> (4 * nibble)) & 15).to(tl.float32)
        numbers += (((code - zero) * scale).to(dtype),)
    low = tl.join(tl.join(numbers[0], numbers[1]), tl.join(numbers[2], numbers[3]))
    high = tl.join(tl.join(numbers[4], numbers[5]), tl.join(numbers[6], numbers[7]))
    every = tl.permute(tl.join(low, high), [0, 1, 4, 3, 2])
    return tl.reshape(every, [words.shape[0], 128])


@triton.jit
def _whole(words, points, PLACE: tl.constexpr, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """The nibble at a place (0 to 3) of half words [N, 32], less the zero of `points` [N]: whole numbers."""
    zero = half_to_float(points >> 16)[:, None]
    if HARDWARE:
        HALF: tl.constexpr = dtype == tl.float16
        return nibble_numbers(words, PLACE, HALF) - (zero + (1024.0 if HALF else 128.0)).to(dtype)
    else:
        return (((words.to(tl.int32) >> (4 * PLACE)) & 15).to(tl.float32) - zero).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _nibble_kernel(
    x_ptr,
    words_ptr,
    points_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    TILES: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K], its columns in the order of the words, by a packed 4-bit weight -> out [M, N].

    Grid: (tiles of M and N, splits of K). A program sums its slices for a [BLOCK_N, BLOCK_M] tile; of several splits
    the last one to arrive adds up all and writes.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_id = tl.program_id(0)
    split = tl.program_id(1)
    n = tile_id % N_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_id // N_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = m < num_rows
    packed = tl.minimum(n // 16, TILES - 1).to(tl.int64) * SLICES  # rows past the end repeat others and are not stored
    j = tl.arange(0, 16)
    points_at = points_ptr + packed * (PARTS * 16) + n % 8 * 2 + n % 16 // 8
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride
    allow_next(PDL)
    wait_for_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = split * CHUNK
    if PARTS == 1:
        b = tl.arange(0, 32)
        halves_at = words_ptr + packed[:, None] * 512 + (n % 16 * 32)[:, None] + b[None, :]
        for part in range(begin, min(begin + CHUNK, SLICES)):
            words = tl.load(halves_at + part * 512)
            points = tl.load(points_at + part * 16)
            product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for place in tl.static_range(4):
                x = tl.load(x_at + (part * 128 + place * 32 + b)[:, None], mask=row_mask[None, :], other=0.0)
                product = tl.dot(_whole(words, points, place, x.dtype, HARDWARE), x, product)
            acc += product * half_to_float(points)[:, None]
    else:
        words_at = words_ptr + packed[:, None] * 256 + (n % 16 * 16)[:, None] + j[None, :]
        for part in range(begin, min(begin + CHUNK, SLICES)):
            words = tl.load(words_at + part * 256)
            points = tl.load(points_at[:, None] + part * (PARTS * 16) + (j % 4 * PARTS // 4 * 16)[None, :])
            x = tl.load(x_at + (part * 128 + tl.arange(0, 128))[:, None], mask=row_mask[None, :], other=0.0)
            acc = tl.dot(_numbers(words, points, x.dtype), x, acc)
    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        partial = partial_ptr + (tile_id * SPLITS).to(tl.int64) * SIZE + inner
        if not store_part(acc, partial, arrived_ptr + tile_id, split, SIZE, SPLITS):
            return
        acc = sum_parts(partial, SIZE, SPLITS)
    mask = row_mask[None, :] & (n < N)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    if ADD:
        acc += tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
