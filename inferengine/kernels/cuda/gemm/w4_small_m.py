"""Products of a few rows with 4-bit weights on the tensor cores, straight from registers: the layout of w4_layout.py.

The instruction mma m16n8k16 multiplies 16 weight rows x 16 columns by up to eight rows of x. The weight lies in memory
in the order in which its threads hold it, so what a thread loads is what it multiplies, with nothing handed over. A
word holds eight codes of a row, two instructions' worth. One and-or makes a pair of codes the 16-bit numbers 128 + code
(16 + code in fp16), exactly; what was added is subtracted, with the zero point, once for a group, for which a product
with ones gives the sums of x (Kim et al. 2022; Frantar et al. 2024).

A program takes 16 or 32 weight rows and its warps share the inner dimension slice by slice. It reads its first slices
before it waits for the kernel that writes x, so that memory is busy between products. The sum of a row of x does not
depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.dispatch import W4SmallMConfig
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight
from inferengine.kernels.cuda.mma import (
    code_numbers,
    half_to_float,
    issue_loads,
    load_four,
    load_two,
    multiply,
)
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

INSTRUCTION_ROWS = 8  # rows of x


def small_m_product(
    x: torch.Tensor,
    weight: NibbleWeight,
    tuned: W4SmallMConfig,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] of 16-bit numbers -> [M, N], or [M, N / 2] when gated by an activation of activation.py; N / 2
    is then a multiple of 16. `residual` [M, N]: added in place and returned."""
    num_rows, columns = x.shape
    width = weight.rows if gated is None else weight.rows // 2
    out = x.new_empty(num_rows, width) if residual is None else residual
    if num_rows == 0:
        return out
    if columns % 4 or x.stride(0) % 4 or x.data_ptr() % 8:
        x = torch.nn.functional.pad(x, (0, -columns % 4)).contiguous()
    blocks = min(tuned.row_blocks, triton.next_power_of_2(triton.cdiv(num_rows, INSTRUCTION_ROWS)))
    every_tile, slices = weight.words.shape[:2]
    tiles = 2 if gated is not None else tuned.tiles if every_tile % tuned.tiles == 0 else 1
    ahead = min(tuned.ahead, triton.cdiv(slices, tuned.num_warps))
    programs = every_tile // 2 if gated is not None else every_tile // tiles
    _small_m_kernel[(programs, triton.cdiv(num_rows, blocks * INSTRUCTION_ROWS))](
        x.view(torch.int32),
        weight.words,
        weight.points,
        out if bias is None else bias,
        out,
        num_rows,
        x.stride(0) // 2,
        out.stride(0),
        N=width,
        PAIRS=x.shape[1] // 2,
        SLICES=slices,
        PARTS=weight.parts,
        TILES=tiles,
        BLOCKS=blocks,
        ONE=num_rows == 1,
        HALF=x.dtype == torch.float16,
        AHEAD=ahead,
        WARPS=tuned.num_warps,
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        HARDWARE=x.is_cuda,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def small_m_product_float32(x: torch.Tensor, weight: NibbleWeight, tuned: W4SmallMConfig) -> torch.Tensor:
    """Multiply x [M, K] -> [M, N] in float32, whose 24 bits are the sum of three numbers in bf16."""
    first = x.bfloat16()
    left = x - first.float()
    second = left.bfloat16()
    pieces = torch.cat([first, second, (left - second.float()).bfloat16()])
    out = x.new_zeros(pieces.shape[0], weight.rows)
    small_m_product(pieces, weight, tuned, residual=out)
    return out.view(3, x.shape[0], weight.rows).sum(0)


@triton.jit
def _load_slice(words_at, points_at, mask, PARTS: tl.constexpr):
    """Of rows g and g + 8 of a tile: four words of each, then the points of each part."""
    held = load_four(words_at, mask) + load_four(words_at + 128, mask)
    for part in tl.static_range(PARTS):
        held += load_two(points_at + part * 16, mask)
    return held


@triton.jit
def _load_tiles(words_at, points_at, warp, turn, shape):
    """A slice of each tile of the program; zeros for a warp that has none left."""
    SLICES: tl.constexpr = shape[0]
    PARTS: tl.constexpr = shape[1]
    WARPS: tl.constexpr = shape[2]
    AHEAD: tl.constexpr = shape[3]
    TILES: tl.constexpr = shape[4]
    OTHER: tl.constexpr = shape[5]
    there = None
    if SLICES % (WARPS * AHEAD) != 0:
        there = turn * WARPS + warp < SLICES
    words_at += turn * (WARPS * 256)
    points_at += turn * (WARPS * PARTS * 16)
    held = (_load_slice(words_at, points_at, there, PARTS),)
    if TILES == 2:
        held += (_load_slice(words_at + OTHER * SLICES * 256, points_at + OTHER * SLICES * PARTS * 16, there, PARTS),)
    return held


@triton.jit
def _load_inputs(x_at, pair, mask, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """The pairs of x that are multiplied with a slice: two for each of eight instructions."""
    held = ()
    for step in tl.static_range(8):
        there = mask
        if not EVEN:
            there = pair + step * 8 < PAIRS
            if mask is not None:
                there = there & mask
        held += load_two(x_at + step * 8, there)
    return held


@triton.jit
def _totals(x, zeros, PARTS: tl.constexpr, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """Sums over each part of the slice of the two rows of x that a thread's results belong to: a product with ones. Two
    chains of instructions, because each waits for the one before it in its chain."""
    ones = tl.full(zeros[0].shape, 0x3C003C00 if HALF else 0x3F803F80, tl.int32)
    found = ()
    for part in tl.static_range(PARTS):
        even = zeros
        odd = zeros
        for step in tl.static_range(part * (8 // PARTS), (part + 1) * (8 // PARTS)):
            if step % 2 == 0:
                even = multiply(ones, ones, ones, ones, x[2 * step], x[2 * step + 1], even, HALF, HARDWARE)
            else:
                odd = multiply(ones, ones, ones, ones, x[2 * step], x[2 * step + 1], odd, HALF, HARDWARE)
        found += (even[0] + odd[0], even[1] + odd[1])
    return found


@triton.jit
def _add_part(sums, even, odd, upper, lower, total, total_next, HALF: tl.constexpr):
    """sums += scale * (c - (OFFSET + zero) * total), where c = even + odd is the product of x and OFFSET + code."""
    OFFSET: tl.constexpr = 16.0 if HALF else 128.0
    above, above_lower = half_to_float(upper >> 16) + OFFSET, half_to_float(lower >> 16) + OFFSET
    scale, scale_lower = half_to_float(upper), half_to_float(lower)
    return (
        sums[0] + scale * (even[0] + odd[0] - above * total),
        sums[1] + scale * (even[1] + odd[1] - above * total_next),
        sums[2] + scale_lower * (even[2] + odd[2] - above_lower * total),
        sums[3] + scale_lower * (even[3] + odd[3] - above_lower * total_next),
    )


@triton.jit
def _add_slice(
    sums, held, x, totals, zeros, PARTS: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr, HARDWARE: tl.constexpr
):
    """sums += scale * (codes - zero) x of a slice of a tile, for every block of rows of x."""
    even = ()
    odd = ()
    for _ in tl.static_range(BLOCKS):
        even += (zeros,)
        odd += (zeros,)
    for step in tl.static_range(4):
        upper = code_numbers(held[step], HALF, HARDWARE)
        lower = code_numbers(held[4 + step], HALF, HARDWARE)
        grown = ()
        for block in tl.static_range(BLOCKS):
            grown += (
                multiply(
                    upper[0], lower[0], upper[1], lower[1], x[block][4 * step], x[block][4 * step + 1], even[block],
                    HALF, HARDWARE,
                ),
            )  # fmt: skip
        even = grown
        if PARTS == 8:
            sums = _add_parts(sums, even, odd, held, totals, 2 * step, BLOCKS, HALF)
            even = odd
        grown = ()
        for block in tl.static_range(BLOCKS):
            grown += (
                multiply(
                    upper[2], lower[2], upper[3], lower[3], x[block][4 * step + 2], x[block][4 * step + 3], odd[block],
                    HALF, HARDWARE,
                ),
            )  # fmt: skip
        if (step + 1) * PARTS % 4 == 0:
            sums = _add_parts(sums, even, grown, held, totals, (2 * step + 1) * PARTS // 8, BLOCKS, HALF)
            grown = ()
            for _ in tl.static_range(BLOCKS):
                grown += (zeros,)
            even = grown
        odd = grown
    return sums


@triton.jit
def _add_parts(sums, even, odd, held, totals, PART: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    found = ()
    for block in tl.static_range(BLOCKS):
        total, total_next = totals[block][2 * PART], totals[block][2 * PART + 1]
        upper, lower = held[8 + 2 * PART], held[9 + 2 * PART]
        found += (_add_part(sums[block], even[block], odd[block], upper, lower, total, total_next, HALF),)
    return found


@triton.jit
def _pass(
    kept,
    sums,
    words_at,
    points_at,
    x_at,
    pair,
    masks,
    lane,
    base,
    zeros,
    shape,
    MORE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE: tl.constexpr,
    HALF: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Multiply the slices that are kept, one after the other, and load as many again. `sums` by tile and block."""
    SLICES: tl.constexpr = shape[0]
    PARTS: tl.constexpr = shape[1]
    WARPS: tl.constexpr = shape[2]
    AHEAD: tl.constexpr = shape[3]
    TILES: tl.constexpr = shape[4]
    EVEN: tl.constexpr = SLICES % (WARPS * AHEAD) == 0 and PAIRS == SLICES * 64
    warp = lane // 32
    following = ()
    for turn in tl.static_range(AHEAD):
        if MORE:
            following += (_load_tiles(words_at, points_at, warp, base + turn + AHEAD, shape),)
            issue_loads(lane, HARDWARE)
        first = (base + turn) * (WARPS * 64)
        x = ()
        totals = ()
        for block in tl.static_range(BLOCKS):
            x += (_load_inputs(x_at[block] + first, pair + first, None if ONE else masks[block], PAIRS, EVEN),)
        for block in tl.static_range(BLOCKS):
            totals += (_totals(x[block], zeros, PARTS, HALF, HARDWARE),)
        found = (_add_slice(sums[0], kept[turn][0], x, totals, zeros, PARTS, BLOCKS, HALF, HARDWARE),)
        if TILES == 2:
            found += (_add_slice(sums[1], kept[turn][1], x, totals, zeros, PARTS, BLOCKS, HALF, HARDWARE),)
        sums = found
    return following, sums


@triton.jit
def _over_warps(first, second, WARPS: tl.constexpr):
    """[LANES] -> [32] each, the sums over the warps."""
    return tl.split(tl.sum(tl.reshape(tl.join(first, second), [WARPS, 32, 2]), axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _small_m_kernel(
    x_ptr,
    words_ptr,
    points_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    PAIRS: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE: tl.constexpr,
    HALF: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply up to BLOCKS * 8 rows of x at a time by a packed 4-bit weight -> out [M, N], codes straight from
    registers.

    Grid: (tiles of 16 weight rows, TILES to a program and with GATED one of gate and one of up; blocks of x's rows).
    The warps of a program take every WARPS-th slice of 128 columns, AHEAD slices on their way at a time, and add their
    sums at the end.
    """
    PASSES: tl.constexpr = ((SLICES + WARPS - 1) // WARPS + AHEAD - 1) // AHEAD
    OTHER: tl.constexpr = N // 16 if GATED else 1  # how far the second tile is
    shape: tl.constexpr = (SLICES, PARTS, WARPS, AHEAD, TILES, OTHER)
    tile = tl.program_id(0) if GATED else tl.program_id(0) * TILES
    lane = tl.arange(0, 32 * WARPS)
    warp = lane // 32
    words_at = words_ptr + tile.to(tl.int64) * (SLICES * 256) + (warp * 256 + lane % 32 * 4)
    points_at = points_ptr + tile.to(tl.int64) * (SLICES * PARTS * 16) + (warp * (PARTS * 16) + lane % 32 // 4 * 2)
    kept = ()
    for turn in tl.static_range(AHEAD):
        kept += (_load_tiles(words_at, points_at, warp, turn, shape),)
    allow_next(PDL)
    wait_for_previous(PDL)

    pair = warp * 64 + lane % 4 * 2
    first_row = tl.program_id(1) * (BLOCKS * 8)
    zero = tl.zeros([32 * WARPS], tl.float32)
    zeros = (zero, zero, zero, zero)
    x_at = ()
    masks = ()
    of_tile = ()
    for block in tl.static_range(BLOCKS):
        row = first_row + block * 8 + lane % 32 // 4
        if ONE:
            x_at += (x_ptr + pair,)
        else:
            x_at += (x_ptr + row.to(tl.int64) * x_stride + pair,)
        masks += (row < num_rows,)
        of_tile += (zeros,)
    sums = (of_tile, of_tile) if TILES == 2 else (of_tile,)
    for one_pass in tl.range(0, PASSES - 1, num_stages=1):
        kept, sums = _pass(
            kept, sums, words_at, points_at, x_at, pair, masks, lane, one_pass * AHEAD, zeros,
            shape, True, PAIRS, BLOCKS, ONE, HALF, HARDWARE,
        )  # fmt: skip
    kept, sums = _pass(
        kept, sums, words_at, points_at, x_at, pair, masks, lane, (PASSES - 1) * AHEAD, zeros,
        shape, False, PAIRS, BLOCKS, ONE, HALF, HARDWARE,
    )  # fmt: skip

    inside = tl.arange(0, 32)
    n = tile * 16 + inside // 4
    for block in tl.static_range(BLOCKS):
        for odd in tl.static_range(1 if ONE else 2):
            m = first_row + block * 8 + inside % 4 * 2 + odd
            at = out_ptr + m.to(tl.int64) * out_stride + n
            upper, lower = _over_warps(sums[0][block][odd], sums[0][block][2 + odd], WARPS)
            if TILES == 2:
                upper_next, lower_next = _over_warps(sums[1][block][odd], sums[1][block][2 + odd], WARPS)
            if GATED:
                upper = _gated(upper, upper_next, bias_ptr, n, N, BIAS, ACTIVATION)
                lower = _gated(lower, lower_next, bias_ptr, n + 8, N, BIAS, ACTIVATION)
                _store(upper, at, bias_ptr, n, m < num_rows, N, False, ADD)
                _store(lower, at + 8, bias_ptr, n + 8, m < num_rows, N, False, ADD)
            else:
                _store(upper, at, bias_ptr, n, m < num_rows, N, BIAS, ADD)
                _store(lower, at + 8, bias_ptr, n + 8, m < num_rows, N, BIAS, ADD)
                if TILES == 2:
                    _store(upper_next, at + 16, bias_ptr, n + 16, m < num_rows, N, BIAS, ADD)
                    _store(lower_next, at + 24, bias_ptr, n + 24, m < num_rows, N, BIAS, ADD)


@triton.jit
def _gated(left, right, bias_ptr, n, N: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    if BIAS:
        left += tl.load(bias_ptr + n).to(tl.float32)
        right += tl.load(bias_ptr + N + n).to(tl.float32)
    return gate(left, ACTIVATION) * right


@triton.jit
def _store(result, at, bias_ptr, n, here, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    mask = here & (n < N)
    if BIAS:
        result += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, result.to(at.dtype.element_ty), mask=mask)
