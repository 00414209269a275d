"""Products of many experts in one launch: each token's row is multiplied by the weights of the experts it chose.

Pairs of token and expert are sorted by expert (routing.group_pairs). A block is up to `block_m` pairs of one expert.
Only the device knows how many blocks an expert has. So the grid has as many blocks as there can be at most, and a
program finds its expert by the running sum of the blocks. With few pairs each pair is a block, and nothing is sorted.

Weights are 16-bit numbers, FP8, INT8, MXFP4 or INT4. Codes are converted to numbers in registers; with few rows they
are the left operand of the tensor cores. Rows of gate and up alternate, so that a thread of the accumulator holds both.

Source: the blocks of experts are those of MegaBlocks (Gale et al. 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inferengine.kernels.cuda.codes import byte_numbers, widened
from inferengine.kernels.cuda.moe.configurations import GroupedConfig
from inferengine.kernels.cuda.moe.gating import ACTIVATIONS, from_zero, gated, scale_of
from inferengine.kernels.cuda.moe.layout import mx_quarters
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.experts import Gating

NUMBERS, FP8, FP8_GROUPS, MXFP4, INT8, INT4 = range(6)  # kinds of weights
MX_STEP = 128  # columns of MXFP4 that one word of scales covers


class ExpertMatrix(NamedTuple):
    """One projection of all experts as the kernels read it.

    `codes` [experts * rows, columns]; codes of 4 bits are int32 [experts * tiles, slices, 16, 16] (layout.py).
    `scales`: FP8 and INT8 [experts * rows] fp32; groups of 128 columns [experts, groups, rows] fp32; MXFP4 [experts,
    padded columns / 128, rows] int32, each holding four exponents; INT4 [experts, groups, rows] int32, an fp32 number
    whose lowest 4 bits are replaced by the zero point's code.
    `bias` [experts * rows].
    """

    kind: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    num_experts: int
    rows: int
    columns: int
    shared_rows: int = 1  # neighbouring rows with equal scales
    group: int = MX_STEP  # columns of INT4 with one scale: 32, 64 or a multiple of 128

    @property
    def has_nibbles(self) -> bool:
        """Return whether codes have 4 bits."""
        return self.kind in (MXFP4, INT4)


class Pairs(NamedTuple):
    """Which expert multiplies which pair.

    `ids` [T, k] if each pair is a block of its own, else `order` and `starts` of routing.group_pairs. `is_part`: pairs
    whose expert has the number after the last are skipped, and the result for them is undefined.
    """

    ids: torch.Tensor
    order: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    is_part: bool = False


def multiply(
    x: torch.Tensor,
    weight: ExpertMatrix,
    pairs: Pairs,
    tuned: GroupedConfig,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """Multiply x by the weights of the chosen experts.

    With `gating`: x [T, K], one row for each token -> [T * k, rows / 2], in the sorted order of the pairs. Without: x
    [T * k, K], in that order -> [T * k, rows], by pair number.
    """
    num_pairs, k = pairs.ids.numel(), pairs.ids.shape[1]
    width = weight.rows // 2 if gating is not None else weight.rows
    out = x.new_empty(num_pairs, width)
    if num_pairs == 0:
        return out
    by_pair = pairs.order is None or pairs.starts is None
    blocks = num_pairs if by_pair else most_blocks(num_pairs, weight.num_experts, tuned.block_m)
    block_k = max(tuned.block_k, MX_STEP) if weight.has_nibbles else tuned.block_k
    tma = tuned.tma and weight.kind == NUMBERS and weight.columns * x.element_size() % 16 == 0
    hardware = x.is_cuda and x.dtype == torch.bfloat16
    codes: object = weight.codes
    if tma:
        codes = TensorDescriptor.from_tensor(weight.codes, [tuned.block_n, block_k])
    elif weight.kind == INT4 or (weight.kind == MXFP4 and hardware):
        codes = weight.codes.view(torch.int16)
    _grouped_kernel[(blocks * triton.cdiv(weight.rows, tuned.block_n),)](
        x,
        codes,
        weight.codes if weight.scales is None else weight.scales,
        x if weight.bias is None else weight.bias,
        pairs.ids,
        pairs.ids if pairs.order is None else pairs.order,
        pairs.ids if pairs.starts is None else pairs.starts,
        out,
        num_pairs,
        x.stride(0),
        0.0 if gating is None else gating.alpha,
        0.0 if gating is None else gating.limit,
        EXPERTS=weight.num_experts,
        BLOCK_E=triton.next_power_of_2(weight.num_experts),
        N=weight.rows,
        K=weight.columns,
        SLICES=weight.codes.shape[1] if weight.has_nibbles else 0,
        ROW_TILES=len(weight.codes) // weight.num_experts if weight.has_nibbles else 0,
        CHOSEN=k,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        BLOCK_K=block_k,
        KIND=weight.kind,
        GROUP=weight.group,
        BY_PAIR=by_pair,
        WEIGHT_LEFT=tuned.weight_left,
        TMA=tma,
        BIAS=weight.bias is not None,
        GATED=gating is not None,
        PART=pairs.is_part,
        ACTIVATION=0 if gating is None else ACTIVATIONS[gating.activation],
        HARDWARE=hardware,
        STAGES=tuned.num_stages,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many blocks there can be, however the pairs are distributed."""
    used = min(num_pairs, num_experts)
    return (num_pairs + used * (block_m - 1)) // block_m


