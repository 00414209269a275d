"""Prefill attention for Hopper: one warp loads, two or three groups of four warps compute. Contract: prefill.py.

A program stays on its multiprocessor and takes one tile after the other: queries of one row with the heads of one KV
head packed beside each other, 64 rows (tokens x heads) to each computing group. The heads that are packed are a power
of two. Where a KV head has another number of heads, they are cut into sets of the largest power of two that divides it,
and each computing group takes one set, for as many tokens as make 64 rows: 5 heads padded to 8 would cost 8 rows a
token. In short steps, whose rows may have few tokens, they are padded.

The loading warp takes tiles from a counter that all programs share, the longest of a row first and the next one when
it is nearly through with this one, passes them to the computing groups, and runs ahead of them with the tensor memory
accelerator (TMA) as far as shared memory has room. Where few tiles would leave the device idle, several programs share
the keys of each, and the last one to arrive adds up their sums; the number is decided on the device, which knows the
rows of a captured step and their contexts. The groups share the keys and values. Two take turns to multiply: one
computes its softmax while the other uses the tensor cores, and within a group the scores of the next block are
multiplied before the values of the last one, so that its softmax overlaps a product as well. Where heads are so small
that the softmax takes as long as both products, three groups have registers for one block each, which they compute
from end to end: while one multiplies, two are at their softmax.

Blocks of keys are walked from the diagonal down, so that only the first ones are masked. Apart from how many programs
share its keys, a query's result depends on nothing but its own row: masked and unmasked blocks do the same arithmetic,
and blocks without a visible key add zeros.

Written in Gluon, Triton's lower level: plain Triton of these versions cannot give warps different work on Hopper.
Source: FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inferengine.kernels.cuda.attention.row_tiles import find_row
from inferengine.kernels.cuda.dispatch import HopperPrefillConfig, hopper_prefill_config
from inferengine.kernels.cuda.gemm.hopper import block_barrier, is_hopper, load_piece, num_multiprocessors, view
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch

GROUP_ROWS = gl.constexpr(64)  # rows of a computing group: what an instruction of the tensor cores takes
LINES = gl.constexpr(64)  # keys or values of one copy; they lie within one block of the cache
COLUMNS = gl.constexpr(64)  # columns of one copy: 128 bytes, the width of the swizzle
TOKEN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LEAST_BLOCKS = gl.constexpr(8)  # of keys that a split of a tile is worth
MOST_ROWS = gl.constexpr(1024)  # of a step whose tiles are split
LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True)
class PrefillShape:
    """What the kernel is compiled for."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    block_tokens: int  # keys of a step
    stages: int  # blocks of keys and of values in shared memory
    groups: int  # computing groups: 2 or 3
    window: bool
    softcap: bool
    sinks: bool = False
    most_splits: int = 1  # programs that may share a tile's keys
    packs: bool = True  # all heads of a KV head beside each other, padded to a power of two; else in sets of fewer

    @property
    def split(self) -> bool:
        """Whether several programs may share a tile's keys."""
        return self.most_splits > 1

    @property
    def packed_group(self) -> int:
        """Rows of a token: a copy holds a power of two of heads, those behind the group's are not stored."""
        return int(triton.next_power_of_2(self.group)) if self.packs else self.group & -self.group

    @property
    def head_sets(self) -> int:
        """Sets of heads of a KV head, each in rows of its own."""
        return 1 if self.packs else self.group // self.packed_group

    @property
    def tiles_of_tokens(self) -> int:
        """Tiles of the same tokens: each computing group of each has one set of heads of some of them."""
        return self.kv_heads * self.head_sets

    @property
    def columns(self) -> int:
        """Columns of a row in shared memory: those behind the head dimension are zeros."""
        return max(int(COLUMNS.value), int(triton.next_power_of_2(self.head_dim)))

    @property
    def query_buffers(self) -> int:
        """Tiles of queries in shared memory."""
        return 1 if self.columns > 128 else 2

    @property
    def tokens(self) -> int:
        """Tokens of a computing group's rows."""
        return int(GROUP_ROWS.value) // self.packed_group

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Registers of a computing group's scores."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.block_tokens, 16])

    @property
    def sum_layout(self) -> gl.NVMMADistributedLayout:
        """Registers of a computing group's weighted sums."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.columns, 16])

    @property
    def weight_layout(self) -> gl.DotOperandLayout:
        """Registers of the softmax weights as the left operand of a product."""
        return gl.DotOperandLayout(0, self.sum_layout, 2)

    @property
    def store_layout(self) -> gl.BlockedLayout:
        """Registers of results that are stored to global memory."""
        return gl.BlockedLayout([1, 8], [256 // self.columns, self.columns // 8], [4, 1], [1, 0])


@gluon.jit
def _splits_to_fill(rows, most, SHAPE: gl.constexpr):
    """(Tiles up to the last row that has queries, splits of each): of the numbers of splits up to `most` the first that
    leaves less than a tenth of the card idle, or else the one that leaves least; no more than contexts are worth."""
    row_start_ptr, query_start_ptr, first_row, num_rows, _num_tiles, _window, _splits = rows
    TOKENS: gl.constexpr = SHAPE.groups * SHAPE.tokens
    row = gl.arange(0, MOST_ROWS, gl.BlockedLayout([8], [32], [4], [0]))
    mask = row < num_rows
    begin = gl.load(query_start_ptr + first_row + row, mask=mask, other=0)
    count = gl.load(query_start_ptr + first_row + row + 1, mask=mask, other=0) - begin
    end = gl.load(row_start_ptr + first_row + row, mask=mask, other=0) + count
    blocks = gl.max(gl.where(count > 0, (end - 1) // SHAPE.block_tokens + 1, 1), axis=0)
    filled = gl.sum((count + TOKENS - 1) // TOKENS, axis=0) * SHAPE.tiles_of_tokens
    last_row = gl.max(gl.where(count > 0, row + 1, 0), axis=0)
    num_tiles = gl.sum(count, axis=0) // TOKENS + last_row
    programs = gl.num_programs(0)
    most = gl.minimum(most, gl.cdiv(blocks, LEAST_BLOCKS))
    splits = 1
    best = 0
    for each in gl.static_range(1, SHAPE.most_splits + 1):
        units = filled * each
        share = units * 100 // (gl.maximum(gl.cdiv(units, programs), 1) * programs)  # of the card, percent
        better = (each <= most) & (best < 90) & (share > best + 2)
        splits = gl.where(better, each, splits)
        best = gl.where(better, share, best)
    return num_tiles, splits


@gluon.jit
def tile_at(place, rows, SHAPE: gl.constexpr):
    """Tile `place` of all: (whether anything is in it, KV head, row, first query of the row, its queries, position of
    the first, first token of the tile, last token, first block of keys, last block, its number, split, splits that
    take part, `first_rows` of `rows_of`). The longest tiles come first: rows as the scheduler orders them, those that
    have come furthest in front, and each row from its end."""
    row_start_ptr, query_start_ptr, first_row, num_rows, _num_tiles, window, splits = rows
    TOKENS: gl.constexpr = SHAPE.groups * SHAPE.tokens
    SETS: gl.constexpr = SHAPE.head_sets
    among = place % SHAPE.tiles_of_tokens
    kv_head = among // SETS
    part = among % SETS * SHAPE.groups  # the first of the tile's, among groups x sets for the same tokens
    rest = place // SHAPE.tiles_of_tokens
    tile = rest // splits if SHAPE.split else rest
    row, row_tile = find_row(query_start_ptr, first_row, num_rows, tile, TOKENS)
    first_query = gl.load(query_start_ptr + row)
    count = gl.load(query_start_ptr + row + 1) - first_query
    start = gl.load(row_start_ptr + row)
    from_end = gl.cdiv(count, TOKENS) - 1 - row_tile
    of_all = gl.maximum(from_end, 0) * TOKENS
    first_token = of_all + part // SETS * SHAPE.tokens
    last_token = gl.minimum(of_all + ((part + SHAPE.groups - 1) // SETS + 1) * SHAPE.tokens, count) - 1
    valid = (from_end >= 0) & (first_token < count)
    first_block = 0
    if SHAPE.window:
        first_block = gl.maximum(start + first_token - window + 1, 0) // SHAPE.block_tokens
    last_block = (start + last_token) // SHAPE.block_tokens
    split = 0
    active = 1
    if SHAPE.split:  # split 0 has the diagonal; as equal as whole blocks get
        split = rest % splits
        blocks = gl.maximum(last_block + 1 - first_block, 1)
        wanted = gl.minimum(splits, gl.cdiv(blocks, LEAST_BLOCKS))
        per_split = gl.cdiv(blocks, wanted)
        active = gl.cdiv(blocks, per_split)
        valid = valid & (split < active)
        last_block -= split * per_split
        first_block = gl.maximum(first_block, last_block + 1 - per_split)
    return (
        valid, kv_head, row, first_query, count, start, first_token, last_token, first_block, last_block,
        tile * SHAPE.tiles_of_tokens + among, split, active, (of_all, part),
    )  # fmt: skip


@gluon.jit
def rows_of(first_rows, kv_head, part: gl.constexpr, SHAPE: gl.constexpr):
    """(First token, first head) of the rows of a tile's computing group."""
    of_all, first_part = first_rows
    SETS: gl.constexpr = SHAPE.head_sets
    number = first_part + part
    return (
        of_all + number // SETS * SHAPE.tokens,
        kv_head * SHAPE.group + number % SETS * SHAPE.packed_group,
    )


