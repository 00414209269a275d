"""Prefill attention for Hopper: one warp loads, two groups of four warps compute. The contract is prefill.py's.

A program stays on its multiprocessor and takes one tile after the other: queries of one row with all heads of one KV
head packed beside each other, 128 rows (tokens x group), 64 to each computing group.

The loading warp takes tiles from a counter that all programs share, the longest of a row first, passes them to the
computing groups, and runs ahead of them with the tensor memory accelerator (TMA): queries one tile ahead, keys and
values as far as shared memory has room. The groups share the keys and values and take turns to multiply: one computes
its softmax while the other uses the tensor cores. Within a group the scores of the next block are multiplied before the
values of the last one, so that its softmax overlaps a product as well.

Blocks of keys are walked from the diagonal down, so that only the first ones are masked. A query's result depends on
nothing but its own row: masked and unmasked blocks do the same arithmetic, and blocks without a visible key add zeros.

Written in Gluon, Triton's lower level: plain Triton of these versions cannot give warps different work on Hopper.
Source: FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
from inferengine.kernels.cuda.gemm.hopper import is_hopper, load_piece, num_multiprocessors, view
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch

GROUP_ROWS = gl.constexpr(64)  # rows of a computing group: what an instruction of the tensor cores takes
LINES = gl.constexpr(64)  # keys or values of one copy; they lie within one block of the cache
COLUMNS = gl.constexpr(64)  # columns of one copy: 128 bytes, the width of the swizzle
TOKEN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
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
    window: bool
    softcap: bool

    @property
    def tokens(self) -> int:
        """Tokens of a computing group's rows."""
        return int(GROUP_ROWS.value) // self.group

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Registers of a computing group's scores."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.block_tokens, 16])

    @property
    def sum_layout(self) -> gl.NVMMADistributedLayout:
        """Registers of a computing group's weighted sums."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.head_dim, 16])

    @property
    def weight_layout(self) -> gl.DotOperandLayout:
        """Registers of the softmax weights as the left operand of a product."""
        return gl.DotOperandLayout(0, self.sum_layout, 2)

    @property
    def store_layout(self) -> gl.BlockedLayout:
        """Registers of results that are stored to global memory."""
        return gl.BlockedLayout([1, 8], [256 // self.head_dim, self.head_dim // 8], [4, 1], [1, 0])


@gluon.jit
def tile_at(place, rows, SHAPE: gl.constexpr):
    """Tile `place` of all, from the last one on: (KV head, row, first query of the row, its queries, position of the
    first, first token of the tile, last token, first block of keys, last block). There is nothing in it if its first
    token is not below the row's queries."""
    row_start_ptr, query_start_ptr, first_row, num_rows, num_tiles, window = rows
    TOKENS: gl.constexpr = 2 * SHAPE.tokens
    kv_head = place % SHAPE.kv_heads
    tile = gl.maximum(num_tiles - 1 - place // SHAPE.kv_heads, 0)
    row, row_tile = find_row(query_start_ptr, first_row, num_rows, tile, TOKENS)
    first_query = gl.load(query_start_ptr + row)
    count = gl.load(query_start_ptr + row + 1) - first_query
    start = gl.load(row_start_ptr + row)
    first_token = row_tile * TOKENS
    last_token = gl.minimum(first_token + TOKENS, count) - 1
    first_block = 0
    if SHAPE.window:
        first_block = gl.maximum(start + first_token - window + 1, 0) // SHAPE.block_tokens
    last_block = (start + last_token) // SHAPE.block_tokens
    return kv_head, row, first_query, count, start, first_token, last_token, first_block, last_block


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
    CHUNKS: gl.constexpr = SHAPE.head_dim // COLUMNS
    mbarrier.expect(ready, SHAPE.block_tokens * SHAPE.head_dim * 2)
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
    CHUNKS: gl.constexpr = SHAPE.head_dim // COLUMNS
    programs = gl.num_programs(0)
    limit = rows[4] * SHAPE.kv_heads
    step = 0
    tiles = 0
    place = gl.program_id(0)
    while place < limit:
        kv_head, row, first_query, count, start, first_token, last_token, first_block, last_block = tile_at(
            place, rows, SHAPE
        )
        valid = first_token < count
        if valid:
            _hand_out(place, tiles, places, place_ready, place_free)
            for part in gl.static_range(2):
                slot = (tiles & 1) * 2 + part
                mbarrier.wait(q_free.index(slot), ((tiles >> 1) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), GROUP_ROWS * SHAPE.head_dim * 2)
                for chunk in gl.static_range(CHUNKS):
                    at = [first_query + first_token + part * SHAPE.tokens, kv_head * SHAPE.group, chunk * COLUMNS]
                    load_piece(q, at, q_ready.index(slot), q_slots.index(slot * CHUNKS + chunk))
            tiles += 1
        place = gl.atomic_add(counter_ptr, 1) + programs
        if valid:
            table_row = table_ptr + gl.load(row_slot_ptr + row).to(gl.int64) * table_stride
            last_page = (start + last_token) // SHAPE.block_size
            for i in range(last_block + 1 - first_block):
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
    _hand_out(limit, tiles, places, place_ready, place_free)
    if gl.atomic_add(counter_ptr + 1, 1) == programs - 1:  # the last to finish leaves the counters as they were
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def _softmax(score, peak, total, block, query_position, numbers, SHAPE: gl.constexpr, MASKED: gl.constexpr):
    """Scores [64, block_tokens] -> weights relative to the running maximum `peak` (in log2), whose sum is `total`."""
    LOG2E: gl.constexpr = 1.4426950408889634
    scale, softcap, window = numbers
    to_log2 = scale * LOG2E
    if SHAPE.softcap:  # tanh by exp2, whose overflow to inf still gives 1
        score = softcap * (1.0 - 2.0 / (gl.exp2(score * (2.0 * to_log2 / softcap)) + 1.0))
        to_log2 = LOG2E
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
def _compute(part: gl.constexpr, rows, shared, barriers, numbers, v_scale, out_ptr, SHAPE: gl.constexpr):
    """A computing group: rows [64 * part, 64 * part + 64) of every tile."""
    queries, keys, values, places = shared
    q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free, turn = barriers
    of_step = (k_ready, k_free, v_ready, v_free, turn)
    SCORES: gl.constexpr = SHAPE.score_layout
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    SUMS: gl.constexpr = SHAPE.sum_layout
    WEIGHTS: gl.constexpr = SHAPE.weight_layout
    STORE: gl.constexpr = SHAPE.store_layout
    ROW: gl.constexpr = gl.SliceLayout(1, SHAPE.score_layout)
    limit = rows[4] * SHAPE.kv_heads
    step = 0
    tiles = 0
    if part == 1:
        mbarrier.arrive(turn.index(0))
    place = take_place(tiles, places, place_ready, place_free)
    tile = tile_at(place, rows, SHAPE)
    while place < limit:
        kv_head, _row, first_query, count, start, first_token, last_token, first_block, last_block = tile
        # Blocks [whole, diagonal) need no mask; the last block is masked anyway.
        diagonal = (start + first_token + 1) // BLOCK_T
        whole = 0
        if SHAPE.window:
            whole = gl.maximum(gl.cdiv(start + last_token - rows[5] + 1, BLOCK_T), 0)
        token = first_token + part * SHAPE.tokens
        query_position = start + token + gl.arange(0, GROUP_ROWS, ROW) // SHAPE.group
        peak = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([GROUP_ROWS], gl.float32, ROW)
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, SUMS)

        slot = (tiles & 1) * 2 + part
        q = queries.index(slot)
        stage = step % SHAPE.stages
        phase = (step // SHAPE.stages) & 1
        mbarrier.wait(q_ready.index(slot), (tiles >> 1) & 1)
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.wait(turn.index(part), step & 1)
        zeros = gl.zeros([GROUP_ROWS, BLOCK_T], gl.float32, SCORES)
        score = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(turn.index(1 - part))
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(k_free.index(stage))
        weight, peak, total, _shrink = _softmax(score, peak, total, last_block, query_position, numbers, SHAPE, True)
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
        stage = (step - 1) % SHAPE.stages
        acc = warpgroup_mma(gl.convert_layout(weight.to(keys.dtype), WEIGHTS), values.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(stage))
        acc = acc * gl.convert_layout(v_scale / total, gl.SliceLayout(1, SUMS))[:, None]
        result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE)
        i = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, STORE))
        d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORE))
        mine = token + i // SHAPE.group
        head = kv_head * SHAPE.group + i % SHAPE.group
        at = ((first_query + mine).to(gl.int64) * (SHAPE.kv_heads * SHAPE.group) + head) * HEAD_DIM
        gl.store(out_ptr + at[:, None] + d[None, :], result, mask=(mine < count)[:, None])
        place = take_place(tiles, places, place_ready, place_free)
        tile = tile_at(place, rows, SHAPE)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit(do_not_specialize=["first_row", "num_rows", "num_tiles"])
