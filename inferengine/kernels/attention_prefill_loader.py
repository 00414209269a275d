"""The loading warp of prefill attention for Hopper, and what it shares with the computing groups.

It takes tiles from a counter that all programs share, the longest of a row first, tells the computing groups, and runs
ahead of them with the tensor memory accelerator: queries a tile ahead, keys and values as far as there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from inferengine.kernels.hopper import load_piece
from inferengine.kernels.row_tiles import find_row

GROUP_ROWS = gl.constexpr(64)  # rows of a computing group: what an instruction of the tensor cores takes
LINES = gl.constexpr(64)  # keys or values of one copy; they lie within one block of the cache
COLUMNS = gl.constexpr(64)  # columns of one copy: 128 bytes, the width of the swizzle


@dataclass(frozen=True)
class Shape:
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
        return GROUP_ROWS.value // self.group

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.block_tokens, 16])

    @property
    def sum_layout(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.head_dim, 16])

    @property
    def weight_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.sum_layout, 2)

    @property
    def store_layout(self) -> gl.BlockedLayout:
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