@gluon.jit
def _hand_out(place, tiles, places, place_ready, place_free):
    """The loading warp tells the computing groups which tile comes next."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = tiles & 1
    mbarrier.wait(place_free.index(slot), ((tiles >> 1) & 1) ^ 1)
    places.index(slot).store(gl.full([1], 0, gl.int32, ONE) + place)
    mbarrier.arrive(place_ready.index(slot))


@gluon.jit
def take_place(tiles, places, place_ready, place_free):
    """Return the next tile that the loading warp handed out."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = tiles & 1
    mbarrier.wait(place_ready.index(slot), (tiles >> 1) & 1)
    place = gl.max(places.index(slot).load(ONE), axis=0)
    mbarrier.arrive(place_free.index(slot))
    return place


@gluon.jit
def _load_block(kv, table_row, key, last_page, head_line, ready, slots, SHAPE: gl.constexpr, slot):
    """Keys or values [block_tokens, head_dim], copied in pieces of 64 x 64; the pieces lie as the whole is laid out."""
    PARTS: gl.constexpr = SHAPE.block_tokens // LINES
    CHUNKS: gl.constexpr = SHAPE.columns // COLUMNS
    mbarrier.expect(ready, SHAPE.block_tokens * SHAPE.columns * 2)
    for part in gl.static_range(PARTS):
        at = key + part * LINES
        block = gl.load(table_row + gl.minimum(at // SHAPE.block_size, last_page))  # behind the row's end: masked
        line = block * (2 * SHAPE.kv_heads * SHAPE.block_size) + head_line + at % SHAPE.block_size
        for chunk in gl.static_range(CHUNKS):
            load_piece(kv, [line, chunk * COLUMNS], ready, slots.index((slot * CHUNKS + chunk) * PARTS + part))


@gluon.jit
def load_all(q, kv, table, rows, slots, barriers, SHAPE: gl.constexpr):
    """The loading warp."""
    row_slot_ptr, table_ptr, table_stride, counter_ptr = table
    q_slots, k_slots, v_slots, places = slots
    q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free = barriers
    CHUNKS: gl.constexpr = SHAPE.columns // COLUMNS
    BUFFERS: gl.constexpr = SHAPE.query_buffers
    GROUPS: gl.constexpr = SHAPE.groups
    programs = gl.num_programs(0)
    limit = rows[4] * SHAPE.tiles_of_tokens
    if SHAPE.split:
        limit *= rows[6]
    step = 0
    tiles = 0
    place = gl.program_id(0)
    while place < limit:
        found = tile_at(place, rows, SHAPE)
        valid, kv_head, row, first_query, _count, start, _first, last_token, first_block, last_block = found[:10]
        if valid:
            _hand_out(place, tiles, places, place_ready, place_free)
            for part in gl.static_range(GROUPS):
                slot = (tiles % BUFFERS) * GROUPS + part
                mbarrier.wait(q_free.index(slot), ((tiles // BUFFERS) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), GROUP_ROWS * SHAPE.columns * 2)
                token, head = rows_of(found[13], kv_head, part, SHAPE)
                for chunk in gl.static_range(CHUNKS):
                    at = [first_query + token, head, chunk * COLUMNS]
                    load_piece(q, at, q_ready.index(slot), q_slots.index(slot * CHUNKS + chunk))
            tiles += 1
            table_row = table_ptr + gl.load(row_slot_ptr + row).to(gl.int64) * table_stride
            last_page = (start + last_token) // SHAPE.block_size
            blocks = last_block + 1 - first_block
            for i in range(blocks):
                if i == gl.maximum(blocks - 2, 0):  # not before: it belongs to the program that is free first
                    place = gl.atomic_add(counter_ptr, 1) + programs
                key = (last_block - i) * SHAPE.block_tokens
                stage = step % SHAPE.stages
                phase = ((step // SHAPE.stages) & 1) ^ 1
                head_line = kv_head * SHAPE.block_size
                mbarrier.wait(k_free.index(stage), phase)
                _load_block(kv, table_row, key, last_page, head_line, k_ready.index(stage), k_slots, SHAPE, stage)
                head_line += SHAPE.kv_heads * SHAPE.block_size
                mbarrier.wait(v_free.index(stage), phase)
                _load_block(kv, table_row, key, last_page, head_line, v_ready.index(stage), v_slots, SHAPE, stage)
                step += 1
        else:
            place = gl.atomic_add(counter_ptr, 1) + programs
    _hand_out(limit, tiles, places, place_ready, place_free)
    if gl.atomic_add(counter_ptr + 1, 1) == programs - 1:  # the last to finish leaves the counters as they were
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def _sigmoid_log2(x):
    """1 / (1 + 2 ** -x) by the approximate reciprocal (1 unit in the last place): a division takes five instructions
    more. Where the power overflows to inf, it is 0."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(-x)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _softmax(score, peak, total, block, query_position, numbers, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """Scores [64, block_tokens] -> weights relative to the running maximum `peak` (in log2), whose sum is `total`. With
    a softcap `peak` is too large by softcap * LOG2E: what all scores have in common does not change their weights."""
    LOG2E: gl.constexpr = 1.4426950408889634
    scale, softcap, window = numbers
    to_log2 = scale * LOG2E
    if SHAPE.softcap:  # softcap * tanh(x / softcap) is 2 * softcap * sigmoid(2 * x / softcap) less softcap
        score = _sigmoid_log2(score * (2.0 * to_log2 / softcap))
        to_log2 = 2.0 * softcap * LOG2E
    if MASKED:
        key = block * SHAPE.block_tokens + gl.arange(0, SHAPE.block_tokens, gl.SliceLayout(0, score.type.layout))
        visible = key[None, :] <= query_position[:, None]
        if SHAPE.window:
            visible = visible & (key[None, :] > query_position[:, None] - window)
        score = gl.where(visible, score, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(score, axis=1) * to_log2)
    if MASKED:  # where a query has seen no key yet: -inf less -inf would be no number
        new_peak = gl.maximum(new_peak, -1.0e30)
    shrink = gl.exp2(peak - new_peak)
    weight = gl.exp2(score * to_log2 - new_peak[:, None])
    return weight, new_peak, total * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def _step(state, step, block, q, keys, values, barriers, part: gl.constexpr, query_position, numbers,
          SHAPE: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of `block`. With two groups the weighted values of the block before it, with three its own."""
    if SHAPE.groups == 3:
        state = _whole_step(state, step, block, q, keys, values, barriers, query_position, numbers, SHAPE, MASKED)
    else:
        state = _overlapped_step(
            state, step, block, q, keys, values, barriers, part, query_position, numbers, SHAPE, MASKED
        )
    return state


@gluon.jit
def _whole_step(state, step, block, q, keys, values, barriers, query_position, numbers, SHAPE: gl.constexpr,
                MASKED: gl.constexpr):  # fmt: skip
    """Scores of `block`, their softmax and the weighted values."""
    acc, none, peak, total = state
    k_ready, k_free, v_ready, v_free, _turn = barriers
    SCORES: gl.constexpr = SHAPE.score_layout
    SUMS: gl.constexpr = SHAPE.sum_layout
    WEIGHTS: gl.constexpr = SHAPE.weight_layout
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    stage = step % SHAPE.stages
    phase = (step // SHAPE.stages) & 1
    mbarrier.wait(k_ready.index(stage), phase)
    zeros = gl.zeros([GROUP_ROWS, BLOCK_T], gl.float32, SCORES)
    score = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(k_free.index(stage))
    weight, peak, total, shrink = _softmax(score, peak, total, block, query_position, numbers, SHAPE, MASKED)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    weight = gl.convert_layout(weight.to(keys.dtype), WEIGHTS)
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(weight, values.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(stage))
    return acc, none, peak, total


@gluon.jit
def _overlapped_step(state, step, block, q, keys, values, barriers, part: gl.constexpr, query_position, numbers,
                     SHAPE: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of `block`, and the weighted values of the block before it."""
    acc, weight, peak, total = state
    k_ready, k_free, v_ready, v_free, turn = barriers
    SCORES: gl.constexpr = SHAPE.score_layout
    SUMS: gl.constexpr = SHAPE.sum_layout
    WEIGHTS: gl.constexpr = SHAPE.weight_layout
    stage = step % SHAPE.stages
    phase = (step // SHAPE.stages) & 1
    before = (step - 1) % SHAPE.stages
    mbarrier.wait(k_ready.index(stage), phase)
    mbarrier.wait(turn.index(part), step & 1)
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    zeros = gl.zeros([GROUP_ROWS, BLOCK_T], gl.float32, SCORES)
    score = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    weight = gl.convert_layout(weight.to(keys.dtype), WEIGHTS)
    acc = warpgroup_mma(weight, values.index(before), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - part))
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(k_free.index(stage))
    weight, peak, total, shrink = _softmax(score, peak, total, block, query_position, numbers, SHAPE, MASKED)
    # Needed by the next step only; waited for here because the assembler moves no arithmetic over its branch: it would
    # put the softmax behind the end of the products that it is to run beside.
    mbarrier.wait(v_ready.index(stage), phase)
    acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    return acc, weight, peak, total


@gluon.jit
def _combine(acc, total, peak, place, parts, unit, SHAPE: gl.constexpr):
    """Store this split's sums; the last split of a tile to arrive returns those of all, in their order, their peak, and
    true."""
    first_head, first_query, token, count, split, active, splits = place
    partial_ptr, peak_ptr = parts
    SUMS: gl.constexpr = SHAPE.sum_layout
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    COLS: gl.constexpr = SHAPE.columns
    GROUP: gl.constexpr = SHAPE.packed_group
    i = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SUMS))
    d = gl.arange(0, COLS, gl.SliceLayout(0, SUMS))
    mine = token + i // GROUP
    mask = (mine < count) & (i % GROUP < SHAPE.group)
    mask_2d = mask[:, None] & (d < HEAD_DIM)[None, :]
    line = ((first_query + mine) * (SHAPE.kv_heads * SHAPE.group) + first_head + i % GROUP) * splits
    gl.store(partial_ptr + ((line + split) * HEAD_DIM)[:, None] + d[None, :], acc, mask=mask_2d)
    gl.store(peak_ptr + (line + split) * 2, peak, mask=mask)
    gl.store(peak_ptr + (line + split) * 2 + 1, total, mask=mask)
    block_barrier()
    last = gl.atomic_add(unit, 1, sem="acq_rel", scope="gpu") == active - 1
    if last:
        block_barrier()
        gl.store(unit, 0)
        peak = gl.full([GROUP_ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SUMS))
        total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, SUMS))
        acc = gl.zeros([GROUP_ROWS, COLS], gl.float32, SUMS)
        for each in range(active):
            at = line + each
            part = gl.load(
                partial_ptr + (at * HEAD_DIM)[:, None] + d[None, :], mask=mask_2d, other=0.0, cache_modifier=".cg"
            )
            part_peak = gl.load(peak_ptr + at * 2, mask=mask, other=-1.0e30, cache_modifier=".cg")
            part_total = gl.load(peak_ptr + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
            new_peak = gl.maximum(peak, part_peak)
            shrink = gl.exp2(peak - new_peak)
            weight = gl.exp2(part_peak - new_peak)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            peak = new_peak
    return acc, total, peak, last


@gluon.jit
def _compute(part: gl.constexpr, rows, shared, barriers, numbers, v_scale, outputs, SHAPE: gl.constexpr):
    """Compute the 64 rows of one of the computing groups, of every tile."""
    queries, keys, values, places = shared
    q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free, turn = barriers
    of_step = (k_ready, k_free, v_ready, v_free, turn)
    SCORES: gl.constexpr = SHAPE.score_layout
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    COLS: gl.constexpr = SHAPE.columns
    GROUP: gl.constexpr = SHAPE.packed_group
    BUFFERS: gl.constexpr = SHAPE.query_buffers
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    SUMS: gl.constexpr = SHAPE.sum_layout
    WEIGHTS: gl.constexpr = SHAPE.weight_layout
    STORE: gl.constexpr = SHAPE.store_layout
    ROW: gl.constexpr = gl.SliceLayout(1, SHAPE.score_layout)
    LOG2E: gl.constexpr = 1.4426950408889634
    out_ptr, partial_ptr, peak_ptr, arrived_ptr, sinks_ptr = outputs
    limit = rows[4] * SHAPE.tiles_of_tokens
    base = 0
    if SHAPE.split:
        limit *= rows[6]
        base = gl.load(rows[1] + rows[2])
    step = 0
    tiles = 0
    if part == 1:
        mbarrier.arrive(turn.index(0))
    place = take_place(tiles, places, place_ready, place_free)
    tile = tile_at(place, rows, SHAPE)
    while place < limit:
        _, kv_head, _, first_query, count, start, first_token, last_token, first_block, last_block = tile[:10]
        number, split, active, first_rows = tile[10:]
        # Blocks [whole, diagonal) need no mask; the last block is masked anyway.
        diagonal = (start + first_token + 1) // BLOCK_T
        whole = 0
        if SHAPE.window:
            whole = gl.maximum(gl.cdiv(start + last_token - rows[5] + 1, BLOCK_T), 0)
        token, first_head = rows_of(first_rows, kv_head, part, SHAPE)
        query_position = start + token + gl.arange(0, GROUP_ROWS, ROW) // GROUP
        peak = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([GROUP_ROWS], gl.float32, ROW)
        acc = gl.zeros([GROUP_ROWS, COLS], gl.float32, SUMS)

        slot = (tiles % BUFFERS) * SHAPE.groups + part
        q = queries.index(slot)
        mbarrier.wait(q_ready.index(slot), (tiles // BUFFERS) & 1)
        # The first block is apart from the loops, with three groups too: without a wgmma that is certain to run, ptxas
        # 12.8 computes what the descriptors of all loops begin with in a loop that a split of a tile may leave out.
        if SHAPE.groups == 3:
            state = (acc, total, peak, total)  # whole steps carry no weights: any tensor will do
            state = _step(state, step, last_block, q, keys, values, of_step, part, query_position, numbers, SHAPE, True)
        else:
            stage = step % SHAPE.stages
            phase = (step // SHAPE.stages) & 1
            mbarrier.wait(k_ready.index(stage), phase)
            mbarrier.wait(turn.index(part), step & 1)
            zeros = gl.zeros([GROUP_ROWS, BLOCK_T], gl.float32, SCORES)
            score = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - part))
            score = warpgroup_mma_wait(0, deps=[score])
            mbarrier.arrive(k_free.index(stage))
            weight, peak, total, _ = _softmax(score, peak, total, last_block, query_position, numbers, SHAPE, True)
            mbarrier.wait(v_ready.index(stage), phase)
            state = (acc, weight, peak, total)
        last_step = step + last_block  # block b is in step `last_step - b`
        for block in range(last_block - 1, gl.maximum(diagonal, first_block) - 1, -1):
            state = _step(
                state, last_step - block, block, q, keys, values, of_step, part, query_position, numbers, SHAPE, True
            )
        for block in range(gl.minimum(last_block, diagonal) - 1, gl.maximum(whole, first_block) - 1, -1):
            state = _step(
                state, last_step - block, block, q, keys, values, of_step, part, query_position, numbers, SHAPE, False
            )
        if SHAPE.window:
            for block in range(gl.minimum(gl.minimum(last_block, diagonal), whole) - 1, first_block - 1, -1):
                state = _step(
                    state, last_step - block, block, q, keys, values, of_step, part, query_position, numbers, SHAPE,
                    True,
                )  # fmt: skip
        mbarrier.arrive(q_free.index(slot))
        step = last_step + 1 - first_block
        tiles += 1
        acc, weight, peak, total = state
        if SHAPE.groups == 2:
            stage = (step - 1) % SHAPE.stages
            weight = gl.convert_layout(weight.to(keys.dtype), WEIGHTS)
            acc = warpgroup_mma(weight, values.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(stage))
        total = gl.convert_layout(total, gl.SliceLayout(1, SUMS))
        row_peak = gl.convert_layout(peak, gl.SliceLayout(1, SUMS))
        writes = active > 0
        if SHAPE.split:
            if active > 1:
                place_of = (first_head, first_query - base, token, count, split, active, rows[6])
                unit = arrived_ptr + 2 + number * SHAPE.groups + part
                acc, total, row_peak, writes = _combine(
                    acc, total, row_peak, place_of, (partial_ptr, peak_ptr), unit, SHAPE
                )
        shrink = v_scale
        if SHAPE.sinks:
            if SHAPE.softcap:
                row_peak -= numbers[1] * LOG2E
            line = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SUMS)) % GROUP
            sink = gl.load(sinks_ptr + first_head + line, mask=line < SHAPE.group, other=0.0) * LOG2E
            new_peak = gl.maximum(row_peak, sink)
            shrink = gl.exp2(row_peak - new_peak)
            total = total * shrink + gl.exp2(sink - new_peak)
            shrink *= v_scale
        acc = acc * (shrink / total)[:, None]
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE)
        i = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, STORE))
        d = gl.arange(0, COLS, gl.SliceLayout(0, STORE))
        mine = token + i // GROUP
        head = first_head + i % GROUP
        at = ((first_query + mine).to(gl.int64) * (SHAPE.kv_heads * SHAPE.group) + head) * HEAD_DIM
        mask = (mine < count) & writes
        if SHAPE.group < GROUP:
            mask = mask & (i % GROUP < SHAPE.group)
        if COLS == HEAD_DIM:
            gl.store(out_ptr + at[:, None] + d[None, :], result, mask=mask[:, None])
        else:
            gl.store(out_ptr + at[:, None] + d[None, :], result, mask=mask[:, None] & (d < HEAD_DIM)[None, :])
        place = take_place(tiles, places, place_ready, place_free)
        tile = tile_at(place, rows, SHAPE)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit(do_not_specialize=["first_row", "num_rows", "num_tiles", "splits"])
def attention_kernel(
    q,
    kv,
    row_slot_ptr,
    row_start_ptr,
    query_start_ptr,
    table_ptr,
    out_ptr,
    partial_ptr,
    peak_ptr,
    counter_ptr,
    sinks_ptr,
    table_stride,
    first_row,
    num_rows,
    num_tiles,
    splits,
    scale,
    v_scale,
    softcap,
    window,
    SHAPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Give the loading warp and the computing groups of a program their work."""
    allow_next(PDL)
    rows = (row_start_ptr, query_start_ptr, first_row, num_rows, num_tiles, window, splits)
    if SHAPE.split:  # columns of the step: no kernel of the step writes them
        num_tiles, splits = _splits_to_fill(rows, splits, SHAPE)
        rows = (row_start_ptr, query_start_ptr, first_row, num_rows, num_tiles, window, splits)
    wait_for_previous(PDL)
    CHUNKS: gl.constexpr = SHAPE.columns // COLUMNS
    GROUPS: gl.constexpr = SHAPE.groups
    SLOTS: gl.constexpr = SHAPE.groups * SHAPE.query_buffers
    PIECES: gl.constexpr = SHAPE.stages * CHUNKS * SHAPE.block_tokens // LINES
    STAGES: gl.constexpr = SHAPE.stages
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    COLS: gl.constexpr = SHAPE.columns
    LINE_LAYOUT: gl.constexpr = kv.layout
    q_slots = gl.allocate_shared_memory(kv.dtype, [SLOTS * CHUNKS, SHAPE.tokens, SHAPE.packed_group, COLUMNS], q.layout)
    k_slots = gl.allocate_shared_memory(kv.dtype, [PIECES, LINES, COLUMNS], kv.layout)
    v_slots = gl.allocate_shared_memory(kv.dtype, [PIECES, LINES, COLUMNS], kv.layout)
    queries = view(q_slots, [SLOTS, GROUP_ROWS, COLS], LINE_LAYOUT)
    keys = view(k_slots, [STAGES, BLOCK_T, COLS], LINE_LAYOUT)
    values = view(v_slots, [STAGES, BLOCK_T, COLS], LINE_LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = (queries, keys, values, places)
    q_ready = _barriers(SLOTS, 1)
    q_free = _barriers(SLOTS, 1)
    place_ready = _barriers(2, 1)
    place_free = _barriers(2, GROUPS)
    k_ready = _barriers(STAGES, 1)
    k_free = _barriers(STAGES, GROUPS)
    v_ready = _barriers(STAGES, 1)
    v_free = _barriers(STAGES, GROUPS)
    turn = _barriers(2, 1)
    fence_async_shared()
    loading = (q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free)
    computing = (q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free, turn)
    outputs = (out_ptr, partial_ptr, peak_ptr, counter_ptr, sinks_ptr)
    numbers = (scale, softcap, window)
    table = (row_slot_ptr, table_ptr, table_stride, counter_ptr)
    pieces = (q_slots, k_slots, v_slots, places)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_compute, (0, rows, shared, computing, numbers, v_scale, outputs, SHAPE)),
                (_compute, (1, rows, shared, computing, numbers, v_scale, outputs, SHAPE)),
                (_compute, (2, rows, shared, computing, numbers, v_scale, outputs, SHAPE)),
                (load_all, (q, kv, table, rows, pieces, loading, SHAPE)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, rows, shared, computing, numbers, v_scale, outputs, SHAPE)),
                (_compute, (1, rows, shared, computing, numbers, v_scale, outputs, SHAPE)),
                (load_all, (q, kv, table, rows, pieces, loading, SHAPE)),
            ],
            [4, 1],
            [240, 24],
        )


def fits(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """What the kernel takes: 16-bit models whose cache blocks hold whole copies, on Hopper cards."""
    group, head_dim, block_size = q.shape[1] // kv.shape[2], q.shape[2], kv.shape[3]
    return (
        q.dtype == kv.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and 64 <= head_dim <= 256
        and head_dim % 16 == 0
        and block_size % 64 == 0
        and group <= 64
        and kv.is_contiguous()
        and is_hopper(kv.device)
    )


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_start: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    first_row: int,
    num_tokens: int,
    out: torch.Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    scratch: Scratch | None = None,
    tuning: HopperPrefillConfig | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """prefill.prefill_attention for what `fits`. `scratch`: counters, zero before and after a launch, and room for the
    sums of tiles whose keys several programs share; without it no program shares any."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    tuned = tuning or hopper_prefill_config(head_dim, num_tokens)
    num_rows = row_slot.shape[0] - first_row
    group = num_heads // num_kv_heads
    shape = PrefillShape(
        kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        block_tokens=tuned.block_tokens,
        stages=tuned.num_stages,
        groups=tuned.num_groups,
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks is not None,
        packs=tuned.packs or group & (group - 1) == 0,  # a power of two is the one set of heads that there is
    )
    num_tiles = (num_tokens // (shape.groups * shape.tokens) + num_rows) * shape.tiles_of_tokens
    programs = num_multiprocessors(q.device)
    splits, partial = 1, out
    if scratch is not None and window is None and num_rows <= MOST_ROWS.value:
        counters = 2 + shape.groups * num_tiles
        room = scratch.partial.numel() // (num_tokens * num_heads * (head_dim + 2))
        if room > 1 and tuned.max_splits > 1 and counters <= scratch.arrived.numel():
            splits, partial = min(room, tuned.max_splits), scratch.partial
            shape = replace(shape, most_splits=tuned.max_splits)
    attention_kernel[(programs if shape.split else min(num_tiles, programs),)](
        *descriptors(q, kv, shape),
        row_slot,
        row_start,
        query_start,
        block_table,
        out,
        partial,
        partial[num_tokens * num_heads * splits * head_dim :] if shape.split else partial,
        row_start.new_zeros(2) if scratch is None else scratch.arrived,
        q if sinks is None else sinks,
        block_table.stride(0),
        first_row,
        num_rows,
        num_tiles // shape.tiles_of_tokens,
        splits,
        scale * kv_scales[0],
        kv_scales[1],
        softcap or 0.0,
        window or 0,
        SHAPE=shape,
        num_warps=4,
        **launch_options(supports_pdl(q.device)),
    )
    return out


def descriptors(q: torch.Tensor, kv: torch.Tensor, shape: PrefillShape) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Pieces of the queries [T, H, D], and of the cache seen as rows of one key or value each."""
    lines = kv.view(-1, shape.head_dim)
    tokens = [shape.tokens, shape.packed_group, COLUMNS.value]
    return (
        TensorDescriptor(q, q.shape, q.stride(), tokens, TOKEN_LAYOUT),
        TensorDescriptor(lines, lines.shape, lines.stride(), [LINES.value, COLUMNS.value], LINE_LAYOUT),
    )
