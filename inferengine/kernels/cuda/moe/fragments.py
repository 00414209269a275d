"""Products of the chosen experts with 4-bit codes, straight from registers: for few pairs of token and expert.

The instruction mma m16n8k16 multiplies 16 weight rows by eight pairs. Codes lie in memory as its threads hold them
(layout.py), so what a thread loads is what it multiplies: nothing goes through shared memory and no thread waits for
another one inside the loop. Two codes become two bf16 numbers at a time. MXFP4's are multiplied by their scale as they
are made, INT4's scales multiply the sums of their columns.

The warps of a program share the weight rows, the columns, or both. Warps that share rows read the same inputs, which
stay in the L1 cache. Each warp has `ahead` slices of 128 columns on their way while it multiplies as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.codes import less_pairs
from inferengine.kernels.cuda.mma import code_numbers, issue_loads, load_four, load_two, multiply
from inferengine.kernels.cuda.moe.configurations import FragmentConfig
from inferengine.kernels.cuda.moe.gating import ACTIVATIONS, gated
from inferengine.kernels.cuda.moe.grouped import MXFP4, ExpertMatrix, Pairs, expert_of, most_blocks
from inferengine.kernels.cuda.moe.layout import mx_pair, mx_scale
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.experts import Gating

PAIRS = 8  # of token and expert, in an instruction


def reads(x: torch.Tensor, weight: ExpertMatrix) -> bool:
    """Return whether the kernel can multiply inputs like these by this weight."""
    aligned = weight.columns % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return weight.has_nibbles and x.dtype == torch.bfloat16 and aligned


def multiply_fragments(
    x: torch.Tensor,
    weight: ExpertMatrix,
    pairs: Pairs,
    tuned: FragmentConfig,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """Multiply x by the weights of the chosen experts; arguments and result as those of grouped.multiply."""
    num_pairs, k = pairs.ids.numel(), pairs.ids.shape[1]
    width = weight.rows // 2 if gating is not None else weight.rows
    out = x.new_empty(num_pairs, width)
    if num_pairs == 0:
        return out
    by_pair = pairs.order is None or pairs.starts is None
    block_m = PAIRS * tuned.pair_blocks
    blocks = num_pairs if by_pair else most_blocks(num_pairs, weight.num_experts, block_m)
    tiles, slices = len(weight.codes) // weight.num_experts, weight.codes.shape[1]
    assert weight.scales is not None
    _fragment_kernel[(blocks * triton.cdiv(tiles, tuned.tiles * tuned.row_warps),)](
        x.view(torch.int32),
        weight.codes,
        weight.scales,
        x if weight.bias is None else weight.bias,
        pairs.ids,
        pairs.ids if pairs.order is None else pairs.order,
        pairs.ids if pairs.starts is None else pairs.starts,
        out,
        num_pairs,
        x.stride(0) // 2,
        0.0 if gating is None else gating.alpha,
        0.0 if gating is None else gating.limit,
        EXPERTS=weight.num_experts,
        BLOCK_E=triton.next_power_of_2(weight.num_experts),
        N=weight.rows,
        K=weight.columns,
        ROW_TILES=tiles,
        SLICES=slices,
        CHOSEN=k,
        MX=weight.kind == MXFP4,
        GROUP=weight.group,
        BLOCKS=1 if by_pair else tuned.pair_blocks,
        TILES=tuned.tiles,
        ROW_WARPS=tuned.row_warps,
        COLUMN_WARPS=tuned.column_warps,
        AHEAD=min(tuned.ahead, triton.cdiv(slices, tuned.column_warps)),
        BY_PAIR=by_pair,
        BIAS=weight.bias is not None,
        GATED=gating is not None,
        PART=pairs.is_part,
        ACTIVATION=0 if gating is None else ACTIVATIONS[gating.activation],
        HARDWARE=x.is_cuda,
        num_warps=tuned.row_warps * tuned.column_warps,
        maxnreg=tuned.registers,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit
def _load_tiles(codes_at, scales_at, slice_id, shape):
    """Of a slice of each tile of the warp: the four words of row g, those of row g + 8, and the scales of both. Past
    the end it is the last slice again."""
    SLICES: tl.constexpr = shape[0]
    TILES: tl.constexpr = shape[1]
    N: tl.constexpr = shape[2]
    GROUP: tl.constexpr = shape[3]
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    here = tl.minimum(slice_id, SLICES - 1)
    held = ()
    for tile in tl.static_range(TILES):
        at = codes_at[tile] + here * 256
        one = load_four(at, None) + load_four(at + 128, None)
        for part in tl.static_range(PARTS):
            one += load_two(scales_at[tile] + (here * 128 + part * GROUP) // GROUP * N, None)
        held += (one,)
    return held


@triton.jit
def _load_words(at, mask):
    """Load four neighbours from each address, to keep. `mask` None: all exist."""
    neighbours = at[:, None] + tl.arange(0, 4)[None, :]
    if mask is None:
        four = tl.load(neighbours)
    else:
        four = tl.load(neighbours, mask=mask[:, None], other=0)
    even, odd = tl.split(tl.reshape(four, [at.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_inputs(x_at, lane, slice_id, K: tl.constexpr, SLICES: tl.constexpr, EXACT: tl.constexpr):
    """Of each quarter of a slice, the eight columns that a thread multiplies. Codes past column K stand for 0 with
    MXFP4, where any numbers will do; else (EXACT) the inputs must be zeros there."""
    held = ()
    for quarter in tl.static_range(4):
        eighth = slice_id * 16 + quarter * 4 + lane % 4  # of eight columns
        if EXACT:
            held += (_load_words(x_at + eighth * 4, eighth < K // 8),)
        elif K == SLICES * 128:
            held += (_load_words(x_at + eighth * 4, None),)
        else:
            held += (_load_words(x_at + tl.minimum(eighth, K // 8 - 1) * 4, None),)
    return held


@triton.jit
def _add_mx(sums, held, x, BLOCKS: tl.constexpr, HARDWARE: tl.constexpr):
    """Add the product of a slice of a tile of MXFP4 and the inputs of every block of pairs."""
    for quarter in tl.static_range(4):
        upper_scale = mx_scale(held[8], quarter, HARDWARE)
        lower_scale = mx_scale(held[9], quarter, HARDWARE)
        for half in tl.static_range(2):
            a0 = mx_pair(held[2 * half], upper_scale, quarter, HARDWARE)
            a1 = mx_pair(held[4 + 2 * half], lower_scale, quarter, HARDWARE)
            a2 = mx_pair(held[2 * half + 1], upper_scale, quarter, HARDWARE)
            a3 = mx_pair(held[4 + 2 * half + 1], lower_scale, quarter, HARDWARE)
            grown = ()
            for block in tl.static_range(BLOCKS):
                grown += (
                    multiply(
                        a0, a1, a2, a3, x[block][quarter][2 * half], x[block][quarter][2 * half + 1], sums[block],
                        False, HARDWARE,
                    ),
                )  # fmt: skip
            sums = grown
    return sums


@triton.jit
def _zero_pairs(points):
    """128 + the code of zero, twice, as bf16."""
    return (points & 15) * 0x10001 + 0x43004300


@triton.jit
def _add_int4(sums, held, x, zeros, GROUP: tl.constexpr, BLOCKS: tl.constexpr, HARDWARE: tl.constexpr):
    """Add scale * (codes - zero) x of a slice of a tile, for every block of pairs."""
    PARTS: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    upper = ()
    lower = ()
    for word in tl.static_range(4):
        upper += (code_numbers(held[word], False, HARDWARE),)
        lower += (code_numbers(held[4 + word], False, HARDWARE),)
    products = ()
    for _ in tl.static_range(BLOCKS):
        products += (zeros,)
    for quarter in tl.static_range(4):
        points, points_below = held[8 + quarter * PARTS // 4 * 2], held[9 + quarter * PARTS // 4 * 2]
        zero, zero_below = _zero_pairs(points), _zero_pairs(points_below)
        for half in tl.static_range(2):
            a0 = less_pairs(upper[2 * half][quarter], zero, HARDWARE)
            a1 = less_pairs(lower[2 * half][quarter], zero_below, HARDWARE)
            a2 = less_pairs(upper[2 * half + 1][quarter], zero, HARDWARE)
            a3 = less_pairs(lower[2 * half + 1][quarter], zero_below, HARDWARE)
            grown = ()
            for block in tl.static_range(BLOCKS):
                grown += (
                    multiply(
                        a0, a1, a2, a3, x[block][quarter][2 * half], x[block][quarter][2 * half + 1], products[block],
                        False, HARDWARE,
                    ),
                )  # fmt: skip
            products = grown
        if (quarter + 1) * PARTS % 4 == 0:
            scale = (points & -16).to(tl.float32, bitcast=True)
            scale_below = (points_below & -16).to(tl.float32, bitcast=True)
            found = ()
            fresh = ()
            for block in tl.static_range(BLOCKS):
                found += (
                    (
                        sums[block][0] + scale * products[block][0],
                        sums[block][1] + scale * products[block][1],
                        sums[block][2] + scale_below * products[block][2],
                        sums[block][3] + scale_below * products[block][3],
                    ),
                )
                fresh += (zeros,)
            sums = found
            products = fresh
    return sums


@triton.jit
def _pass(
    kept,
    sums,
    codes_at,
    scales_at,
    x_at,
    lane,
    first,
    zeros,
    shape,
    MORE: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    MX: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Multiply the slices that are kept, first, first + STEP and so on, and load as many again. `sums` by tile and
    block. EVEN: no slice is past the end."""
    SLICES: tl.constexpr = shape[0]
    TILES: tl.constexpr = shape[1]
    GROUP: tl.constexpr = shape[3]
    following = ()
    for turn in tl.static_range(AHEAD):
        slice_id = first + turn * STEP
        if MORE:
            following += (_load_tiles(codes_at, scales_at, slice_id + AHEAD * STEP, shape),)
            issue_loads(lane, HARDWARE)
        x = ()
        for block in tl.static_range(BLOCKS):
            held = _load_inputs(x_at[block], lane, slice_id, K, SLICES, not (EVEN and (MX or K == SLICES * 128)))
            x += (held,)
        found = ()
        for tile in tl.static_range(TILES):
            if MX:
                found += (_add_mx(sums[tile], kept[turn][tile], x, BLOCKS, HARDWARE),)
            else:
                found += (_add_int4(sums[tile], kept[turn][tile], x, zeros, GROUP, BLOCKS, HARDWARE),)
        sums = found
    return following, sums


