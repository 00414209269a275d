"""Products with the block formats of GGUF files: x [M, K] times a weight that is dequantized in registers.

Few rows: one kernel takes the weight's codes in groups of 32 columns, makes numbers of x's type of them and multiplies
on the tensor cores, a single row on the vector units. The inner dimension may be cut in parts that are reduced in
scratch memory. Many rows: `to_numbers` dequantizes the weight, and the library multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.block_codes import SUPERBLOCK, BlockWeight
from inferengine.kernels.cuda.dispatch import BlockTileConfig
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch, store_part, sum_parts

GROUP = 32  # columns of a step


def arrange(weight: BlockWeight) -> BlockWeight:
    """Return the weight as the kernels read it: scales and mins transposed, [groups, N]."""

    def turned(plane: torch.Tensor | None) -> torch.Tensor | None:
        return None if plane is None else plane.t().contiguous()

    return weight._replace(
        low=weight.low.contiguous(),
        scales=weight.scales.t().contiguous(),
        mins=turned(weight.mins),
        sub_scales=turned(weight.sub_scales),
        sub_mins=turned(weight.sub_mins),
    )


def block_product(
    x: torch.Tensor,
    weight: BlockWeight,
    tuned: BlockTileConfig,
    scratch: Scratch,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """Multiply x [M, K] -> `out` [M, N], whose rows may lie apart; `add`: the product is added to it. `weight` is as
    `arrange` left it."""
    num_rows = x.shape[0]
    width, columns = weight.shape
    step = SUPERBLOCK if columns % SUPERBLOCK == 0 else GROUP
    tiles = triton.cdiv(num_rows, tuned.block_m) * triton.cdiv(width, tuned.block_n)
    steps = columns // step
    wanted = max(1, min(tuned.splits, steps))
    splits = scratch.splits(wanted, tiles, tuned.block_m * tuned.block_n) if wanted > 1 else 1
    _product_kernel[(tiles, splits)](
        x,
        *planes_of(weight),
        x if bias is None else bias,
        out,
        scratch.partial,
        scratch.arrived,
        num_rows,
        x.stride(0),
        out.stride(0),
        N=width,
        K=columns,
        STEP=step,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        CHUNK=triton.cdiv(steps, splits) * step,
        SPLITS=splits,
        BITS=weight.bits,
        WIDE=weight.group == GROUP,
        OFFSET=weight.offset,
        SUBS=weight.sub_scales is not None,
        MINS=weight.mins is not None,
        ADD=add,
        BIAS=bias is not None,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def to_numbers(weight: BlockWeight, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize the weight, as `arrange` left it, to [N, K]."""
    width, columns = weight.shape
    out = torch.empty(width, columns, dtype=dtype, device=weight.low.device) if out is None else out
    step, rows = SUPERBLOCK if columns % SUPERBLOCK == 0 else GROUP, 32
    _numbers_kernel[(triton.cdiv(width, rows), columns // step)](
        *planes_of(weight),
        weight.low,
        out,
        N=width,
        K=columns,
        STEP=step,
        ROWS=rows,
        **constants_of(weight),
        GATHER=False,
    )
    return out


def gather(weight: BlockWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `ids` [T] of the weight, as `arrange` left it, as numbers [T, K]."""
    width, columns = weight.shape
    out = torch.empty(len(ids), columns, dtype=dtype, device=weight.low.device)
    step = SUPERBLOCK if columns % SUPERBLOCK == 0 else GROUP
    _numbers_kernel[(len(ids), columns // step)](
        *planes_of(weight), ids, out, N=width, K=columns, STEP=step, ROWS=1, **constants_of(weight), GATHER=True
    )
    return out


def planes_of(weight: BlockWeight) -> tuple[torch.Tensor, ...]:
    """The planes; the low one in place of those that are missing."""
    named = (weight.low, weight.high, weight.scales, weight.mins, weight.sub_scales, weight.sub_mins)
    return tuple(weight.low if plane is None else plane for plane in named)


def constants_of(weight: BlockWeight) -> dict[str, int | bool]:
    return {
        "BITS": weight.bits,
        "WIDE": weight.group == GROUP,
        "OFFSET": weight.offset,
        "SUBS": weight.sub_scales is not None,
        "MINS": weight.mins is not None,
    }


@triton.jit
def _float_of(codes, OFFSET: tl.constexpr):
    """Codes below 2^23 as fp32, less the offset: as the low bits of 2^23, which is faster than to convert them."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _scale_of(scale_ptr, sub_ptr, row, group, N: tl.constexpr, SUBS: tl.constexpr, EACH: tl.constexpr):
    """Scale or min of a group of each row [ROWS]; a block has EACH groups where there are small integers beside it."""
    if SUBS:
        whole = tl.load(scale_ptr + (group // EACH).to(tl.int64) * N + row).to(tl.float32)
        return whole * tl.load(sub_ptr + group.to(tl.int64) * N + row).to(tl.float32)
    else:
        return tl.load(scale_ptr + group.to(tl.int64) * N + row).to(tl.float32)


@triton.jit
def _group_numbers(
    codes,
    scale_ptr,
    min_ptr,
    sub_scale_ptr,
    sub_min_ptr,
    row,
    group,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    SUBS: tl.constexpr,
    MINS: tl.constexpr,
):
    """Numbers of the 32 columns of a group: codes [ROWS, 32] int32, fp32 after."""
    if WIDE:
        scale = _scale_of(scale_ptr, sub_scale_ptr, row, group, N, SUBS, 8)[:, None]
    else:
        left = _scale_of(scale_ptr, sub_scale_ptr, row, 2 * group, N, SUBS, 16)
        right = _scale_of(scale_ptr, sub_scale_ptr, row, 2 * group + 1, N, SUBS, 16)
        scale = tl.where(tl.arange(0, 32)[None, :] < 16, left[:, None], right[:, None])
    result = _float_of(codes, OFFSET) * scale
    if MINS:
        result -= _scale_of(min_ptr, sub_min_ptr, row, group, N, SUBS, 8)[:, None]
    return result


@triton.jit
def _codes_of(low, high, BITS: tl.constexpr, PART: tl.constexpr):
    """Codes of the 32 columns of group PART of a superblock, of the bytes that hold them."""
    shift: tl.constexpr = 4 * (PART // 4)
    codes = (low.to(tl.int32) >> shift) & 15
    if BITS == 5:
        codes |= ((high.to(tl.int32) >> PART) & 1) << 4
    if BITS == 6:
        two: tl.constexpr = 2 * (PART // 2)
        codes |= ((high.to(tl.int32) >> two) & 3) << 4
    return codes


@triton.jit
def _accumulate(acc, weight, x_at, row_mask, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        return acc + weight * tl.load(x_at).to(tl.float32)
    else:
        x = tl.load(x_at, mask=row_mask, other=0.0)
        return tl.dot(weight.to(x.dtype), x, acc, input_precision="ieee")


@triton.jit
def multiply_step(
    acc,
    x_at,
    mask,
    low_ptr,
    high_ptr,
    scale_ptr,
    min_ptr,
    sub_scale_ptr,
    sub_min_ptr,
    row,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    SUBS: tl.constexpr,
    MINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add the products of STEP columns from `start` to acc [ROWS, BLOCK_M], where BLOCK_M is 1 to acc [ROWS, 32]. `row`
    [ROWS] are rows of the N of the weight, `x_at` points to the first 32 columns of x, of which `mask` are there."""
    k = tl.arange(0, 32)
    first = start // 32
    if BITS == 8:
        for part in tl.static_range(STEP // 32):
            codes = tl.load(low_ptr + row[:, None] * K + (start + 32 * part + k)[None, :]).to(tl.int32)
            codes = (codes & 0xFF) ^ 0x80
            weight = _group_numbers(
                codes, scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, first + part, N, WIDE, 128, SUBS, MINS
            )
            acc = _accumulate(acc, weight, x_at + start + 32 * part, mask, BLOCK_M)
    else:
        low_at = low_ptr + row[:, None] * (K // 2) + start // 2 + k[None, :]
        high_at = high_ptr + row[:, None] * (K * (BITS - 4) // 8) + start * (BITS - 4) // 8 + k[None, :]
        high = 0
        if BITS == 5:
            high = tl.load(high_at)
        for part in tl.static_range(4):
            low = tl.load(low_at + 32 * part)
            if BITS == 6:
                high = tl.load(high_at + 32 * (part % 2))
            weight = _group_numbers(
                _codes_of(low, high, BITS, part),
                scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, first + part, N, WIDE, OFFSET, SUBS, MINS,
            )  # fmt: skip
            acc = _accumulate(acc, weight, x_at + start + 32 * part, mask, BLOCK_M)
            weight = _group_numbers(
                _codes_of(low, high, BITS, part + 4),
                scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, first + part + 4, N, WIDE, OFFSET, SUBS, MINS,
            )  # fmt: skip
            acc = _accumulate(acc, weight, x_at + start + 32 * part + 128, mask, BLOCK_M)
    return acc


@triton.jit
def _product_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    min_ptr,
    sub_scale_ptr,
    sub_min_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    SUBS: tl.constexpr,
    MINS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K] by a weight [N, K] in a block format, given as planes -> out [M, N].

    Grid: (tiles of M and N, splits of K). A program sums CHUNK columns for a [BLOCK_N, BLOCK_M] tile; of several splits
    the last one to arrive adds up all and writes. With BLOCK_M 1 the vector units multiply.
    """
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_id = tl.program_id(0)
    m_tile = tile_id // N_TILES
    n_tile = tile_id % N_TILES
    split = tl.program_id(1)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, 32)
    row = tl.minimum(n, N - 1).to(tl.int64)
    row_mask = m < num_rows
    allow_next(PDL)
    wait_for_previous(PDL)
    if BLOCK_M == 1:
        x_at = x_ptr + k[None, :]
        acc = tl.zeros([BLOCK_N, 32], tl.float32)
    else:
        x_at = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    mask = row_mask[None, :]
    begin = split * CHUNK
    for start in range(begin, min(begin + CHUNK, K), STEP):
        acc = multiply_step(
            acc, x_at, mask, low_ptr, high_ptr, scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, start,
            N, K, STEP, BITS, WIDE, OFFSET, SUBS, MINS, BLOCK_M,
        )  # fmt: skip
    if BLOCK_M == 1:
        acc = tl.sum(acc, axis=1)[:, None]
    if SPLITS > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        partial = partial_ptr + (tile_id * SPLITS).to(tl.int64) * TILE + inner
        if not store_part(acc, partial, arrived_ptr + tile_id, split, TILE, SPLITS):
            return
        acc = sum_parts(partial, TILE, SPLITS)
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    stored = row_mask[None, :] & (n < N)[:, None]
    if ADD:
        acc += tl.load(out_ptr + place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _numbers_kernel(
    low_ptr,
    high_ptr,
    scale_ptr,
    min_ptr,
    sub_scale_ptr,
    sub_min_ptr,
    id_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    SUBS: tl.constexpr,
    MINS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Dequantize rows of a weight [N, K] in a block format -> out [rows, K]: all rows, or with GATHER those of the ids.
    Grid: (blocks of rows, steps of K). A program writes STEP columns of ROWS rows."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * STEP
    k = tl.arange(0, 32)
    row = tl.load(id_ptr + n).to(tl.int64) if GATHER else tl.minimum(n, N - 1).to(tl.int64)
    out_at = out_ptr + n.to(tl.int64)[:, None] * K + start + k[None, :]
    mask = (n >= 0 if GATHER else n < N)[:, None]
    first = start // 32
    if BITS == 8:
        for part in tl.static_range(STEP // 32):
            codes = tl.load(low_ptr + row[:, None] * K + (start + 32 * part + k)[None, :]).to(tl.int32)
            codes = (codes & 0xFF) ^ 0x80
            weight = _group_numbers(
                codes, scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, first + part, N, WIDE, 128, SUBS, MINS
            )
            tl.store(out_at + 32 * part, weight.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        high_at = high_ptr + row[:, None] * (K * (BITS - 4) // 8) + start * (BITS - 4) // 8 + k[None, :]
        high = 0
        for part in tl.static_range(8):
            low = tl.load(low_ptr + row[:, None] * (K // 2) + start // 2 + 32 * (part % 4) + k[None, :])
            if BITS == 5:
                high = tl.load(high_at)
            if BITS == 6:
                high = tl.load(high_at + 32 * (part % 2))
            weight = _group_numbers(
                _codes_of(low, high, BITS, part),
                scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, first + part, N, WIDE, OFFSET, SUBS, MINS,
            )  # fmt: skip
            tl.store(out_at + 32 * part, weight.to(out_ptr.dtype.element_ty), mask=mask)