@triton.jit
def expert_of(
    block, ids_ptr, starts_ptr, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    """The expert of a block of pairs, EXPERTS or more where there is none here, and how many blocks the experts before
    it have. With BY_PAIR a block is one pair, and ids [T * k] has its expert."""
    if BY_PAIR:
        return tl.load(ids_ptr + block).to(tl.int32), block * 0
    else:
        e = tl.arange(0, BLOCK_E)
        begins = tl.load(starts_ptr + e, mask=e < EXPERTS, other=num_pairs)
        ends = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=num_pairs)
        past = tl.cumsum((ends - begins + BLOCK_M - 1) // BLOCK_M, axis=0)
        expert = tl.sum((past <= block).to(tl.int32), axis=0)
        return expert, tl.max(tl.where(past <= block, past, 0), axis=0)


@triton.jit
def pairs_of(block, expert, before, order_ptr, starts_ptr, BLOCK_M: tl.constexpr, BY_PAIR: tl.constexpr):
    """The pairs of a block of an expert, [BLOCK_M] each: their places in the sorted order, their numbers, and which of
    them exist."""
    m = tl.arange(0, BLOCK_M)
    if BY_PAIR:
        place = block + m * 0
        return place, place, m == 0
    else:
        place = tl.load(starts_ptr + expert) + (block - before) * BLOCK_M + m
        valid = place < tl.load(starts_ptr + expert + 1)
        return place, tl.load(order_ptr + place, mask=valid, other=0), valid


@triton.jit
def _multiplied(x, weight, acc, WEIGHT_LEFT: tl.constexpr):
    if WEIGHT_LEFT:
        return tl.dot(weight, x, acc, input_precision="ieee")
    else:
        return tl.dot(x, weight.T, acc, input_precision="ieee")


@triton.jit
def _by_row(values, WEIGHT_LEFT: tl.constexpr):
    """A number for each weight row, to broadcast against the accumulator."""
    if WEIGHT_LEFT:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def _row_at(expert, n, ROW_TILES: tl.constexpr, SLICES: tl.constexpr, WORDS: tl.constexpr):
    """Where the first slice of rows n of an expert begins, in words of which a slice of a row has WORDS (layout.py)."""
    tile = tl.minimum(n // 16, ROW_TILES - 1)
    return (expert.to(tl.int64) * ROW_TILES + tile) * (SLICES * 16 * WORDS) + (n % 2 * 8 + n % 16 // 2) * WORDS


@triton.jit(do_not_specialize=["num_pairs", "alpha", "limit"])
def _grouped_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    ids_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_pairs,
    x_stride,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BY_PAIR: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PART: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of pairs of one expert by BLOCK_N of its N weight rows.

    x [T or T * k, K], codes and scales as ExpertMatrix has them, out [T * k, WIDTH]. Grid: (blocks * tiles of N), the
    tiles of a block side by side. A program computes a [BLOCK_M, BLOCK_N] tile of the product, transposed with
    WEIGHT_LEFT, and writes it, or with GATED the activation of its alternating rows of gate and up.
    """
    WIDTH: tl.constexpr = N // 2 if GATED else N
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    tile = tl.program_id(0)
    block = tile // N_TILES
    n_first = (tile % N_TILES) * BLOCK_N
    allow_next(PDL)
    wait_for_previous(PDL)
    expert, before = expert_of(block, ids_ptr, starts_ptr, num_pairs, EXPERTS, BLOCK_E, BLOCK_M, BY_PAIR)
    if PART or not BY_PAIR:
        if expert >= EXPERTS:
            return
    place, pair, valid = pairs_of(block, expert, before, order_ptr, starts_ptr, BLOCK_M, BY_PAIR)
    if GATED:
        x_row = (pair // CHOSEN).to(tl.int64)
        out_row = place.to(tl.int64)
    else:
        x_row = place.to(tl.int64)
        out_row = pair.to(tl.int64)
    n = n_first + tl.arange(0, BLOCK_N)
    first_row = expert.to(tl.int64) * N
    row = first_row + tl.minimum(n, N - 1)
    if WEIGHT_LEFT:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    if KIND == 3:
        b = tl.arange(0, 32)
        WORDS: tl.constexpr = 32 if HARDWARE else 16  # of a row's slice
        codes_at = codes_ptr + _row_at(expert, n, ROW_TILES, SLICES, WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
        scales_at = scales_ptr + expert.to(tl.int64) * (N * SLICES) + tl.minimum(n, N - 1)
        if WEIGHT_LEFT:
            x_at = x_ptr + x_row[None, :] * x_stride + b[:, None]
        else:
            x_at = x_ptr + x_row[:, None] * x_stride + b[None, :]
        for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            for step in tl.static_range(BLOCK_K // 128):
                start = begin + step * 128
                slice_at = codes_at + start // 128 * (16 * WORDS)
                if SLICES % (BLOCK_K // 128) == 0:
                    exponents = tl.load(scales_at + start // 128 * N)
                    quarters = mx_quarters(slice_at, None, HARDWARE)
                else:
                    there = start + n * 0 < K
                    exponents = tl.load(scales_at + start // 128 * N, mask=there, other=0)
                    quarters = mx_quarters(slice_at, there, HARDWARE)
                for quarter in tl.static_range(4):
                    first = start + quarter * 32
                    if WEIGHT_LEFT:
                        mask = valid[None, :] & (first + b < K)[:, None]
                    else:
                        mask = valid[:, None] & (first + b < K)[None, :]
                    x = tl.load(x_at + first, mask=mask, other=0.0)
                    scale = scale_of((exponents >> (quarter * 8)) & 255, HARDWARE)
                    weight = (quarters[quarter] * scale[:, None]).to(x.dtype)
                    acc = _multiplied(x, weight, acc, WEIGHT_LEFT)
    elif KIND == 5:
        SPAN: tl.constexpr = GROUP if GROUP < 128 else 128
        b = tl.arange(0, 32)
        codes_at = codes_ptr + _row_at(expert, n, ROW_TILES, SLICES, 32)[:, None] + b[None, :]
        scales_at = (
            scales_ptr + expert.to(tl.int64) * (N * ((128 * SLICES + GROUP - 1) // GROUP)) + tl.minimum(n, N - 1)
        )
        if WEIGHT_LEFT:
            x_at = x_ptr + x_row[None, :] * x_stride + b[:, None]
        else:
            x_at = x_ptr + x_row[:, None] * x_stride + b[None, :]
        for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            for step in tl.static_range(BLOCK_K // 128):
                start = begin + step * 128
                there = start + n * 0 < K
                words = tl.load(codes_at + start // 128 * 512, mask=there[:, None], other=0)
                for part in tl.static_range(128 // SPAN):
                    points = tl.load(scales_at + (start + part * SPAN) // GROUP * N, mask=there, other=0)
                    product = tl.zeros_like(acc)
                    for quarter in tl.static_range(SPAN // 32):
                        first = start + part * SPAN + quarter * 32
                        if WEIGHT_LEFT:
                            mask = valid[None, :] & (first + b < K)[:, None]
                        else:
                            mask = valid[:, None] & (first + b < K)[None, :]
                        x = tl.load(x_at + first, mask=mask, other=0.0)
                        weight = from_zero(words, points, part * (SPAN // 32) + quarter, HARDWARE).to(x.dtype)
                        product = _multiplied(x, weight, product, WEIGHT_LEFT)
                    acc += product * _by_row((points & -16).to(tl.float32, bitcast=True), WEIGHT_LEFT)
    else:
        k = tl.arange(0, BLOCK_K)
        if WEIGHT_LEFT:
            x_at = x_ptr + x_row[None, :] * x_stride + k[:, None]
        else:
            x_at = x_ptr + x_row[:, None] * x_stride + k[None, :]
        if KIND == 2:
            scales_at = scales_ptr + expert.to(tl.int64) * (N * ((K + 127) // 128)) + tl.minimum(n, N - 1)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if WEIGHT_LEFT:
                mask = valid[None, :]
                if not EVEN_K:
                    mask = mask & (start + k < K)[:, None]
            else:
                mask = valid[:, None]
                if not EVEN_K:
                    mask = mask & (start + k < K)[None, :]
            x = tl.load(x_at + start, mask=mask, other=0.0)
            if TMA:
                weight = codes_ptr.load([(first_row + n_first).to(tl.int32), start])
            elif EVEN_K:
                weight = tl.load(codes_ptr + row[:, None] * K + start + k[None, :])
            else:
                weight = tl.load(
                    codes_ptr + row[:, None] * K + start + k[None, :], mask=(start + k < K)[None, :], other=0.0
                )
            if KIND == 0:
                acc = _multiplied(x, weight, acc, WEIGHT_LEFT)
            elif KIND == 1:
                acc = _multiplied(x, widened(weight, HARDWARE).to(x.dtype), acc, WEIGHT_LEFT)
            elif KIND == 4:
                acc = _multiplied(x, byte_numbers(weight, x.dtype, HARDWARE), acc, WEIGHT_LEFT)
            else:
                scale = tl.load(scales_at + start // 128 * N)
                product = _multiplied(x, widened(weight, HARDWARE).to(x.dtype), tl.zeros_like(acc), WEIGHT_LEFT)
                acc += product * _by_row(scale, WEIGHT_LEFT)

    if KIND == 1 or KIND == 4:
        acc = acc * _by_row(tl.load(scales_ptr + row), WEIGHT_LEFT)
    if BIAS:
        acc += _by_row(tl.load(bias_ptr + row).to(tl.float32), WEIGHT_LEFT)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        if WEIGHT_LEFT:
            left, right = tl.split(tl.permute(tl.reshape(acc, [HALF, 2, BLOCK_M]), (0, 2, 1)))
        else:
            left, right = tl.split(tl.reshape(acc, [BLOCK_M, HALF, 2]))
        result = gated(left, right, ACTIVATION, alpha, limit)
        column = n_first // 2 + tl.arange(0, HALF)
    else:
        result = acc
        column = n
    if WEIGHT_LEFT:
        at = out_row[None, :] * WIDTH + column[:, None]
        mask = valid[None, :] & (column < WIDTH)[:, None]
    else:
        at = out_row[:, None] * WIDTH + column[None, :]
        mask = valid[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
