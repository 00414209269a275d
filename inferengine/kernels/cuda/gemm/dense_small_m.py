"""Matrix products whose cost is reading the weight: x [M, K] @ weight [N, K]^T for small M, with what surrounds them.

Two kernels. `_gemv_kernel` takes one row: it multiplies on the vector units, several weight rows per program, and can
norm its input on the way (the root mean square is a factor of the whole row, so it is applied at the end).
`_tile_kernel` takes any number of rows on the tensor cores with the weight as the left operand, so that 16 rows of x
fill a tile; the inner dimension may be cut in chunks that different programs sum (split-K), the last of which to arrive
adds them up in order. Both can add a residual, or gate: silu(x G^T) * (x U^T) with gate and up rows read side by side.

Both begin to read their weight before they wait for the kernel that writes x: the first tile into registers or shared
memory, the next ones into L2. Launched with programmatic dependence this keeps the memory busy across launches.

Chunks are summed in the same order whether one program does it or several, and a row's sum does not depend on M: with
a tiling that depends on N and K alone the result of a row is the same in any batch (deterministic mode).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.dispatch import GemvConfig, TileConfig
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch, store_part, sum_parts


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: GemvConfig,
    *,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [1, K] by weight [N, K] -> [1, N] (or [1, N / 2] when `gated` by an activation of activation.py).

    `gain` [K]: x is RMS-normed first. `residual` [1, N]: added in place and returned.
    """
    columns = weight.shape[1]
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    if out is None:
        out = residual if residual is not None else x.new_empty(1, width)
    prefetch = min(tuned.prefetch, columns - min(columns, tuned.block_k)) // 512 * 512
    _gemv_kernel[(triton.cdiv(width, tuned.block_n),)](
        x,
        x if gain is None else gain,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        N=width,
        K=columns,
        BLOCK_N=tuned.block_n,
        BLOCK_K=tuned.block_k,
        NORM=gain is not None,
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        PREFETCH=prefetch,
        LANES=tuned.num_warps * 32,
        EARLY=132 * 32 // tuned.num_warps,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: TileConfig,
    scratch: Scratch,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] by weight [N, K] -> [M, N], or [M, N / 2] when gated. `residual` [M, N] is added in place and
    returned."""
    num_rows, columns = x.shape
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    if out is None:
        out = residual if residual is not None else x.new_empty(num_rows, width)
    if num_rows == 0:
        return out
    m_tiles, n_tiles = triton.cdiv(num_rows, tuned.block_m), triton.cdiv(width, tuned.block_n)
    splits = 1  # one program sums the chunks: the same result
    if m_tiles == 1 and gated is None:
        splits = scratch.splits(tuned.chunks, n_tiles, tuned.block_m * tuned.block_n)
    chunk = triton.cdiv(triton.cdiv(columns, tuned.block_k), tuned.chunks) * tuned.block_k
    prefetch = min(tuned.prefetch, columns) // 512 * 512
    _tile_kernel[(m_tiles * n_tiles, splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
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
        CHUNKS=tuned.chunks,
        SPLITS=splits,
        EVEN_N=width % tuned.block_n == 0,
        EVEN_K=columns % (tuned.block_k * tuned.chunks) == 0,
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        PREFETCH=prefetch if width % tuned.block_n == 0 else 0,
        LANES=tuned.num_warps * 32,
        PRELOAD=tuned.preload,
        STAGES=tuned.num_stages,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit
def prefetch_rows(row_ptr, ROW_STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Have [ROWS, COLUMNS] 16-bit elements from `row_ptr` on brought into L2; every thread asks for one span."""
    PER_ROW: tl.constexpr = LANES // ROWS if LANES > ROWS else 1
    SPAN: tl.constexpr = COLUMNS // PER_ROW
    lane = tl.arange(0, PER_ROW * ROWS)
    at = row_ptr + (lane // PER_ROW).to(tl.int64) * ROW_STRIDE + (lane % PER_ROW) * SPAN
    span_bytes = tl.full([PER_ROW * ROWS], SPAN * 2, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), span_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _gemv_kernel(
    x_ptr,
    gain_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row x [K] by weight [N, K] -> out [N], on the vector units; with NORM of the normed x, with GATED
    weight [2 * N, K].

    Grid: (blocks of outputs,). A program computes BLOCK_N outputs and reads its first weights before it waits for x.
    """
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end repeat the last one and are not stored
    weight_at = weight_ptr + row[:, None] * K + k[None, :]
    mask = k[None, :] < K
    left = tl.load(weight_at, mask=mask, other=0.0)
    if GATED:
        right = tl.load(weight_at + N * K, mask=mask, other=0.0)
    if PDL and PREFETCH > 0:
        if (first + BLOCK_N <= N) & (tl.program_id(0) < EARLY):
            ahead = weight_ptr + first.to(tl.int64) * K + BLOCK_K
            prefetch_rows(ahead, K, BLOCK_N, PREFETCH, LANES)
            if GATED:
                prefetch_rows(ahead + N * K, K, BLOCK_N, PREFETCH, LANES)
    allow_next(PDL)
    wait_for_previous(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(gain_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        acc += left.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += right.to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            mask = start + BLOCK_K + k[None, :] < K
            left = tl.load(weight_at + start + BLOCK_K, mask=mask, other=0.0)
            if GATED:
                right = tl.load(weight_at + N * K + start + BLOCK_K, mask=mask, other=0.0)
    result = tl.sum(acc, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result = result * scale
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, axis=1)
        if NORM:
            up = up * scale
        if BIAS:
            up += tl.load(bias_ptr + N + row).to(tl.float32)
        result = gate(result, ACTIVATION) * up
    if ADD:
        result += tl.load(residual_ptr + row).to(tl.float32)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _sum_chunk(
    acc,
    acc_up,
    x_at,
    weight_at,
    row_mask,
    n_mask,
    k_begin,
    k_end,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the sum over inner columns [k_begin, k_end): weight [BLOCK_N, .] times x^T [., BLOCK_M]; of up rows too."""
    k = tl.arange(0, BLOCK_K)
    for start in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_at + start, mask=row_mask[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=row_mask[None, :] & (start + k < K)[:, None], other=0.0)
        if EVEN_N and EVEN_K:
            left = tl.load(weight_at + start)
        else:
            left = tl.load(weight_at + start, mask=n_mask[:, None] & (start + k < K)[None, :], other=0.0)
        acc = tl.dot(left, x, acc, input_precision="ieee")
        if GATED:
            if EVEN_N and EVEN_K:
                right = tl.load(weight_at + N * K + start)
            else:
                right = tl.load(weight_at + N * K + start, mask=n_mask[:, None] & (start + k < K)[None, :], other=0.0)
            acc_up = tl.dot(right, x, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
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
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PRELOAD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K] by weight [N, K] -> out [M, N] on the tensor cores; with GATED by weight [2 * N, K].

    Grid: (tiles of M and N, splits of K). A program sums its chunks of columns, in order, for a [BLOCK_N, BLOCK_M]
    tile; of several splits the last one to arrive adds up all and writes.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    M_GROUP: tl.constexpr = 8  # tiles of rows that walk the weight together, so that L2 serves it
    m_tiles = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    group = program // (M_GROUP * N_TILES)
    in_group = program % (M_GROUP * N_TILES)
    group_rows = tl.minimum(m_tiles - group * M_GROUP, M_GROUP)
    m_tile = group * M_GROUP + in_group % group_rows
    n_tile = in_group // group_rows
    split = tl.program_id(1)

    first = n_tile * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    k_begin = 0 if SPLITS == 1 else split * CHUNK
    if PDL and PREFETCH > 0:
        ahead = weight_ptr + first.to(tl.int64) * K + k_begin
        prefetch_rows(ahead, K, BLOCK_N, PREFETCH, LANES)
        if GATED:
            prefetch_rows(ahead + N * K, K, BLOCK_N, PREFETCH, LANES)
    allow_next(PDL)
    row_mask = m < num_rows
    n_mask = n < N
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PRELOAD:  # the weight's first tile is on its way while the input is still being made
        weight_mask = n_mask[:, None] & (k_begin + k < K)[None, :]
        left = tl.load(weight_at + k_begin, mask=weight_mask, other=0.0)
        if GATED:
            right = tl.load(weight_at + N * K + k_begin, mask=weight_mask, other=0.0)
        wait_for_previous(PDL)
        x = tl.load(x_at + k_begin, mask=row_mask[None, :] & (k_begin + k < K)[:, None], other=0.0)
        acc = tl.dot(left, x, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(right, x, acc_up, input_precision="ieee")
        k_begin += BLOCK_K
    else:
        wait_for_previous(PDL)

    if SPLITS == 1:
        acc, acc_up = _sum_chunk(
            acc, acc_up, x_at, weight_at, row_mask, n_mask, k_begin, min(CHUNK, K), N, K, BLOCK_K, EVEN_N, EVEN_K,
            GATED, STAGES,
        )  # fmt: skip
        for chunk in tl.static_range(1, CHUNKS):
            if chunk * CHUNK < K:
                zeros = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                more, more_up = _sum_chunk(
                    zeros, zeros, x_at, weight_at, row_mask, n_mask, chunk * CHUNK, min(chunk * CHUNK + CHUNK, K), N, K,
                    BLOCK_K, EVEN_N, EVEN_K, GATED, STAGES,
                )  # fmt: skip
                acc += more
                acc_up += more_up
    else:
        acc, acc_up = _sum_chunk(
            acc, acc_up, x_at, weight_at, row_mask, n_mask, k_begin, tl.minimum(split * CHUNK + CHUNK, K), N, K,
            BLOCK_K, EVEN_N, EVEN_K, GATED, STAGES,
        )  # fmt: skip
        tile: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        partial = partial_ptr + (n_tile * SPLITS).to(tl.int64) * tile + inner
        if not store_part(acc, partial, arrived_ptr + n_tile, split, tile, SPLITS):
            return
        acc = sum_parts(partial, tile, SPLITS)

    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            acc_up += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        acc = gate(acc, ACTIVATION) * acc_up
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = row_mask[None, :] & n_mask[:, None]
    if ADD:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
