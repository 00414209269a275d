"""Matrix products with 8-bit weights: x [M, K] @ (codes [N, K] * scales)^T, made into numbers in registers.

Codes are e4m3 or int8. Scales are of whole rows (applied to the sum), or of blocks of 128 columns. As in
dense_small_m.py, one kernel takes a single row on the vector units and can gate or add a residual; the other takes a
few rows, numbers or codes themselves, on the tensor cores and may cut the inner dimension in chunks that are reduced in
scratch memory. Both begin to read their weight before they wait for the kernel that writes x. For many rows see
quantization/cuda.py.

The vector kernel is bound by its arithmetic before it is by memory, so its input comes normed: norming it again in
every program costs more than a kernel of its own. And a thread reads eight neighbours of x and of each weight row, so
that x need not be handed from thread to thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.codes import byte_numbers
from inferengine.kernels.cuda.dispatch import W8GemvConfig, W8TileConfig
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch, store_part, sum_parts

ROW, BLOCKS = 0, 1  # what shares a scale: a whole row; 128 columns of `block_rows` rows
BLOCK_COLUMNS = 128


class ByteWeight(NamedTuple):
    """8-bit codes [N, K] and fp32 scales: [N] by row, or [ceil(N / block_rows), ceil(K / 128)]."""

    codes: torch.Tensor
    scales: torch.Tensor
    block_rows: int = 0  # 0: scales are by row


def vector_product(
    x: torch.Tensor,
    weight: ByteWeight,
    tuned: W8GemvConfig,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """Multiply x [1, K] -> [1, N], or [1, N / 2] when gated by an activation of activation.py. `residual` [1, N]: added
    in place and returned."""
    rows, columns = weight.codes.shape
    width = rows if gated is None else rows // 2
    out = residual if residual is not None else x.new_empty(1, width)
    _vector_kernel[(triton.cdiv(width, tuned.block_n),)](
        x,
        weight.codes,
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        N=width,
        K=columns,
        BLOCK_N=tuned.block_n,
        BLOCK_K=tuned.block_k,
        SCALES=BLOCKS if weight.block_rows else ROW,
        BLOCK_ROWS=max(1, weight.block_rows),
        GRID=weight.scales.shape[-1],
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def tile_product(
    x: torch.Tensor,
    weight: ByteWeight,
    tuned: W8TileConfig,
    scratch: Scratch,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    input_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] -> [M, N] of `dtype`, x's where there is none. `residual` [M, N] is added in place and
    returned. With `input_scales` [M, 1] fp32 x holds codes of the weight's own number format."""
    num_rows, columns = x.shape
    width = weight.codes.shape[0]
    out = residual if residual is not None else x.new_empty(num_rows, width, dtype=dtype or x.dtype)
    if num_rows == 0:
        return out
    m_tiles, n_tiles = triton.cdiv(num_rows, tuned.block_m), triton.cdiv(width, tuned.block_n)
    tiles = m_tiles * n_tiles
    splits = scratch.splits(tuned.chunks, tiles, tuned.block_m * tuned.block_n)
    chunk = triton.cdiv(triton.cdiv(columns, tuned.block_k), splits) * tuned.block_k
    _tile_kernel[(tiles, splits)](
        x,
        weight.codes,
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        weight.scales if input_scales is None else input_scales,
        out,
        scratch.partial,
        scratch.arrived,
        num_rows,
        x.stride(0),
        out.stride(0),
        N=width,
        K=columns,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        BLOCK_K=tuned.block_k,
        CHUNK=chunk,
        SPLITS=splits,
        SCALES=BLOCKS if weight.block_rows else ROW,
        BLOCK_ROWS=max(1, weight.block_rows),
        GRID=weight.scales.shape[-1],
        ADD=residual is not None,
        BIAS=bias is not None,
        CODES=input_scales is not None,
        HARDWARE=x.is_cuda,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit
def _scaled(
    x,
    scale_ptr,
    row,
    first,
    column,
    BLOCK_ROWS: tl.constexpr,
    GRID: tl.constexpr,
    SHARED: tl.constexpr,
):
    """x times the scales of its columns' blocks, to broadcast against rows: once where all rows share their blocks."""
    if SHARED:
        return (x * tl.load(scale_ptr + first // BLOCK_ROWS * GRID + column))[None, :]
    else:
        return x[None, :] * tl.load(scale_ptr + (row // BLOCK_ROWS)[:, None] * GRID + column[None, :])


@triton.jit
def _number(codes):
    """Codes as float32. An int8 code c becomes the low byte of 2^23, as c + 128: faster than to convert it."""
    if codes.dtype == tl.int8:
        return (((codes.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True)) - 8388736.0
    else:
        return codes.to(tl.float32)


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GRID: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row x [K] by 8-bit codes [N, K], with GATED [2 * N, K], -> out [N], on the vector units. Grid:
    (blocks of outputs,). A program computes BLOCK_N outputs and reads its first codes before it waits for x."""
    SHARED: tl.constexpr = BLOCK_ROWS % BLOCK_N == 0 and N % BLOCK_N == 0
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end repeat the last one and are not stored
    weight_at = weight_ptr + row[:, None] * K + tl.max_contiguous(k, 8)[None, :]
    mask = k[None, :] < K
    left = tl.load(weight_at, mask=mask, other=0.0)
    if GATED:
        right = tl.load(weight_at + N * K, mask=mask, other=0.0)
    allow_next(PDL)
    wait_for_previous(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if SCALES == 0:
            acc += _number(left) * x[None, :]
            if GATED:
                acc_up += _number(right) * x[None, :]
        else:
            column = tl.minimum(start + k, K - 1) // 128
            acc += _number(left) * _scaled(x, scale_ptr, row, first, column, BLOCK_ROWS, GRID, SHARED)
            if GATED:
                up_x = _scaled(x, scale_ptr, row + N, first + N, column, BLOCK_ROWS, GRID, SHARED)
                acc_up += _number(right) * up_x
        if start + BLOCK_K < K:
            mask = start + BLOCK_K + k[None, :] < K
            left = tl.load(weight_at + start + BLOCK_K, mask=mask, other=0.0)
            if GATED:
                right = tl.load(weight_at + N * K + start + BLOCK_K, mask=mask, other=0.0)
    result = tl.sum(acc, axis=1)
    if SCALES == 0:
        result = result * tl.load(scale_ptr + row)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, axis=1)
        if SCALES == 0:
            up = up * tl.load(scale_ptr + N + row)
        if BIAS:
            up += tl.load(bias_ptr + N + row).to(tl.float32)
        result = gate(result, ACTIVATION) * up
    if ADD:
        result += tl.load(residual_ptr + row).to(tl.float32)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _tile_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    input_scale_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GRID: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    CODES: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K] by 8-bit codes [N, K] -> out [M, N] on the tensor cores.

    Grid: (tiles of M and N, splits of K). A program sums CHUNK columns for a [BLOCK_N, BLOCK_M] tile; of several splits
    the last one to arrive adds up all and writes.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (CHUNK * SPLITS) == 0
    tile_id = tl.program_id(0)
    m_tile = tile_id // N_TILES
    n_tile = tile_id % N_TILES
    split = tl.program_id(1)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1).to(tl.int64)
    row_mask = m < num_rows
    n_mask = n < N
    allow_next(PDL)
    wait_for_previous(PDL)
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    weight_at = weight_ptr + row[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = split * CHUNK
    for start in range(begin, min(begin + CHUNK, K), BLOCK_K):
        if EVEN:
            codes = tl.load(weight_at + start)
            x = tl.load(x_at + start, mask=row_mask[None, :], other=0.0)
        else:
            codes = tl.load(weight_at + start, mask=(start + k < K)[None, :], other=0.0)
            x = tl.load(x_at + start, mask=row_mask[None, :] & (start + k < K)[:, None], other=0.0)
        if SCALES == 0:
            acc = tl.dot(byte_numbers(codes, x.dtype, HARDWARE), x, acc, input_precision="ieee")
        else:
            block = tl.load(scale_ptr + row // BLOCK_ROWS * GRID + start // 128)
            acc += (
                tl.dot(byte_numbers(codes, x.dtype, HARDWARE), x, out_dtype=tl.float32, input_precision="ieee")
                * block[:, None]
            )

    if SPLITS > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        partial = partial_ptr + (tile_id * SPLITS).to(tl.int64) * TILE + inner
        if not store_part(acc, partial, arrived_ptr + tile_id, split, TILE, SPLITS):
            return
        acc = sum_parts(partial, TILE, SPLITS)
    if SCALES == 0:
        acc = acc * tl.load(scale_ptr + row)[:, None]
    if CODES:
        acc = acc * tl.load(input_scale_ptr + m, mask=row_mask, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = row_mask[None, :] & n_mask[:, None]
    if ADD:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
