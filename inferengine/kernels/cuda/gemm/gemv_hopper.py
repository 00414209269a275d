"""One row times a quantized weight on Hopper, the weight streaming without a pause: x [1, K] @ weight [N, K]^T.

Decoding one sequence is bound by reading weights, so memory must never be idle. One program stays on each
multiprocessor and takes tiles of 16 or four weight rows, one after the other, through a ring in shared memory that
asynchronous copies keep full. The ring does not end where an input begins: it is filled before the program waits for
the kernel that writes x, while that one still computes. Two kernels have room on a multiprocessor at once, so the
weight of a product is on its way during the attention, or the product, before it.

With the ring full, time is arithmetic, so there is little of it. The tensor cores multiply 16 groups of codes by
eight columns of x. The order of the inner columns is free, so rows are read in 16-byte pieces as they lie, and the
groups may be of 16 rows or, with four ranges of x as columns, of four rows: what is read together then lies together.
FP8 codes become fp16 numbers by one instruction for a pair. Integer codes stay what they are: x becomes integers of
15 bits, by group, whose high and low bytes are two columns, so that a word of INT4 is two masks and a shift. The norm
before a product is taken on the way, its gain when x is put into shared memory, its factor at the end. Sums over the
warps are taken once, at the end, for all tiles.

A kernel of which two programs share a multiprocessor while another has none would take twice as long. Where programs
go is decided by the shared memory that they take: the sizes below leave one place for each.

`GemvShape` is what the kernel is compiled for: the sizes of a product and how its threads share the work. The row of x
is scaled by group, cut up, and put into shared memory in the order in which the threads multiply. A group is of 64
columns, of 128 for INT4. A power of two brings its largest number below 2^9 (fp16, which then holds every number of
bf16 that matters beside it) or 2^14 (integers, cut into a high and a low byte: one part in 2^14 of the largest number,
where bf16 itself has one in 2^9).

Written in Gluon, Triton's lower level. Other cards, shapes and numbers of rows take w8.py and w4_small_m.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.gemm.hopper import copy, is_hopper, num_multiprocessors, view
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight
from inferengine.kernels.cuda.gemm.w8 import ByteWeight
from inferengine.kernels.cuda.mma import half_to_float, multiply
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

E4M3, INT8, NIBBLES = 1, 2, 3  # FP8 codes; INT8 codes; INT4 codes as w4_layout.py stores them
ELEMENTS = {E4M3: 4, INT8: 4, NIBBLES: 8}  # of a word
GROUP_WORDS = 16  # of a weight row: four for each of four threads


@dataclass(frozen=True)
class GemvShape:
    """A product and how a program goes about it. Work comes in tiles of weight rows, tiles in stages of the ring, and
    stages in units, 16 groups of 16 words for one warp: of 16 rows, or four of each of four rows, which lie together in
    memory where 16 rows would not."""

    kind: int
    width: int  # outputs, after the gate
    columns: int
    gated: bool
    num_warps: int
    units: int  # of a warp in one stage
    ranges: int  # groups of a unit in a weight row: 4, or 1
    stages: int
    kept_tiles: int  # whose sums wait in shared memory to be added up over the warps
    spare: int = 0  # of shared memory that nothing reads: a word for each thread, so many times

    @property
    def e4m3(self) -> bool:
        """Whether the codes are FP8."""
        return self.kind == E4M3

    @property
    def int8(self) -> bool:
        """Whether the codes are INT8."""
        return self.kind == INT8

    @property
    def nibbles(self) -> bool:
        """Whether the codes are INT4."""
        return self.kind == NIBBLES

    @property
    def row_words(self) -> int:
        """Words of a weight row."""
        return self.columns // ELEMENTS[self.kind]

    @property
    def group_columns(self) -> int:
        """Columns of a group of 16 words."""
        return GROUP_WORDS * ELEMENTS[self.kind]

    @property
    def unit_columns(self) -> int:
        """Columns of a unit."""
        return self.group_columns * self.ranges

    @property
    def pieces(self) -> int:
        """What a number of x is cut into: with integer codes its high and its low byte are multiplied apart."""
        return 1 if self.kind == E4M3 else 2

    @property
    def x_words(self) -> int:
        """Words of x that a thread multiplies in a unit."""
        return self.group_columns // (8 * self.pieces)

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.columns // (self.unit_columns * self.num_warps * self.units)

    @property
    def half_rows(self) -> int:
        """Of a tile, twice: the second half is of up, where the first is of the gate."""
        return 8 // self.ranges

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.half_rows if self.gated else 2 * self.half_rows

    @property
    def tiles(self) -> int:
        """Tiles of the weight."""
        return self.width // self.outputs

    @property
    def stage_blocks(self) -> int:
        """16 bytes for each thread: of each unit the first half of the rows, then of each the second."""
        return 2 * self.units

    @property
    def point_sets(self) -> int:
        """INT4's scales and zeros lie by 16 rows; gate and up have theirs in different places."""
        return 2 if self.gated else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        points = 64 * self.point_sets if self.kind == NIBBLES else 0
        return self.num_warps * self.units * (1024 + points)

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory beside the ring: x, its scales and totals, the sums that wait, and some alignment."""
        groups = self.columns // self.group_columns
        sums = 8 * self.half_rows * self.num_warps * self.kept_tiles
        return 2 * self.columns + 4 * groups * self.pieces + sums + 128 * self.num_warps * self.spare + 512

    @property
    def chunk(self) -> int:
        """Columns of x that the program reads at once."""
        return min(self.num_warps * 256, self.columns & -self.columns)

    # Layouts of the threads 32 w + 4 g + t. g is cut in two: its higher part tells apart ranges of x, its lower pieces.

    @property
    def word_layout(self) -> gl.BlockedLayout:
        """Threads of one word of the weight each."""
        return gl.BlockedLayout([1, 1, 1, 1], [1, 4, 2, 4], [self.num_warps, 1, 1, 1], [3, 2, 1, 0])

    @property
    def pair_layout(self) -> gl.BlockedLayout:
        """Threads of pairs of words."""
        return gl.BlockedLayout([1, 1, 1, 1, 2], [1, 4, 2, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])

    @property
    def four_layout(self) -> gl.BlockedLayout:
        """Threads of four words each."""
        return gl.BlockedLayout([1, 1, 1, 1, 4], [1, 4, 2, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])

    @property
    def stage_layout(self) -> gl.BlockedLayout:
        """Who copies what: what it multiplies itself."""
        warps = [1, self.num_warps, 1, 1, 1, 1]
        return gl.BlockedLayout([1, 1, 1, 1, 1, 4], [1, 1, 4, 2, 4, 1], warps, [5, 4, 3, 2, 1, 0])

    @property
    def line_layout(self) -> gl.BlockedLayout:
        """Threads of a line of 16 bytes each."""
        return gl.BlockedLayout([1], [32], [self.num_warps], [0])

    @property
    def sums_layout(self) -> gl.BlockedLayout:
        """Of the sums that wait: [tiles, warps, rows, halves], the warps' sums in one thread."""
        rows = self.half_rows
        warps = [self.num_warps, 1, 1, 1]
        return gl.BlockedLayout([1, self.num_warps, 1, 2], [32 // rows, 1, rows, 1], warps, [3, 2, 1, 0])

    @property
    def x_layout(self) -> gl.BlockedLayout:
        """Of a chunk of x: [groups, steps, halves, threads, neighbours] for INT4, else [groups, eights, neighbours]."""
        if self.kind == NIBBLES:
            return gl.BlockedLayout([1, 1, 2, 1, 4], [2, 4, 1, 4, 1], [self.num_warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])
        return gl.BlockedLayout([1, 1, 8], [4, 8, 1], [self.num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def axis_layout(axis, layout):
    """Of a tensor with one axis that is to become axis `axis` of those of `layout`."""
    for other in range(layout.rank - 1, -1, -1):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


FLOAT_BITS = gl.constexpr(8)
WHOLE_BITS = gl.constexpr(13)


@gluon.jit
def columns_of_chunk(SHAPE: gl.constexpr):
    """The columns of a chunk of x, as its layout has them."""
    LAYOUT: gl.constexpr = SHAPE.x_layout
    COLUMNS: gl.constexpr = SHAPE.group_columns
    group = gl.arange(0, SHAPE.chunk // COLUMNS, axis_layout(0, LAYOUT))
    if SHAPE.nibbles:
        return (
            group[:, None, None, None, None] * COLUMNS
            + gl.arange(0, 4, axis_layout(1, LAYOUT))[None, :, None, None, None] * 32
            + gl.arange(0, 2, axis_layout(2, LAYOUT))[None, None, :, None, None] * 16
            + gl.arange(0, 4, axis_layout(3, LAYOUT))[None, None, None, :, None] * 4
            + gl.arange(0, 4, axis_layout(4, LAYOUT))[None, None, None, None, :]
        )
    else:
        return (
            group[:, None, None] * COLUMNS
            + gl.arange(0, COLUMNS // 8, axis_layout(1, LAYOUT))[None, :, None] * 8
            + gl.arange(0, 8, axis_layout(2, LAYOUT))[None, None, :]
        )


@gluon.jit
def load_chunks(at, column, SHAPE: gl.constexpr):
    """All chunks of a row: all are on their way before the first is needed."""
    CHUNKS: gl.constexpr = SHAPE.columns // SHAPE.chunk
    found = ()
    for chunk in gl.static_range(CHUNKS):
        found += (gl.load(at + chunk * SHAPE.chunk + column),)
    return found


@gluon.jit
def put_inputs(memory, x, gains, SHAPE: gl.constexpr, NORM: gl.constexpr):
    """Chunks of x, times those of the norm's gain, to shared memory: words, what a group's products are to be
    multiplied by, and for INT4 the sums of its integers. Gives the squares of x, to be added up."""
    words, scales, totals = memory
    CHUNKS: gl.constexpr = SHAPE.columns // SHAPE.chunk
    squares = gl.zeros_like(x[0].to(gl.float32))
    made = ()
    for chunk in gl.static_range(CHUNKS):
        number = x[chunk].to(gl.float32)
        if NORM:
            squares += number * number
            number = number * gains[chunk].to(gl.float32)
        if SHAPE.e4m3:
            made += (_as_floats(number, SHAPE),)
        elif SHAPE.int8:
            made += (_as_bytes(number, SHAPE),)
        else:
            made += (_as_nibble_bytes(number, SHAPE),)
    for chunk in gl.static_range(CHUNKS):
        words.index(chunk).store(made[chunk][0])
        scales.index(chunk).store(made[chunk][1])
        if SHAPE.nibbles:
            totals.index(chunk).store(made[chunk][2])
    return squares


@gluon.jit
def _as_floats(x, SHAPE: gl.constexpr):
    """Pairs of fp16 numbers."""
    up, down = _scales(gl.max(gl.max(gl.abs(x), axis=2), axis=1), FLOAT_BITS)
    bits = (x * up[:, None, None]).to(gl.float16).to(gl.int16, bitcast=True)
    low, high = gl.split(gl.reshape(bits, [SHAPE.chunk // 2, 2]))
    return (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16), down


@gluon.jit
def _as_bytes(x, SHAPE: gl.constexpr):
    """Of a group four threads' high bytes, then their low ones, four neighbours to a word."""
    up, down = _scales(gl.max(gl.max(gl.abs(x), axis=2), axis=1), WHOLE_BITS)
    whole = _whole(x * up[:, None, None])
    low = _low_byte(whole)
    pieces = gl.reshape(gl.join((whole - low) >> 8, low), [SHAPE.chunk // 64, 4, 4, 4, 2])
    pieces = gl.permute(pieces, [0, 4, 1, 2, 3])  # group, piece, thread, word, byte
    return _pack_bytes(gl.reshape(pieces, [SHAPE.chunk // 2, 4])), down


@gluon.jit
def _as_nibble_bytes(x, SHAPE: gl.constexpr):
    """Likewise, in the order of w4_layout.py: the words that are multiplied with the even and the odd nibbles of a
    word."""
    up, down = _scales(gl.max(gl.max(gl.max(gl.max(gl.abs(x), axis=4), axis=3), axis=2), axis=1), WHOLE_BITS)
    whole = _whole(x * up[:, None, None, None, None])
    total = gl.sum(gl.sum(gl.sum(gl.sum(whole, axis=4), axis=3), axis=2), axis=1)
    low = _low_byte(whole)
    pieces = gl.reshape(gl.join((whole - low) >> 8, low), [SHAPE.chunk // 128, 4, 2, 4, 2, 2, 2])
    pieces = gl.permute(pieces, [0, 6, 3, 1, 4, 5, 2])  # group, piece, thread, step, even or odd, neighbour, half
    return _pack_bytes(gl.reshape(pieces, [SHAPE.chunk // 2, 4])), down, total.to(gl.float32)


@gluon.jit
def _scales(peak, BITS: gl.constexpr):
    """Powers of two that bring numbers up to `peak` below 2^(BITS + 1), and back."""
    exponent = gl.maximum((peak.to(gl.int32, bitcast=True) >> 23) - BITS, 27)
    up = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return up, (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _whole(x):
    """The nearest integer of a magnitude below 2^22: the low bits of its sum with 1.5 * 2^23."""
    return (x + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000


@gluon.jit
def _low_byte(whole):
    return ((whole + 128) & 255) - 128


@gluon.jit
def _pack_bytes(codes):
    """[N, 4] -> [N] words."""
    even, odd = gl.split(gl.reshape(codes, [codes.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (first & 255) | ((second & 255) << 8) | ((third & 255) << 16) | (fourth << 24)


_E4M3_NUMBERS = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
_CODE_PRODUCT = (
    "mma.sync.aligned.m16n8k32.row.col.s32.TYPE.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_INT8_PRODUCT = gl.constexpr(_CODE_PRODUCT.replace("TYPE", "s8"))
_NIBBLE_PRODUCT = gl.constexpr(_CODE_PRODUCT.replace("TYPE", "u8"))


@gluon.jit
def _split_two(two, SHAPE: gl.constexpr):
    LAYOUT: gl.constexpr = SHAPE.word_layout
    first, second = gl.split(two)
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def _load_four(memory, SHAPE: gl.constexpr):
    four = memory.load(SHAPE.four_layout)
    even, odd = gl.split(gl.reshape(four, [four.shape[0], four.shape[1], four.shape[2], four.shape[3], 2, 2]))
    first, third = _split_two(even, SHAPE)
    second, fourth = _split_two(odd, SHAPE)
    return first, second, third, fourth


@gluon.jit
def _ask(memory, pointers, places, tile, step, slot, SHAPE: gl.constexpr):
    """Have stage `step` of a tile copied to `slot`; of no tile, nothing. A group of copies either way."""
    ring, points = memory
    weight_ptr, points_ptr = pointers
    place, point_place = places
    UNITS: gl.constexpr = SHAPE.units * SHAPE.num_warps
    if tile < SHAPE.tiles:
        if SHAPE.nibbles:
            TILE: gl.constexpr = 16 * SHAPE.row_words
            of_rows = tile // 2 if SHAPE.gated else tile
            at = of_rows.to(gl.int64) * TILE + step * (UNITS * 256)
            if SHAPE.gated:
                at += tile % 2 * 128
            point_at = points_ptr + of_rows * (TILE // 16) + step * (UNITS * 16)
            copy(points.index(slot), point_at + point_place)
        else:
            at = tile.to(gl.int64) * (SHAPE.outputs * SHAPE.row_words) + step * (UNITS * SHAPE.ranges * 16)
        copy(ring.index(slot), weight_ptr + at + place)
    async_copy.commit_group()


@gluon.jit
def _multiply_unit(upper, lower, x, zeros, scale, total, points, SHAPE: gl.constexpr):
    """The products of 16 weight rows with x in the columns of a unit: what is added to the sums of rows g and g + 8."""
    if SHAPE.e4m3:
        found = zeros
        for word in gl.static_range(4):
            above = _e4m3_numbers(upper[word])
            below = _e4m3_numbers(lower[word])
            found = multiply(above[0], below[0], above[1], below[1], x[2 * word], x[2 * word + 1], found, True, True)
        return found[0] * scale, found[2] * scale
    elif SHAPE.int8:
        found = _multiply_codes(upper[0], lower[0], upper[1], lower[1], x[0], x[1], zeros, SHAPE)
        found = _multiply_codes(upper[2], lower[2], upper[3], lower[3], x[2], x[3], found, SHAPE)
        return _together(found[0], found[1]) * scale, _together(found[2], found[3]) * scale
    else:
        found = zeros
        for word in gl.static_range(4):
            found = _multiply_codes(
                upper[word] & 0x0F0F0F0F,
                lower[word] & 0x0F0F0F0F,
                (upper[word] >> 4) & 0x0F0F0F0F,
                (lower[word] >> 4) & 0x0F0F0F0F,
                x[2 * word],
                x[2 * word + 1],
                found,
                SHAPE,
            )
        above = (_together(found[0], found[1]) - half_to_float(points[0] >> 16) * total) * scale
        below = (_together(found[2], found[3]) - half_to_float(points[1] >> 16) * total) * scale
        return half_to_float(points[0]) * above, half_to_float(points[1]) * below


@gluon.jit
def _together(high, low):
    return (high * 256 + low).to(gl.float32)


@gluon.jit
def _e4m3_numbers(words):
    """Two pairs of fp16 numbers of four codes."""
    return gl.inline_asm_elementwise(_E4M3_NUMBERS, "=r,=r,r", [words], (gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _multiply_codes(a0, a1, a2, a3, b0, b1, c, SHAPE: gl.constexpr):
    return gl.inline_asm_elementwise(
        _INT8_PRODUCT if SHAPE.int8 else _NIBBLE_PRODUCT,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        (gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def stream_kernel(
    x_ptr,
    gain_ptr,
    weight_ptr,
    points_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    eps,
    SHAPE: gl.constexpr,
    NORM: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply one row of x by the tiles of the weight that belong to this program."""
    WARPS: gl.constexpr = SHAPE.num_warps
    WORD: gl.constexpr = SHAPE.word_layout
    UNITS: gl.constexpr = SHAPE.units
    BLOCKS: gl.constexpr = SHAPE.stage_blocks
    FOURS: gl.constexpr = SHAPE.x_words // 4
    CHUNKS: gl.constexpr = SHAPE.columns // SHAPE.chunk
    COUNT: gl.constexpr = UNITS * WARPS * 16  # scales and zeros of INT4 in a stage
    KEPT: gl.constexpr = SHAPE.kept_tiles
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    LESS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])

    # Shared memory, each part as it is written and as it is read.
    ring = gl.allocate_shared_memory(gl.int32, [SHAPE.stages, BLOCKS, WARPS, 4, 2, 4, 4], STAGED)
    RING_BLOCKS: gl.constexpr = [SHAPE.stages * BLOCKS, WARPS, 4, 2, 4, 4]
    blocks = view(ring, RING_BLOCKS, PLAIN)
    words = gl.allocate_shared_memory(gl.int32, [CHUNKS, SHAPE.chunk // 2], LINE)
    RANGES: gl.constexpr = SHAPE.ranges
    X_UNITS: gl.constexpr = [SHAPE.steps, WARPS, UNITS * RANGES, SHAPE.pieces, 4, SHAPE.x_words]
    x_units = view(words, X_UNITS, PLAIN)
    GROUPS: gl.constexpr = [SHAPE.steps, WARPS, UNITS, 1, RANGES]
    scales = gl.allocate_shared_memory(gl.float32, [CHUNKS, SHAPE.chunk // SHAPE.group_columns], LINE)
    unit_scales = view(scales, GROUPS, LESS)
    totals = scales
    unit_totals = unit_scales
    points = words
    point_units = x_units
    if SHAPE.nibbles:
        totals = gl.allocate_shared_memory(gl.float32, [CHUNKS, SHAPE.chunk // SHAPE.group_columns], LINE)
        unit_totals = view(totals, GROUPS, LESS)
        points = gl.allocate_shared_memory(gl.int32, [SHAPE.stages, SHAPE.point_sets * COUNT], LINE)
        POINTS: gl.constexpr = [SHAPE.stages * SHAPE.point_sets, WARPS, 4 * UNITS, 2, 1, 2]
        point_units = view(points, POINTS, PLAIN)
    ROWS: gl.constexpr = SHAPE.half_rows
    sums = gl.allocate_shared_memory(gl.float32, [KEPT, WARPS, ROWS, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    TILE_SUMS: gl.constexpr = [KEPT, WARPS, ROWS, 2]
    tile_sums = view(sums, TILE_SUMS, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    if SHAPE.spare > 0:
        LANES: gl.constexpr = 32 * WARPS
        spare = gl.allocate_shared_memory(gl.int32, [SHAPE.spare, LANES], LINE)
        spare.index(0).store(gl.full([LANES], 0, gl.int32, SHAPE.line_layout))

    memory = (ring, points)
    pointers = (weight_ptr, points_ptr)
    places = _places(SHAPE)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    next_tile = first
    next_step = first * 0
    AHEAD: gl.constexpr = SHAPE.stages - 1
    for ahead in gl.static_range(AHEAD):
        _ask(memory, pointers, places, next_tile, next_step, ahead, SHAPE)
        next_step += 1
        if next_step == SHAPE.steps:
            next_step = first * 0
            next_tile += programs
    scales_of_rows = _load_scales(first, scale_ptr, SHAPE)
    column = columns_of_chunk(SHAPE)
    gains = ()
    if NORM:
        gains = load_chunks(gain_ptr, column, SHAPE)
    allow_next(PDL)
    wait_for_previous(PDL)

    x_chunks = load_chunks(x_ptr, column, SHAPE)
    offsets = _load_offsets(first, bias_ptr, out_ptr, SHAPE, ADD, BIAS)  # long before they are needed
    squares = put_inputs((words, scales, totals), x_chunks, gains, SHAPE, NORM)
    zero = gl.full([WARPS, 4, 2, 4], 0.0, gl.float32, WORD)
    start = zero
    if not SHAPE.e4m3:
        start = gl.full([WARPS, 4, 2, 4], 0, gl.int32, WORD)
    zeros = (start, start, start, start)
    own = _own_range(SHAPE)
    slot = first * 0
    kept = first * 0
    begin = first
    for tile in range(first, SHAPE.tiles, programs):
        upper_sum = zero
        lower_sum = zero
        for step in range(SHAPE.steps):
            async_copy.wait_group(SHAPE.stages - 2)
            for unit in gl.static_range(UNITS):
                x = ()
                for four in gl.static_range(FOURS):
                    x += _load_four(x_units.index(step).slice(unit * RANGES, RANGES, 1).slice(four * 4, 4, 4), SHAPE)
                scale = unit_scales.index(step).slice(unit, 1, 1).load(WORD)
                if RANGES == 4:
                    scale = gl.where(own, scale, 0.0)
                total = scale
                its_points = zeros
                if SHAPE.nibbles:
                    total = unit_totals.index(step).slice(unit, 1, 1).load(WORD)
                    its_points = _points(point_units, slot * SHAPE.point_sets, unit, tile, SHAPE)
                upper = _load_four(blocks.index(slot * BLOCKS + unit), SHAPE)
                lower = _load_four(blocks.index(slot * BLOCKS + UNITS + unit), SHAPE)
                above, below = _multiply_unit(upper, lower, x, zeros, scale, total, its_points, SHAPE)
                upper_sum += above
                lower_sum += below
            # The slot before this one was read by all threads before they met at the wait above.
            free = gl.where(slot == 0, SHAPE.stages - 1, slot - 1)
            _ask(memory, pointers, places, next_tile, next_step, free, SHAPE)
            next_step += 1
            if next_step == SHAPE.steps:
                next_step = first * 0
                next_tile += programs
            slot += 1
            if slot == SHAPE.stages:
                slot = first * 0
        tile_sums.index(kept).store(_row_sums(upper_sum, lower_sum, SHAPE))
        kept += 1
        if kept == KEPT:
            factor = _factor(squares, eps, SHAPE, NORM)
            _flush(sums, begin, factor, scales_of_rows, offsets, out_ptr, SHAPE, ACTIVATION)
            kept = first * 0
            begin = tile + programs
            scales_of_rows = _load_scales(begin, scale_ptr, SHAPE)
            offsets = _load_offsets(begin, bias_ptr, out_ptr, SHAPE, ADD, BIAS)
    if kept > 0:
        factor = _factor(squares, eps, SHAPE, NORM)
        _flush(sums, begin, factor, scales_of_rows, offsets, out_ptr, SHAPE, ACTIVATION)


@gluon.jit
def _own_range(SHAPE: gl.constexpr):
    """Whether a thread's columns of a product, 2 t and 2 t + 1, are of the range of its rows, g and g + 8."""
    LAYOUT: gl.constexpr = SHAPE.word_layout
    higher = gl.arange(0, 4, axis_layout(1, LAYOUT))[None, :, None, None]
    lower = gl.arange(0, 2, axis_layout(2, LAYOUT))[None, None, :, None]
    thread = gl.arange(0, 4, axis_layout(3, LAYOUT))[None, None, None, :]
    warp = gl.arange(0, SHAPE.num_warps, axis_layout(0, LAYOUT))[:, None, None, None]
    return (higher % 2 * 2 + lower == thread) & (warp >= 0)


@gluon.jit
def _row_sums(upper, lower, SHAPE: gl.constexpr):
    """What the threads hold of a tile -> [warps, rows, halves]."""
    both = gl.convert_layout(gl.join(upper, lower), SHAPE.pair_layout, assert_trivial=True)
    if SHAPE.ranges == 1:  # the four threads of a row hold the same
        return gl.reshape(gl.max(both, axis=3), [SHAPE.num_warps, 8, 2])
    else:
        by_row = gl.reshape(gl.sum(gl.sum(both, axis=3), axis=2), [SHAPE.num_warps, 2, 2, 2])
        return gl.sum(by_row, axis=2)


@gluon.jit
def _places(SHAPE: gl.constexpr):
    """Where the words of a stage lie, from its first one on, and the scales and zeros of INT4."""
    STAGE: gl.constexpr = SHAPE.stage_layout
    WARPS: gl.constexpr = SHAPE.num_warps
    block = gl.arange(0, SHAPE.stage_blocks, axis_layout(0, STAGE))[:, None, None, None, None, None]
    warp = gl.arange(0, WARPS, axis_layout(1, STAGE))[None, :, None, None, None, None]
    group = (
        gl.arange(0, 4, axis_layout(2, STAGE))[None, None, :, None, None, None] * 2
        + gl.arange(0, 2, axis_layout(3, STAGE))[None, None, None, :, None, None]
    )
    word = (
        gl.arange(0, 4, axis_layout(4, STAGE))[None, None, None, None, :, None] * 4
        + gl.arange(0, 4, axis_layout(5, STAGE))[None, None, None, None, None, :]
    )
    unit = warp * SHAPE.units + block % SHAPE.units
    half = block // SHAPE.units
    if SHAPE.nibbles:
        COUNT: gl.constexpr = SHAPE.units * WARPS * 16
        half_words: gl.constexpr = SHAPE.width * SHAPE.row_words if SHAPE.gated else 128
        entry = gl.arange(0, SHAPE.point_sets * COUNT, SHAPE.line_layout)
        point_place = entry % COUNT + entry // COUNT * (SHAPE.width * (SHAPE.columns // 128))
        return unit * 256 + half * half_words + group * 16 + word, point_place
    else:
        half_rows: gl.constexpr = SHAPE.width if SHAPE.gated else SHAPE.half_rows
        row = half * half_rows + group // SHAPE.ranges
        return row * SHAPE.row_words + (unit * SHAPE.ranges + group % SHAPE.ranges) * 16 + word, 0


@gluon.jit
def _factor(squares, eps, SHAPE: gl.constexpr, NORM: gl.constexpr):
    """What all sums of the row are to be multiplied by."""
    factor = 1.0
    if NORM:
        factor = gl.rsqrt(gl.sum(gl.reshape(squares, [SHAPE.chunk]), axis=0) / SHAPE.columns + eps)
    return factor


@gluon.jit
def _points(memory, at, unit: gl.constexpr, tile, SHAPE: gl.constexpr):
    """Scale and zero of the two weight rows of a thread in a unit."""
    first, second = _split_two(memory.index(at).slice(4 * unit, 4, 1).load(SHAPE.pair_layout), SHAPE)
    if SHAPE.gated:
        third, fourth = _split_two(memory.index(at + 1).slice(4 * unit, 4, 1).load(SHAPE.pair_layout), SHAPE)
        odd = tile % 2 != 0
        return gl.where(odd, second, first), gl.where(odd, fourth, third)
    else:
        return first, second


@gluon.jit
def _outputs(begin, SHAPE: gl.constexpr):
    """The outputs of the tiles whose sums wait, [tiles, rows, halves] (gate and up where gated); which exist."""
    OUT: gl.constexpr = gl.SliceLayout(1, SHAPE.sums_layout)
    tile = begin + gl.arange(0, SHAPE.kept_tiles, axis_layout(0, OUT))[:, None, None] * gl.num_programs(0)
    row = gl.arange(0, SHAPE.half_rows, axis_layout(1, OUT))[None, :, None]
    half = gl.arange(0, 2, axis_layout(2, OUT))[None, None, :]
    n = tile * SHAPE.outputs + row + half * (SHAPE.width if SHAPE.gated else SHAPE.half_rows)
    return n, (tile < SHAPE.tiles) & (row + half >= 0)


@gluon.jit
def _load_scales(begin, scale_ptr, SHAPE: gl.constexpr):
    """Of the weight rows of the tiles from `begin` on."""
    n, there = _outputs(begin, SHAPE)
    if SHAPE.nibbles:
        return gl.full(n.shape, 1.0, gl.float32, n.type.layout)
    else:
        return gl.load(scale_ptr + n, mask=there, other=0.0)


@gluon.jit
def _load_offsets(begin, bias_ptr, out_ptr, SHAPE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr):
    """What is added to the sums of the tiles from `begin` on."""
    n, there = _outputs(begin, SHAPE)
    offset = gl.full(n.shape, 0.0, gl.float32, n.type.layout)
    if BIAS:
        offset += gl.load(bias_ptr + n, mask=there, other=0.0).to(gl.float32)
    if ADD:
        offset += gl.load(out_ptr + n, mask=there, other=0.0).to(gl.float32)
    return offset


@gluon.jit
def _flush(sums, begin, factor, scale, offset, out_ptr, SHAPE: gl.constexpr, ACTIVATION: gl.constexpr):
    """Add up over the warps what they put down for the tiles from `begin` on, and store the outputs."""
    OUT: gl.constexpr = gl.SliceLayout(1, SHAPE.sums_layout)
    n, there = _outputs(begin, SHAPE)
    result = gl.sum(sums.load(SHAPE.sums_layout), axis=1) * (scale * factor) + offset
    if SHAPE.gated:
        ONE: gl.constexpr = gl.SliceLayout(2, OUT)
        left, right = gl.split(result)
        result = gl.convert_layout(gate(left, ACTIVATION) * right, ONE, assert_trivial=True)
        tile = begin + gl.arange(0, SHAPE.kept_tiles, axis_layout(0, ONE))[:, None] * gl.num_programs(0)
        n = tile * SHAPE.outputs + gl.arange(0, SHAPE.half_rows, axis_layout(1, ONE))[None, :]
        there = n < SHAPE.width
    gl.store(out_ptr + n, result.to(gl.bfloat16), mask=there)


# -- launch ------------------------------------------------------------------------------------------------------------

# Two of these kernels fit on a multiprocessor of 228 KiB, but never two programs of one that adds to a residual.
# Every second kernel of a decoder is such a one, and beside it there is room for one program of the next.
MOST_ADDING_BYTES, FEWEST_ADDING_BYTES, MOST_OTHER_BYTES = 116 << 10, 114 << 10, 110 << 10
FEWEST_STAGES, MOST_STAGES, MOST_SUMS = 4, 12, 128
# Warps, units of a warp in a stage, ranges: the first that fits is taken. INT4 lies together as it is stored.
WAYS = ((8, 2, 4), (8, 1, 4), (8, 2, 1), (8, 1, 1), (4, 2, 1), (4, 1, 1))


def stream_shape(
    x: torch.Tensor, weight: ByteWeight | NibbleWeight, *, gated: bool = False, adds: bool = False
) -> GemvShape | None:
    """Return how to multiply x [1, K] by the weight, adding to a residual or not; None where the kernel cannot."""
    if x.shape[0] != 1 or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    multiprocessors = num_multiprocessors(x.device)
    if isinstance(weight, NibbleWeight):
        if weight.parts != 1:
            return None
        return find_shape(NIBBLES, weight.rows, weight.columns, gated, adds, multiprocessors)
    if weight.block_rows:
        return None
    kind = INT8 if weight.codes.dtype == torch.int8 else E4M3
    return find_shape(kind, *weight.codes.shape, gated, adds, multiprocessors)


def stream_product(
    x: torch.Tensor,
    weight: Any,  # ByteWeight or NibbleWeight
    shape: GemvShape,
    *,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """Multiply x [1, K] -> [1, N], or [1, N / 2] when gated by an activation of activation.py. `gain` [K]: x is
    RMS-normed first. `residual` [1, N]: added in place and returned."""
    out = x.new_empty(1, shape.width) if residual is None else residual
    nibbles = isinstance(weight, NibbleWeight)
    stream_kernel[(min(shape.tiles, num_multiprocessors(x.device)),)](
        x,
        x if gain is None else gain,
        weight.words if nibbles else weight.codes.view(torch.int32),
        weight.points if nibbles else weight.scales,
        weight.points if nibbles else weight.scales,
        x if bias is None else bias,
        out,
        eps,
        SHAPE=shape,
        NORM=gain is not None,
        ADD=residual is not None,
        BIAS=bias is not None,
        ACTIVATION=gated or 0,
        num_warps=shape.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@lru_cache(maxsize=1024)
def find_shape(kind: int, rows: int, columns: int, gated: bool, adds: bool, multiprocessors: int) -> GemvShape | None:
    """Return how to share out a weight [rows, columns]; None where nothing divides evenly or the ring is too short."""
    if rows % 32 or columns % 128:
        return None
    room = MOST_ADDING_BYTES if adds else MOST_OTHER_BYTES
    for num_warps, units, ranges in WAYS:
        if ranges > 1 and kind == NIBBLES:
            continue
        shape = GemvShape(kind, rows // 2 if gated else rows, columns, gated, num_warps, units, ranges, 0, 0)
        rounds = triton.cdiv(shape.tiles, multiprocessors)
        kept = max(2, min(MOST_SUMS // shape.half_rows, triton.next_power_of_2(rounds)))
        shape = dataclasses.replace(shape, kept_tiles=kept)
        stages = min(MOST_STAGES, (room - shape.fixed_bytes) // shape.stage_bytes)
        if stages < FEWEST_STAGES or columns % (shape.unit_columns * num_warps * units):
            continue
        used = shape.fixed_bytes + stages * shape.stage_bytes
        spare = triton.cdiv(FEWEST_ADDING_BYTES - used, 128 * num_warps) if adds else 0
        return dataclasses.replace(shape, stages=stages, spare=max(0, spare))
    return None
