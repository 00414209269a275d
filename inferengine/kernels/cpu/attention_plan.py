"""Plan one step's attention on the CPU: which keys each query reads, as index lists and masks.

Computed once per step and KV group, in numpy, for all layers of the group; `attention.py` executes it. Rows of one
token come first, then rows of few (draft tokens to verify, forced tokens), then prompts in tiles of flattened queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
SHORT_ROW = 16  # most new tokens of a row that is computed as decodes are: draft tokens to verify, mostly
QUERY_TILE = 128  # flattened query tokens per prompt tile
KEY_TILE = 4096  # keys at which a tile that spans several rows is closed early
CHUNK_TOKENS = 256  # keys per decode item when rows differ much in length


class DecodePlan(NamedTuple):
    """Which keys rows of few tokens read. I items of C blocks; `rows[i]` owns item i; items of a row are neighbours.
    Every row has Q queries: 1 for decodes; shorter rows repeat their last one."""

    begin: int  # the tokens computed are [begin, end)
    end: int
    num_queries: int
    tokens: torch.Tensor | None  # [R * Q] token of each query, counted from `begin`; None: one for one
    is_first: torch.Tensor | None  # [R * Q] which queries are no repetition; None: all
    places: torch.Tensor  # [2 * I * K * C] rows of kv seen as [num_blocks * 2 * K, block_size * D]
    mask: torch.Tensor  # [I * K, Q, C * block_size], 0 or -inf
    rows: torch.Tensor | None  # [I]; None when every row is one item
    host_rows: np.ndarray
    row_begin: np.ndarray  # [R] first item of each row
    gathered: torch.Tensor  # [2 * I * K * C, block_size * D] scratch shared by the layers
    num_items: int


class TilePlan(NamedTuple):
    """Prompt tokens [begin, end) and the first keys of the blocks of their rows. `mask` [end - begin, keys] is 0 or
    -inf."""

    begin: int
    end: int
    places: torch.Tensor  # [2 * K * blocks]
    mask: torch.Tensor


class Angles(NamedTuple):
    """Rotation of query and key heads [T, H + K, D]: x * cos + roll(x, D / 2) * sin, where the rolled head holds each
    element's partner. Both [T, 1, D]."""

    cos: torch.Tensor
    sin: torch.Tensor


class AttentionPlan:
    """The plan of one step and one KV group, for all layers of the group."""

    __slots__ = ("angles", "decodes", "kv_copy", "tiles", "written")

    def __init__(
        self, decodes: list[DecodePlan], tiles: list[TilePlan], written: torch.Tensor, kv_copy: Any = None
    ) -> None:
        self.decodes = decodes  # rows of one token, then rows of few
        self.tiles = tiles
        self.written = written  # [T, 2K] rows of kv seen as [.., D] that take each token's K and V
        self.kv_copy = kv_copy  # a decode_kv_cache.GroupCopy, which then replaces `decodes`
        self.angles: dict[int, Angles] = {}  # by rotation table


def prepare_attention(batch: Any, group: int, kv: torch.Tensor, window: int | None) -> AttentionPlan:
    """Plan the attention of one KV group for one step: the blocks that each query reads, as index lists and masks.

    A masked score is a score plus -inf, and a masked value is multiplied by 0: with a key or value that is NaN both
    give NaN. Where `batch.isolated`, no query is computed with a key that it must not see: neither another row's
    key of the same tile, nor what a finished request left behind its row's last token.
    """
    columns = batch.columns
    if columns is None:
        raise RuntimeError("attention on the CPU needs the step's columns on the host")
    table = batch.block_tables[group].numpy()
    written = torch.from_numpy(_written(columns, table, kv))
    if batch.isolated:
        return AttentionPlan([], _plan_tiles(columns, 0, table, kv, window, isolated=True), written)
    num_short = _num_short(columns, batch.num_decodes)
    ends = [batch.num_decodes, batch.num_decodes + num_short]
    tiles = _plan_tiles(columns, ends[1], table, kv, window) if ends[1] < batch.num_rows else []
    if batch.decode_kv_cache is not None and window is None and ends[1]:
        kv_copy = batch.decode_kv_cache.advance(columns, ends[1], group, table, kv)
        if kv_copy is not None:
            return AttentionPlan([], tiles, written, kv_copy)
    decodes = [
        _plan_decode(columns, begin, end, table, kv, window)
        for begin, end in zip([0, ends[0]], ends, strict=True)
        if end > begin
    ]
    return AttentionPlan(decodes, tiles, written)


