"""Prefill attention for Hopper: one warp loads, two groups of four warps compute. The contract is attention_prefill's.

A program stays on its multiprocessor and takes one tile after the other: queries of one row with all heads of one KV
head packed beside each other, 128 rows (tokens x group), 64 to each computing group. The loading warp runs ahead with
the tensor memory accelerator (TMA), over tiles too. The groups share the keys and values in shared memory, and take
turns to multiply: one computes its softmax while the other has the tensor cores. Within a group the scores of the next
block are multiplied before the values of the last one, so that its softmax runs beside a product as well.

Blocks of keys are walked from the diagonal down, so that only the first ones are masked. A query's result depends on
nothing but its own row: masked and unmasked blocks do the same arithmetic, and blocks without a visible key add zeros.

Written in Gluon, Triton's lower level: plain Triton of these versions cannot give warps different work on Hopper.
Source: FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from inferengine.kernels.attention_prefill_loader import (
    COLUMNS,
    GROUP_ROWS,
    LINES,
    load_all,
    take_place,
    tile_at,
)
from inferengine.kernels.hopper import view
from inferengine.kernels.pdl import allow_next, wait_for_previous


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