def attention_kernel(
    q,
    kv,
    row_slot_ptr,
    row_start_ptr,
    query_start_ptr,
    table_ptr,
    out_ptr,
    counter_ptr,
    table_stride,
    first_row,
    num_rows,
    num_tiles,
    scale,
    v_scale,
    softcap,
    window,
    SHAPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Give the loading warp and the two computing groups of a program their work."""
    allow_next(PDL)
    wait_for_previous(PDL)
    CHUNKS: gl.constexpr = SHAPE.head_dim // COLUMNS
    PIECES: gl.constexpr = SHAPE.stages * CHUNKS * SHAPE.block_tokens // LINES
    STAGES: gl.constexpr = SHAPE.stages
    BLOCK_T: gl.constexpr = SHAPE.block_tokens
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    LINE_LAYOUT: gl.constexpr = kv.layout
    q_slots = gl.allocate_shared_memory(kv.dtype, [4 * CHUNKS, SHAPE.tokens, SHAPE.group, COLUMNS], q.layout)
    k_slots = gl.allocate_shared_memory(kv.dtype, [PIECES, LINES, COLUMNS], kv.layout)
    v_slots = gl.allocate_shared_memory(kv.dtype, [PIECES, LINES, COLUMNS], kv.layout)
    queries = view(q_slots, [4, GROUP_ROWS, HEAD_DIM], LINE_LAYOUT)
    keys = view(k_slots, [STAGES, BLOCK_T, HEAD_DIM], LINE_LAYOUT)
    values = view(v_slots, [STAGES, BLOCK_T, HEAD_DIM], LINE_LAYOUT)
    places = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = (queries, keys, values, places)
    q_ready = _barriers(4, 1)
    q_free = _barriers(4, 1)
    place_ready = _barriers(2, 1)
    place_free = _barriers(2, 2)
    k_ready = _barriers(STAGES, 1)
    k_free = _barriers(STAGES, 2)
    v_ready = _barriers(STAGES, 1)
    v_free = _barriers(STAGES, 2)
    turn = _barriers(2, 1)
    fence_async_shared()
    loading = (q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free)
    computing = (q_ready, q_free, k_ready, k_free, v_ready, v_free, place_ready, place_free, turn)
    rows = (row_start_ptr, query_start_ptr, first_row, num_rows, num_tiles, window)
    numbers = (scale, softcap, window)
    table = (row_slot_ptr, table_ptr, table_stride, counter_ptr)
    gl.warp_specialize(
        [
            (_compute, (0, rows, shared, computing, numbers, v_scale, out_ptr, SHAPE)),
            (_compute, (1, rows, shared, computing, numbers, v_scale, out_ptr, SHAPE)),
            (load_all, (q, kv, table, rows, (q_slots, k_slots, v_slots, places), loading, SHAPE)),
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
        and head_dim in (64, 128)
        and block_size % 64 == 0
        and group in (1, 2, 4, 8, 16)
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
) -> torch.Tensor:
    """prefill.prefill_attention for what `fits`. `scratch`: counters, zero before and after a launch."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    shape = PrefillShape(
        kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        block_tokens=128,
        stages=2,
        window=window is not None,
        softcap=softcap is not None,
    )
    num_tiles = num_tokens // (2 * shape.tokens) + row_slot.shape[0] - first_row
    attention_kernel[(min(num_tiles * num_kv_heads, num_multiprocessors(q.device)),)](
        *descriptors(q, kv, shape),
        row_slot,
        row_start,
        query_start,
        block_table,
        out,
        row_start.new_zeros(2) if scratch is None else scratch.arrived,
        block_table.stride(0),
        first_row,
        row_slot.shape[0] - first_row,
        num_tiles,
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
    tokens = [shape.tokens, shape.group, COLUMNS.value]
    return (
        TensorDescriptor(q, q.shape, q.stride(), tokens, TOKEN_LAYOUT),
        TensorDescriptor(lines, lines.shape, lines.stride(), [LINES.value, COLUMNS.value], LINE_LAYOUT),
    )