@triton.jit
def _over_warps(values, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    """Sum over the warps that share a tile: [LANES] -> [32 * ROW_WARPS]."""
    if COLUMN_WARPS == 1:
        return values
    else:
        return tl.sum(tl.reshape(values, [COLUMN_WARPS, ROW_WARPS * 32]), axis=0)


@triton.jit(do_not_specialize=["num_pairs", "alpha", "limit"])
def _fragment_kernel(
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
    ROW_TILES: tl.constexpr,
    SLICES: tl.constexpr,
    CHOSEN: tl.constexpr,
    MX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PART: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of up to 8 * BLOCKS pairs of one expert by ROW_WARPS * TILES of its tiles of 16 weight rows.

    x [T or T * k, K] in pairs of numbers, codes and scales as ExpertMatrix has them, out [T * k, WIDTH]. Grid: (blocks
    * groups of tiles), the groups of a block side by side. Warp r + ROW_WARPS * c takes the r-th TILES tiles and every
    COLUMN_WARPS-th slice from the c-th on; the sums of the warps with the same r are added at the end.
    """
    WIDTH: tl.constexpr = N // 2 if GATED else N
    EACH: tl.constexpr = TILES * ROW_WARPS
    GROUPS: tl.constexpr = (ROW_TILES + EACH - 1) // EACH
    PASSES: tl.constexpr = ((SLICES + COLUMN_WARPS - 1) // COLUMN_WARPS + AHEAD - 1) // AHEAD
    EVEN: tl.constexpr = SLICES % (COLUMN_WARPS * AHEAD) == 0
    SPAN: tl.constexpr = 128 if MX else GROUP  # columns that one word of scales is for
    BLOCK_M: tl.constexpr = 1 if BY_PAIR else BLOCKS * 8
    shape: tl.constexpr = (SLICES, TILES, N, SPAN)
    block = tl.program_id(0) // GROUPS
    first_tile = tl.program_id(0) % GROUPS * EACH
    allow_next(PDL)
    wait_for_previous(PDL)
    expert, before = expert_of(block, ids_ptr, starts_ptr, num_pairs, EXPERTS, BLOCK_E, BLOCK_M, BY_PAIR)
    if PART or not BY_PAIR:
        if expert >= EXPERTS:
            return
    if BY_PAIR:
        first_place = block
        end = block + 1
    else:
        first_place = tl.load(starts_ptr + expert) + (block - before) * BLOCK_M
        end = tl.load(starts_ptr + expert + 1)

    lane = tl.arange(0, 32 * ROW_WARPS * COLUMN_WARPS)
    inside = lane % 32
    codes_at = ()
    scales_at = ()
    for one in tl.static_range(TILES):
        tile = tl.minimum(first_tile + lane // 32 % ROW_WARPS * TILES + one, ROW_TILES - 1)
        codes_at += (codes_ptr + (expert.to(tl.int64) * ROW_TILES + tile) * (SLICES * 256) + inside * 4,)
        row = tl.minimum(tile * 16 + inside // 4 * 2, N - 2)
        scales_at += (scales_ptr + expert.to(tl.int64) * (N * ((SLICES * 128 + SPAN - 1) // SPAN)) + row,)
    first = lane // (32 * ROW_WARPS)
    kept = ()
    for turn in tl.static_range(AHEAD):
        kept += (_load_tiles(codes_at, scales_at, first + turn * COLUMN_WARPS, shape),)
    issue_loads(lane, HARDWARE)

    zero = tl.zeros([32 * ROW_WARPS * COLUMN_WARPS], tl.float32)
    zeros = (zero, zero, zero, zero)
    x_at = ()
    of_tile = ()
    for one in tl.static_range(BLOCKS):
        place = tl.minimum(first_place + one * 8 + inside // 4, end - 1)  # pairs past the end are computed, not stored
        if GATED:
            pair = place if BY_PAIR else tl.load(order_ptr + place)
            x_row = pair // CHOSEN
        else:
            x_row = place
        x_at += (x_ptr + x_row.to(tl.int64) * x_stride,)
        of_tile += (zeros,)
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (of_tile,)
    for one_pass in tl.range(0, PASSES - 1, num_stages=1):
        kept, sums = _pass(
            kept, sums, codes_at, scales_at, x_at, lane, first + one_pass * (AHEAD * COLUMN_WARPS), zeros,
            shape, True, COLUMN_WARPS, AHEAD, K, BLOCKS, MX, True, HARDWARE,
        )  # fmt: skip
    kept, sums = _pass(
        kept, sums, codes_at, scales_at, x_at, lane, first + (PASSES - 1) * (AHEAD * COLUMN_WARPS), zeros,
        shape, False, COLUMN_WARPS, AHEAD, K, BLOCKS, MX, EVEN, HARDWARE,
    )  # fmt: skip

    thread = tl.arange(0, 32 * ROW_WARPS)
    for one in tl.static_range(TILES):
        tile = first_tile + thread // 32 * TILES + one
        n = tile * 16 + thread % 32 // 4 * 2
        if BIAS:
            bias_at = bias_ptr + expert.to(tl.int64) * N + n
            upper_bias = tl.load(bias_at, mask=n < N, other=0.0).to(tl.float32)
            lower_bias = tl.load(bias_at + 1, mask=n < N, other=0.0).to(tl.float32)
        for block_id in tl.static_range(BLOCKS):
            for odd in tl.static_range(2):
                upper = _over_warps(sums[one][block_id][odd], ROW_WARPS, COLUMN_WARPS)
                lower = _over_warps(sums[one][block_id][2 + odd], ROW_WARPS, COLUMN_WARPS)
                if BIAS:
                    upper += upper_bias
                    lower += lower_bias
                place = first_place + block_id * 8 + thread % 4 * 2 + odd
                there = (place < end) & (n < N)
                if GATED:
                    at = out_ptr + place.to(tl.int64) * WIDTH + n // 2
                    result = gated(upper, lower, ACTIVATION, alpha, limit)
                    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=there)
                else:
                    pair = place if BY_PAIR else tl.load(order_ptr + place, mask=there, other=0)
                    at = out_ptr + pair.to(tl.int64) * WIDTH + n
                    tl.store(at, upper.to(out_ptr.dtype.element_ty), mask=there)
                    tl.store(at + 1, lower.to(out_ptr.dtype.element_ty), mask=there)