def number_type(kv: torch.Tensor) -> torch.dtype:
    """Return the type that keys and values are computed in: the cache's own, fp32 where it holds 8-bit codes."""
    return torch.float32 if kv.dtype == FP8 else kv.dtype


def stored(kv: torch.Tensor) -> torch.Tensor:
    """View the cache as a type that can be gathered."""
    return kv.view(torch.uint8) if kv.dtype == FP8 else kv


def _num_short(columns: Any, num_decodes: int) -> int:
    """Rows after the decodes, up to the first long one, that are computed as decodes are."""
    if num_decodes == len(columns.row_slot):
        return 0
    counts = np.diff(columns.query_start[num_decodes:])
    long = np.flatnonzero(counts > SHORT_ROW)
    return int(long[0]) if len(long) else len(counts)


def _plan_decode(
    columns: Any, begin: int, end: int, table: np.ndarray, kv: torch.Tensor, window: int | None
) -> DecodePlan:
    """For the rows [begin, end)."""
    num_kv_heads, block_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    count, slots = end - begin, columns.row_slot[begin:end]
    lengths, starts = columns.row_len[begin:end].astype(np.int64), columns.row_start[begin:end].astype(np.int64)
    counts = lengths - starts
    num_queries = int(counts.max())
    places_of = np.minimum(np.arange(num_queries), counts[:, None] - 1)  # [R, Q] of a query within its row
    first_key = np.zeros_like(lengths) if window is None else np.maximum(starts + 1 - window, 0)
    first_block = first_key // block_size
    num_blocks = -(-lengths // block_size) - first_block
    longest = int(num_blocks.max())
    chunk = longest
    if count > 1 and count * longest > 1.25 * num_blocks.sum():  # ragged: chunks rather than padding to the longest
        chunk = min(longest, max(1, CHUNK_TOKENS // block_size))
    items = -(-num_blocks // chunk)
    row_begin = np.cumsum(items) - items
    host_rows = np.repeat(np.arange(count), items)
    item_in_row = np.arange(len(host_rows)) - row_begin[host_rows]
    index = (first_block[host_rows] + item_in_row * chunk)[:, None] + np.arange(chunk)  # [I, C] block within its row
    last = first_block + num_blocks - 1
    blocks = table[slots[host_rows][:, None], np.minimum(index, last[host_rows][:, None])]
    keys = (index[:, :, None] * block_size + np.arange(block_size)).reshape(len(host_rows), 1, -1)
    positions = (starts[:, None] + places_of)[host_rows][:, :, None]  # [I, Q, 1] of the queries
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
    places = torch.from_numpy(block_places(blocks, num_kv_heads))
    first_token = int(columns.query_start[begin])
    ragged = int(counts.min()) < num_queries
    tokens = (columns.query_start[begin:end] - first_token)[:, None] + places_of
    return DecodePlan(
        begin=first_token,
        end=int(columns.query_start[end]),
        num_queries=num_queries,
        tokens=torch.from_numpy(tokens.reshape(-1)) if ragged else None,
        is_first=torch.from_numpy((np.arange(num_queries) < counts[:, None]).reshape(-1)) if ragged else None,
        places=places,
        mask=torch.from_numpy(np.repeat(mask, num_kv_heads, axis=0)).to(number_type(kv)),
        rows=None if len(host_rows) == count else torch.from_numpy(host_rows),
        host_rows=host_rows,
        row_begin=row_begin,
        gathered=torch.empty(len(places), block_size * head_dim, dtype=stored(kv).dtype),
        num_items=len(host_rows),
    )


def _written(columns: Any, table: np.ndarray, kv: torch.Tensor) -> np.ndarray:
    """[T, 2K] rows of kv seen as [num_blocks * 2 * K * block_size, D]: each token's keys, then its values."""
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    positions = columns.positions
    if len(positions) == 1:
        block, offset = divmod(int(positions[0]), block_size)
        first = int(table[columns.row_slot[0], block]) * (2 * num_kv_heads * block_size) + offset
        return np.arange(first, first + 2 * num_kv_heads * block_size, block_size)[None]
    blocks = table[columns.row_slot[columns.token_row], positions // block_size].astype(np.int64)
    firsts: np.ndarray = blocks * (2 * num_kv_heads * block_size) + positions % block_size
    return firsts[:, None] + np.arange(2 * num_kv_heads) * block_size


def block_places(blocks: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Return the rows of blocks [I, C] in kv seen as [num_blocks * 2 * K, block_size * D].

    They are ordered [K or V, item, KV head, block]."""
    halves = np.arange(2).reshape(2, 1, 1, 1)
    heads = np.arange(num_kv_heads).reshape(1, 1, num_kv_heads, 1)
    return ((blocks.astype(np.int64)[None, :, None, :] * 2 + halves) * num_kv_heads + heads).reshape(-1)


def _plan_tiles(
    columns: Any, first_row: int, table: np.ndarray, kv: torch.Tensor, window: int | None, *, isolated: bool = False
) -> list[TilePlan]:
    """Cut the prompt tokens of a step into tiles: at most QUERY_TILE queries, few keys if several rows share one.
    `isolated`: no two rows share a tile, and each query of a row that verifies draft tokens has its own: a draft token
    whose keys are NaN must not reach the tokens before it, which are valid even where the draft token is rejected."""
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    tiles: list[TilePlan] = []
    pieces: list[tuple[int, int, int]] = []  # (row, begin, end) in flattened tokens
    num_queries = num_keys = 0

    def close() -> None:
        nonlocal num_queries, num_keys
        if pieces:
            tiles.append(_tile(columns, pieces, table, num_kv_heads, block_size, window, number_type(kv), isolated))
        pieces.clear()
        num_queries = num_keys = 0

    for row in range(first_row, len(columns.row_slot)):
        begin, row_end = int(columns.query_start[row]), int(columns.query_start[row + 1])
        most = 1 if isolated and np.count_nonzero(columns.sample_rows == row) > 1 else QUERY_TILE
        while begin < row_end:
            crowded = isolated or num_keys + int(columns.row_len[row]) > KEY_TILE
            if num_queries == QUERY_TILE or (pieces and crowded):
                close()
            end = min(row_end, begin + most - num_queries)
            pieces.append((row, begin, end))
            num_queries += end - begin
            num_keys += int(columns.row_len[row])
            begin = end
    close()
    return tiles


def _tile(
    columns: Any,
    pieces: list[tuple[int, int, int]],
    table: np.ndarray,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    isolated: bool,
) -> TilePlan:
    blocks, keys, key_rows = [], [], []
    for row, begin, end in pieces:
        oldest = int(columns.positions[begin]) if window is None else max(0, int(columns.positions[begin]) - window + 1)
        span = np.arange(
            0 if window is None else oldest // block_size, int(columns.positions[end - 1]) // block_size + 1
        )
        blocks.append(table[columns.row_slot[row], span])
        keys.append((span[:, None] * block_size + np.arange(block_size)).reshape(-1))
        key_rows.append(np.full(len(span) * block_size, row))
    begin, end = pieces[0][1], pieces[-1][2]
    position, row_of = columns.positions[begin:end, None], columns.token_row[begin:end, None]
    key = np.concatenate(keys)
    seen = key <= position
    if len(pieces) > 1:
        seen &= np.concatenate(key_rows) == row_of
    if window is not None:
        seen &= key > position - window
    if isolated:  # not what lies behind the last query either
        seen = seen[:, key <= position[-1]]
    mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(dtype)
    places = torch.from_numpy(block_places(np.concatenate(blocks)[None], num_kv_heads))
    return TilePlan(begin, end, places, mask)
