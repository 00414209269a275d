"""Attention on the CPU: plan a step, then rotate, write the cache and attend in vectorised torch, no loop over rows;
and the contiguous copy of the keys and values of rows that decode step after step.

A plan says which keys each query reads, as index lists and masks. It is made once per step and KV group, in numpy, for
all layers of the group. Rows of one token come first, then rows of few (draft tokens to verify, forced tokens), then
prompts in tiles of flattened queries over the keys of the rows they belong to.

Decodes are block-granular flash decoding (Dao et al. 2023): the keys of all decode rows are gathered at once in chunks
of whole blocks, every (row, chunk) pair is one item of a batched matrix product, and partial results are combined by
their log-sum-exp. What several rows begin with is computed apart (kernels/cpu_shared_prefix.py).

DecodeKvCache: gathering keys from the paged cache copies all of them in every layer of every step. Rows that continue
need that once: each has a place in a copy, to which each step adds its own tokens' keys and values. The paged cache is
written as always and stays authoritative. A new row is gathered into a free place; a finished row leaves its place
free. A row may have several new tokens (draft tokens to verify, tokens that a grammar forces), and it may start before
the end of its place (draft tokens were rejected).

Invariant: a place counts no position that a later step wrote only to the paged cache. Every step writes its rows from
their start on, and not every step uses the copies (rows too unequal, a chunk too long). So `begin` truncates the places
of all rows of a step to where the rows start, before it is decided how the step is computed, and only
`GroupCopy.advance` counts the positions that it adds itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from inferengine.kernels.batch import USUAL_KEYS, NewKeys, StepColumns
from inferengine.kernels.cpu_products import (
    as_array,
    mixed_of,
    products_with_keys,
    products_with_values,
    scores_of,
)
from inferengine.kernels.cpu_shared_prefix import SharedPlan, SharedPrefixes, logsumexp_of
from inferengine.kernels.reference.ops import rms_norm

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SHORT_ROW = 16  # most new tokens of a row that is computed as decodes are: draft tokens to verify, mostly
QUERY_TILE = 128  # flattened query tokens per prompt tile
KEY_TILE = 4096  # keys at which a tile that spans several rows is closed early
OF_ALL_ROWS = -1  # in place of a row: keys that every row of a tile begins with
CHUNK_TOKENS = 256  # keys per decode item when rows differ much in length


class DecodePlan(NamedTuple):
    """Which keys rows of few tokens read. I items of C blocks; `rows[i]` owns item i; items of a row are neighbours.
    Every row has Q queries: 1 for decodes; shorter rows repeat their last one."""

    begin: int  # the tokens computed are [begin, end)
    end: int
    num_queries: int
    tokens: torch.Tensor | None  # [R * Q] token of each query, counted from `begin`; None: one for one
    is_first: torch.Tensor | None  # [R * Q] which queries are no repetition; None: all
    places: torch.Tensor  # [planes * I * K * C] rows of kv seen as [num_blocks * planes * K, block_size * D]
    mask: torch.Tensor  # [I * K, Q, C * block_size], 0 or -inf
    rows: torch.Tensor | None  # [I]; None when every row is one item
    host_rows: np.ndarray
    row_begin: np.ndarray  # [R] first item of each row
    gathered: torch.Tensor  # [planes * I * K * C, block_size * D] scratch shared by the layers
    num_items: int


class TilePlan(NamedTuple):
    """Prompt tokens [begin, end) and the first keys of the blocks of their rows. `mask` [end - begin, keys] is 0 or
    -inf."""

    begin: int
    end: int
    places: torch.Tensor  # [planes * K * blocks]
    mask: torch.Tensor


class Angles(NamedTuple):
    """Rotation of query and key heads [T, H + K, D]: x * cos + roll(x, D / 2) * sin, where the rolled head holds each
    element's partner. Both [T, 1, D]."""

    cos: torch.Tensor
    sin: torch.Tensor


class AttentionPlan:
    """The plan of one step and one KV group, for all layers of the group."""

    __slots__ = ("angles", "decodes", "kv_copy", "latent_parts", "shared", "tiles", "written")

    def __init__(
        self,
        decodes: list[DecodePlan],
        tiles: list[TilePlan],
        written: np.ndarray,
        kv_copy: Any = None,
        shared: SharedPlan | None = None,
    ) -> None:
        self.decodes = decodes  # rows of one token, then rows of few
        self.tiles = tiles
        self.written = (
            written  # [T, planes * K] rows of kv seen as [.., D] that take what the cache holds of each token
        )
        self.kv_copy = kv_copy  # a decode_kv_cache.GroupCopy, which then replaces `decodes`
        self.shared = shared  # first keys of rows, which `decodes` and `kv_copy` leave out
        self.angles: dict[int, Angles] = {}  # by rotation table
        self.latent_parts: Any = None  # of latents: how each part of the step is computed (kernels/cpu_latent.py)


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
    written = _written(columns, table, kv)
    if batch.isolated:
        rows = range(batch.num_rows)
        return AttentionPlan([], plan_tiles(columns, rows, table, kv, window, isolated=True), written)
    num_short = _num_short(columns, batch.num_decodes)
    ends = [batch.num_decodes, batch.num_decodes + num_short]
    has_latents = kv.shape[1] == 1  # of which there are no copies, and whose prompts kernels/cpu_latent.py plans
    tiles = plan_tiles(columns, range(ends[1], batch.num_rows), table, kv, window) if not has_latents else []
    shared = None
    if batch.decode_kv_cache is not None and window is None and ends[1] and not has_latents:
        shared = batch.decode_kv_cache.share(columns, ends[1], group, table, kv)
        kv_copy = batch.decode_kv_cache.advance(columns, ends[1], group, table, kv, shared)
        if kv_copy is not None:
            return AttentionPlan([], tiles, written, kv_copy, shared)
    decodes = [
        _plan_decode(columns, begin, end, table, kv, window, shared)
        for begin, end in zip([0, ends[0]], ends, strict=True)
        if end > begin
    ]
    return AttentionPlan(decodes, tiles, written, None, shared)


def write_rows(kv: torch.Tensor, rows: np.ndarray, new: torch.Tensor) -> None:
    """Write `new` [.., D] to `rows` [..] of the cache seen as [.., D]. By numpy, which takes half of torch's time."""
    _array(kv).reshape(-1, kv.shape[-1])[rows] = _array(new)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """View a tensor as a numpy array, as integers where numpy does not know the type."""
    known = tensor if tensor.dtype == torch.float32 else tensor.view(_SAME_SIZE[tensor.element_size()])
    array: np.ndarray = known.numpy()
    return array


_SAME_SIZE = {1: torch.uint8, 2: torch.int16}  # integers by their bytes


def number_type(kv: torch.Tensor) -> torch.dtype:
    """Return the type that keys and values are computed in: the cache's own, fp32 where it holds 8-bit codes."""
    return torch.float32 if kv.dtype == FP8 else kv.dtype


def stored(kv: torch.Tensor) -> torch.Tensor:
    """View the cache as a type that can be gathered."""
    return kv.view(torch.uint8) if kv.dtype == FP8 else kv


def _num_short(columns: Any, num_decodes: int) -> int:
    """Count the rows after the decodes, up to the first long one, that are computed as decodes are."""
    if num_decodes == len(columns.row_slot):
        return 0
    counts = np.diff(columns.query_start[num_decodes:])
    long = np.flatnonzero(counts > SHORT_ROW)
    return int(long[0]) if len(long) else len(counts)


def _plan_decode(
    columns: Any,
    begin: int,
    end: int,
    table: np.ndarray,
    kv: torch.Tensor,
    window: int | None,
    shared: SharedPlan | None = None,
) -> DecodePlan:
    """Plan the rows [begin, end), without the prefixes that they share."""
    num_kv_heads, block_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    count, slots = end - begin, columns.row_slot[begin:end]
    lengths, starts = columns.row_len[begin:end].astype(np.int64), columns.row_start[begin:end].astype(np.int64)
    counts = lengths - starts
    num_queries = int(counts.max())
    places_of = np.minimum(np.arange(num_queries), counts[:, None] - 1)  # [R, Q] of a query within its row
    first_key = np.zeros_like(lengths) if window is None else np.maximum(starts + 1 - window, 0)
    first_block = first_key // block_size if shared is None else shared.offsets[begin:end] // block_size
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
    places = torch.from_numpy(block_places(blocks, num_kv_heads, kv.shape[1]))
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
    """Return the rows [T, planes * K] of kv seen as [num_blocks * planes * K * block_size, D]: each token's keys, then
    its values, or its latent."""
    rows, block_size = kv.shape[1] * kv.shape[2], kv.shape[3]
    positions = columns.positions
    if len(positions) == 1:
        block, offset = divmod(int(positions[0]), block_size)
        first = int(table[columns.row_slot[0], block]) * (rows * block_size) + offset
        return np.arange(first, first + rows * block_size, block_size)[None]
    blocks = table[columns.row_slot[columns.token_row], positions // block_size].astype(np.int64)
    firsts: np.ndarray = blocks * (rows * block_size) + positions % block_size
    return firsts[:, None] + np.arange(rows) * block_size


def block_places(blocks: np.ndarray, num_kv_heads: int, num_planes: int = 2) -> np.ndarray:
    """Return the rows of blocks [I, C] in kv seen as [num_blocks * planes * K, block_size * D].

    They are ordered [plane, item, KV head, block]."""
    planes = np.arange(num_planes).reshape(num_planes, 1, 1, 1)
    heads = np.arange(num_kv_heads).reshape(1, 1, num_kv_heads, 1)
    return ((blocks.astype(np.int64)[None, :, None, :] * num_planes + planes) * num_kv_heads + heads).reshape(-1)


def plan_tiles(
    columns: Any, rows: range, table: np.ndarray, kv: torch.Tensor, window: int | None, *, isolated: bool = False
) -> list[TilePlan]:
    """Cut the prompt tokens of `rows` into tiles: at most QUERY_TILE queries, few keys if several rows share one.
    `isolated`: no two rows share a tile, and each query of a row that verifies draft tokens has its own: a draft token
    whose keys are NaN must not reach the tokens before it, which are valid even where the draft token is rejected."""
    tiles: list[TilePlan] = []
    pieces: list[tuple[int, int, int]] = []  # (row, begin, end) in flattened tokens
    num_queries = num_keys = 0

    def close() -> None:
        nonlocal num_queries, num_keys
        if pieces:
            tiles.append(_tile(columns, pieces, table, kv, window, isolated))
        pieces.clear()
        num_queries = num_keys = 0

    for row in rows:
        begin, row_end = int(columns.query_start[row]), int(columns.query_start[row + 1])
        most = 1 if isolated and np.count_nonzero(columns.sample_rows == row) > 1 else QUERY_TILE
        while begin < row_end:
            own_keys = int(columns.row_len[row])
            if pieces and not isolated and row != pieces[-1][0]:
                own_keys -= kv.shape[3] * _num_common(columns, [pieces[0], (row, begin, row_end)], table, kv, window)
            crowded = isolated or num_keys + own_keys > KEY_TILE
            if num_queries == QUERY_TILE or (pieces and crowded):
                close()
            end = min(row_end, begin + most - num_queries)
            pieces.append((row, begin, end))
            num_queries += end - begin
            num_keys += own_keys
            begin = end
    close()
    return tiles


def _tile(
    columns: Any,
    pieces: list[tuple[int, int, int]],
    table: np.ndarray,
    kv: torch.Tensor,
    window: int | None,
    isolated: bool,
) -> TilePlan:
    block_size = kv.shape[3]
    num_common = 0 if isolated else _num_common(columns, pieces, table, kv, window)
    common = np.arange(num_common * block_size)
    blocks, keys = [table[columns.row_slot[pieces[0][0]], :num_common]], [common]
    key_rows = [np.full(len(common), OF_ALL_ROWS)]
    for row, begin, end in pieces:
        oldest = int(columns.positions[begin]) if window is None else max(0, int(columns.positions[begin]) - window + 1)
        span = np.arange(
            num_common if window is None else oldest // block_size, int(columns.positions[end - 1]) // block_size + 1
        )
        blocks.append(table[columns.row_slot[row], span])
        keys.append((span[:, None] * block_size + np.arange(block_size)).reshape(-1))
        key_rows.append(np.full(len(span) * block_size, row))
    begin, end = pieces[0][1], pieces[-1][2]
    position, row_of = columns.positions[begin:end, None], columns.token_row[begin:end, None]
    key = np.concatenate(keys)
    seen = key <= position
    if len(pieces) > 1:
        of_row = np.concatenate(key_rows)
        seen &= (of_row == row_of) | (of_row == OF_ALL_ROWS)
    if window is not None:
        seen &= key > position - window
    if isolated:  # not what lies behind the last query either
        seen = seen[:, key <= position[-1]]
    mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(number_type(kv))
    places = torch.from_numpy(block_places(np.concatenate(blocks)[None], kv.shape[2], kv.shape[1]))
    return TilePlan(begin, end, places, mask)


def _num_common(
    columns: Any, pieces: list[tuple[int, int, int]], table: np.ndarray, kv: torch.Tensor, window: int | None
) -> int:
    """Return the blocks that all rows of some pieces begin with, as far as every query sees them: they are read
    once."""
    if len(pieces) == 1 or window is not None:
        return 0
    most = min(int(columns.positions[begin]) for _, begin, _ in pieces) // kv.shape[3]
    tables = table[columns.row_slot[[row for row, _, _ in pieces]], :most]
    same = (tables == tables[0]).all(0)
    return most if same.all() else int(same.argmin())


# -- computation -------------------------------------------------------------------------------------------------------


def attention_qkv(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    kv: torch.Tensor,
    batch: Any,
    group: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    sinks: torch.Tensor | None = None,
    new_keys: NewKeys = USUAL_KEYS,
) -> torch.Tensor:
    """Attend with packed qkv [T, (H + 2K) * D] -> [T, H * D], and write K and V of the tokens into the cache.
    `new_keys`: what else is packed.

    Optional norm of each query and key head, NeoX rotation (Su et al. 2021) by `cos_sin` [max_position, D] (cosines in
    the first half; None: no rotation), the write to `kv` [num_blocks, 2, K, block_size, D], then attention. `kv_scales`
    divide K and V before they are stored: 1 unless the cache is FP8. `sinks` [H] fp32: of each head a score that takes
    part in the softmax and stands for no key (Xiao et al. 2023).
    """
    plan: AttentionPlan = batch.plans[group]
    head_dim = kv.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_keys = num_kv_heads if new_keys.has_keys else 0
    if num_keys and not new_keys.has_values:
        heads = torch.cat((heads, heads.narrow(1, num_heads, num_keys)), 1)
    if q_norm is not None:
        gain = q_norm.expand(num_heads, head_dim)
        gain = gain if k_norm is None else torch.cat((gain, k_norm.expand(num_keys, head_dim)))
        normed = heads.narrow(1, 0, len(gain))
        normed.copy_(rms_norm(normed, gain, eps))
    if num_keys and new_keys.value_norm:
        values = heads.narrow(1, num_heads + num_keys, num_keys)
        values.copy_(rms_norm(values, torch.ones(head_dim, dtype=heads.dtype), eps))
    if cos_sin is not None:
        cos, sin = angles_of(plan, cos_sin, batch.positions)
        heads = heads if heads.dtype == torch.float32 else heads.float()
        turned = heads.narrow(1, 0, num_heads + num_keys)
        rolled = torch.roll(turned, head_dim // 2, -1)
        turned.mul_(cos).addcmul_(rolled, sin)
    queries, new = heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, 2 * num_keys)
    if queries.dtype != number_type(kv):
        queries = queries.to(number_type(kv))
    if kv.dtype != FP8:
        new = new if new.dtype == kv.dtype else new.to(kv.dtype)
        if num_keys:
            write_rows(kv, plan.written, new)
        if plan.kv_copy is not None:
            return _copied_first(queries, new if num_keys else None, kv, plan, scale, softcap, sinks)
        return attention(queries, kv, batch, group, scale, window, softcap, sinks)
    if num_keys:
        new = torch.cat((new[:, :num_keys] / kv_scales[0], new[:, num_keys:] / kv_scales[1]), 1)
        codes = new.clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        write_rows(kv, plan.written, codes)
    mixed = attention(queries, kv, batch, group, scale * kv_scales[0], window, softcap, sinks)
    return mixed.mul_(kv_scales[1]).to(qkv.dtype)


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: Any,
    group: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with q [T, H, D] over the paged keys of each token's row -> [T, H * D]. `window` is baked into the step's
    plan."""
    plan: AttentionPlan = batch.plans[group]
    return attend(q, kv, plan.decodes, plan.tiles, scale, softcap, sinks, shared=plan.shared)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    decodes: list[DecodePlan],
    tiles: list[TilePlan],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    value_dim: int = 0,
    shared: SharedPlan | None = None,
) -> torch.Tensor:
    """Attend as `attention` does, of the parts of a plan that have the tokens of q. Of a cache of latents the first
    `value_dim` numbers of a key are its value: -> [T, H * V]."""
    num_tokens, num_heads, head_dim = q.shape
    width = value_dim or head_dim
    if len(decodes) == 1 and not tiles and shared is None:
        return _decode(q, kv, decodes[0], scale, softcap, sinks, width)
    out = torch.empty(num_tokens, num_heads * width, dtype=q.dtype)
    if shared is not None:
        count = decodes[-1].end
        out[:count] = _decode_shared(q[:count], kv, decodes, shared, scale, softcap, sinks)
    else:
        for part in decodes:
            out[part.begin : part.end] = _decode(q[part.begin : part.end], kv, part, scale, softcap, sinks, width)
    for tile in tiles:
        out[tile.begin : tile.end] = _prompt_tile(q[tile.begin : tile.end], kv, tile, scale, softcap, sinks, width)
    return out


def _copied_first(
    q: torch.Tensor,
    new: torch.Tensor | None,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend the rows whose keys lie side by side, then the tiles of prompts."""
    count = plan.kv_copy.num_tokens
    own = None if new is None else new[:count]
    mixed: torch.Tensor = plan.kv_copy.attention(q[:count], own, kv, scale, softcap, sinks, plan.shared)
    if not plan.tiles:
        return mixed
    width = q.shape[2]
    tiles = [_prompt_tile(q[tile.begin : tile.end], kv, tile, scale, softcap, sinks, width) for tile in plan.tiles]
    return torch.cat((mixed, *tiles))


def _decode_shared(
    q: torch.Tensor,
    kv: torch.Tensor,
    decodes: list[DecodePlan],
    shared: SharedPlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend rows of few tokens [T, H, D] -> [T, H * D], some of which share their first keys."""
    num_tokens, num_heads, head_dim = q.shape
    mixed = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
    logsumexp = torch.empty(num_tokens, num_heads)
    for part in decodes:
        own = slice(part.begin, part.end)
        mixed[own] = _decode(q[own], kv, part, scale, softcap, None, head_dim, logsumexp[own])
    return shared.add(mixed, logsumexp, q * scale, kv, softcap, sinks)


def _numbers(gathered: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Return what was gathered as numbers, still to be scaled."""
    return gathered.view(FP8).to(torch.float32) if kv.dtype == FP8 else gathered


def angles_of(plan: AttentionPlan, cos_sin: torch.Tensor, positions: torch.Tensor) -> Angles:
    """Return the rotation of a step's tokens. It is looked up once per step."""
    found = plan.angles.get(id(cos_sin))
    if found is not None:
        return found
    half = cos_sin.shape[1] // 2
    rows = cos_sin.index_select(0, positions).view(-1, 2, 1, half)
    made = plan.angles[id(cos_sin)] = Angles(*torch.mul(rows, _HALVES).view(-1, 2, 1, 2 * half).unbind(1))
    return made


_HALVES = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).view(2, 2, 1)  # cosines as they are, sines against their partners


def without_sinks(mixed: torch.Tensor, scores: torch.Tensor, sinks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Scale results [.. * K, Q * H / K, D] in place by the softmax mass that the sinks [H] of the heads leave.

    `scores` of the same rows [.. * K, Q * H / K, keys] are those of the softmax.
    """
    by_head = scores.float().logsumexp(-1).view(-1, num_kv_heads, mixed.shape[1])
    kept = torch.sigmoid(by_head - _by_query(sinks, num_kv_heads, mixed.shape[1]))
    return mixed.mul_(kept.view(*mixed.shape[:2], 1).to(mixed.dtype))


def _by_query(sinks: torch.Tensor, num_kv_heads: int, num_rows: int) -> torch.Tensor:
    """Return sinks [H] as [K, Q * H / K], for rows of Q queries with the heads of a KV head side by side."""
    by_head = sinks.view(num_kv_heads, -1)
    return by_head.repeat(1, num_rows // by_head.shape[1])


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    value_dim: int,
    logsumexp: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend rows of one query length. `logsumexp` [T, H] is filled with that of the scores."""
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size, num_rows = kv.shape[2], kv.shape[3], len(plan.row_begin)
    if plan.num_queries > 1:
        q = _by_kv_head(q, plan, num_rows, num_kv_heads)
    torch.index_select(stored(kv).view(-1, block_size * head_dim), 0, plan.places, out=plan.gathered)
    planes = _numbers(plan.gathered, kv).view(kv.shape[1], plan.num_items * num_kv_heads, -1, head_dim)
    keys, values = planes[0], planes[-1][..., :value_dim]
    queries = q if plan.rows is None else q.index_select(0, plan.rows)
    queries = queries.reshape(plan.num_items * num_kv_heads, -1, head_dim)
    if softcap is None and plan.num_queries == 1:
        scores = scores_of(queries.mul(scale), keys).add_(plan.mask)
    else:
        scores = scores_of(queries, keys).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_query = scores.view(len(scores), plan.num_queries, -1, scores.shape[2])
        by_query.add_(plan.mask.unsqueeze(2))
    weights = torch.softmax(scores, -1)
    partial = mixed_of(weights, values)
    if plan.rows is None:
        if sinks is not None:
            partial = without_sinks(partial, scores, sinks, num_kv_heads)
        if logsumexp is not None:
            by_row = logsumexp_of(scores, weights).view(num_rows, -1)
            logsumexp.copy_(_by_token(by_row, plan, num_rows, num_kv_heads, num_heads))
        return _by_token(partial, plan, num_rows, num_kv_heads, num_heads * value_dim)
    of_items = logsumexp_of(scores, weights).view(plan.num_items, -1).numpy()
    top = np.maximum.reduceat(of_items, plan.row_begin, axis=0)
    mass = np.exp(of_items - top[plan.host_rows])
    total = np.add.reduceat(mass, plan.row_begin, axis=0)
    if sinks is not None:
        total += np.exp(_by_query(sinks, num_kv_heads, scores.shape[1]).numpy().reshape(1, -1) - top)
    if logsumexp is not None:
        by_row = torch.from_numpy(top + np.log(total))
        logsumexp.copy_(_by_token(by_row, plan, num_rows, num_kv_heads, num_heads))
    mass /= total[plan.host_rows]
    partial = partial.view(plan.num_items, -1, value_dim).mul_(torch.from_numpy(mass).unsqueeze(-1))
    out = torch.zeros(num_rows, partial.shape[1] * value_dim, dtype=q.dtype)
    out.index_add_(0, plan.rows, partial.view(plan.num_items, -1))
    return _by_token(out, plan, num_rows, num_kv_heads, num_heads * value_dim)


def _by_kv_head(q: torch.Tensor, plan: DecodePlan, num_rows: int, num_kv_heads: int) -> torch.Tensor:
    """Reorder [T, H, D] to [R, K * Q * H / K, D]: queries of a row that read the same keys become neighbours."""
    _, num_heads, head_dim = q.shape
    queries = q if plan.tokens is None else q.index_select(0, plan.tokens)
    queries = queries.view(num_rows, plan.num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return queries.transpose(1, 2).reshape(num_rows, -1, head_dim)


def _by_token(mixed: torch.Tensor, plan: DecodePlan, num_rows: int, num_kv_heads: int, width: int) -> torch.Tensor:
    """Undo `_by_kv_head` -> [T, H * D]; repetitions are left out."""
    if plan.num_queries == 1:
        return mixed.view(num_rows, width)
    by_query = mixed.view(num_rows, num_kv_heads, plan.num_queries, -1).transpose(1, 2).reshape(-1, width)
    return by_query if plan.is_first is None else by_query[plan.is_first]


def _prompt_tile(
    q: torch.Tensor,
    kv: torch.Tensor,
    tile: TilePlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    value_dim: int,
) -> torch.Tensor:
    count, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group_heads = num_heads // num_kv_heads
    gathered = _numbers(stored(kv).view(-1, block_size * head_dim).index_select(0, tile.places), kv).to(q.dtype)
    planes = gathered.view(kv.shape[1], num_kv_heads, 1, -1, head_dim)[:, :, :, : tile.mask.shape[1]]
    keys, values = planes[0], planes[-1][..., :value_dim]
    queries = q.view(count, num_kv_heads, group_heads, head_dim).permute(1, 2, 0, 3)
    if len(planes) == 1:  # one KV head: all queries are one matrix
        scores = torch.mm(queries.reshape(-1, head_dim), keys[0, 0].t()).mul_(scale)
        scores.view(group_heads, count, -1).add_(tile.mask)
        mixed = torch.mm(torch.softmax(scores, -1), values[0, 0]).view(1, group_heads, count, value_dim)
    elif softcap is None and sinks is None:
        shape = (num_kv_heads, group_heads, -1, head_dim)
        mixed = functional.scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=tile.mask.view(1, 1, count, -1), scale=scale
        )
    else:
        scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores.add_(tile.mask)
        mixed = torch.matmul(torch.softmax(scores, -1), values)
        if sinks is not None:
            kept = torch.sigmoid(scores.float().logsumexp(-1) - sinks.view(num_kv_heads, group_heads, 1))
            mixed.mul_(kept.unsqueeze(-1).to(mixed.dtype))
    return mixed.permute(2, 0, 1, 3).reshape(count, num_heads * value_dim)


MAX_COPY_BYTES = 64 << 20  # most that a copy may take, all layers together
MIN_EQUAL_STEPS = 2  # steps of the same rows after which a copy is made: before, it might not pay for itself
ROOM = 64  # a place has room for this many to twice as many tokens more than the longest row
RAGGED = 1.25  # padding to the longest row, over all keys, beyond which rows are too unequal to lie side by side
NEW_ROWS = 0.25  # fraction of a step's rows beyond which it is another batch
FILLED = 0.75  # fraction of places below which they are picked, not taken as they lie
SPARE_QUERIES = 12  # repeated queries that cost as much as a row whose keys are copied for its later queries
SPARSE_STEPS = 4  # such steps in a row after which the copy is too large for what is left of its rows


# -- the copy of decoding rows -----------------------------------------------------------------------------------------


class LayerCopy(NamedTuple):
    """One layer's keys and values in P places, with room for `capacity` tokens each, in fp32 whatever the cache is."""

    flat: np.ndarray  # [2 * P * K * capacity, D]: what the others look at
    by_place: np.ndarray  # [2 * P * K, capacity, D]
    keys: np.ndarray  # [P * K, capacity, D]
    values: np.ndarray


class Queries(NamedTuple):
    """Queries that are computed together: Q of each of X places, repetitions among them."""

    num_queries: int
    places: np.ndarray | None  # [2 * X * K] of keys, then values, by head; None: all of them as they lie
    tokens: np.ndarray | None  # [X * Q] token of each query; None: one for one
    mask: np.ndarray | None  # [X, 1, Q, 1, keys], 0 or -inf; None: nothing is hidden


_ALONE = [Queries(1, None, None, None)]  # one query of each place, nothing hidden


class DecodeKvCache:
    """The copies of one model, by KV group, and the steps that decide when a copy is made. `advance` fills `copies`."""

    def __init__(self, num_layers: int) -> None:
        self.copies: dict[int, GroupCopy] = {}
        self.prefixes: dict[int, SharedPrefixes] = {}  # by KV group
        self.storage: dict[int, np.ndarray] = {}  # by layer, used again by the next copy
        self._num_layers = num_layers
        self._num_alike = 0  # steps of about the same rows, up to this one
        self._step = 1
        self._last_step = np.zeros(1, dtype=np.int64)  # by slot: when it had a row last
        self._last_rows = b""  # slots of the last step
        self._under_way = False

    def begin(self, columns: StepColumns, admitted: list[int]) -> None:
        """Prepare for a step, before its attention is planned. `admitted`: slots whose contents no step of this model
        computed."""
        if self._under_way:  # the last step failed half way
            self.forget()
        self._under_way = True
        self.drop(admitted)
        for prefixes in self.prefixes.values():
            prefixes.begin(columns)
        for copy in self.copies.values():
            copy.rewind(columns)
        rows = columns.row_slot.tobytes()
        if rows == self._last_rows and not admitted:
            self._num_alike += 1
            return
        highest = int(columns.row_slot.max())
        if highest >= len(self._last_step):
            self._last_step = np.concatenate((self._last_step, np.zeros(highest + 1, dtype=np.int64)))
        num_new = int((self._last_step[columns.row_slot] < self._step).sum())
        self._num_alike = self._num_alike + 1 if num_new <= NEW_ROWS * len(columns.row_slot) else 0
        self._step += 1
        self._last_step[columns.row_slot] = self._step
        self._last_rows = rows
        if not self._num_alike:
            self.copies.clear()

    def end(self) -> None:
        """Mark the step as complete: it has gone through all layers."""
        self._under_way = False

    def drop(self, slots: list[int]) -> None:
        """Invalidate the copies of reassigned slots."""
        if not slots:
            return
        self._last_rows = b""
        self._last_step[[slot for slot in slots if slot < len(self._last_step)]] = 0
        for prefixes in self.prefixes.values():
            prefixes.drop(slots)
        for copy in self.copies.values():
            copy.drop(slots)

    def forget(self) -> None:
        """Discard all copies: they may be wrong."""
        for prefixes in self.prefixes.values():
            prefixes.forget()
        self.copies.clear()
        self._num_alike = 0
        self._last_rows = b""
        self._last_step[:] = 0

    def share(
        self, columns: StepColumns, num_rows: int, group: int, table: np.ndarray, kv: torch.Tensor
    ) -> SharedPlan | None:
        """Return what the first `num_rows` rows of this step share in a group without window; None: nothing."""
        if kv.dtype == FP8:
            return None
        prefixes = self.prefixes.get(group)
        if prefixes is None:
            prefixes = self.prefixes[group] = SharedPrefixes(self._num_layers)
            prefixes.begin(columns)
        return prefixes.plan(columns, num_rows, table, kv)

    def advance(
        self,
        columns: StepColumns,
        num_rows: int,
        group: int,
        table: np.ndarray,
        kv: torch.Tensor,
        shared: SharedPlan | None = None,
    ) -> GroupCopy | None:
        """Return the copies of a group without window, ready for the first `num_rows` rows of this step, without what
        rows share.

        None: this step reads the paged cache, because its rows are new, too unequal or too large to copy."""
        lengths = columns.row_len[:num_rows]
        if shared is not None:
            lengths = lengths - shared.offsets
        longest = int(lengths[0] if num_rows == 1 else lengths.max())
        copy = self.copies.get(group)
        if copy is not None and not copy.suits(num_rows, longest):
            self.copies.pop(group)
            copy = None
        if self._num_alike < MIN_EQUAL_STEPS or (num_rows > 1 and num_rows * longest > RAGGED * lengths.sum()):
            return None
        if copy is None:
            capacity = (longest // ROOM + 2) * ROOM
            num_numbers = 2 * num_rows * kv.shape[2] * capacity * kv.shape[4]
            if kv.dtype == FP8 or num_numbers * 4 * self._num_layers > MAX_COPY_BYTES:
                return None
            copy = self.copies[group] = GroupCopy(num_rows, kv, capacity, self.storage)
        copy.advance(columns, num_rows, table, shared)
        return copy


class GroupCopy:
    """Copies of the layers of one KV group."""

    def __init__(self, num_places: int, kv: torch.Tensor, capacity: int, storage: dict[int, np.ndarray]) -> None:
        self.num_tokens = 0  # of the step: the first ones, those of rows with a place
        self._capacity, self._num_kv_heads, self._block_size = capacity, kv.shape[2], kv.shape[3]
        self._slots = np.full(num_places, -1)  # by place
        self._num_known = np.zeros(num_places, dtype=np.int64)  # by place: its first tokens
        self._offsets = np.zeros(num_places, dtype=np.int64)  # by place: how many of them its prefix has instead
        halves_and_heads = np.arange(2 * self._num_kv_heads)
        half, head = halves_and_heads // self._num_kv_heads, halves_and_heads % self._num_kv_heads
        places = np.arange(num_places)[:, None]
        self._first = ((half * num_places + places) * self._num_kv_heads + head) * capacity  # [P, 2K] in `flat`
        self._storage, self._layers = storage, dict[int, LayerCopy]()
        self.has_next_tokens = False  # whether the step is one new token for each place, as they lie
        self._num_sparse = self._longest = 0
        self._is_sparse = False
        self._written = np.zeros(0, dtype=np.int64)  # [T, 2K] in `flat`: where the step's own keys and values go
        self._queries: list[Queries] = []
        self._order: np.ndarray | None = None  # [T] where each token's result lies among those of all queries
        self._joining: tuple[np.ndarray, torch.Tensor, np.ndarray] | None = None

    def drop(self, slots: list[int]) -> None:
        """Free the places of these slots."""
        gone = np.isin(self._slots, slots)
        self._slots[gone], self._num_known[gone], self._offsets[gone] = -1, 0, 0

    def rewind(self, columns: StepColumns) -> None:
        """Truncate the places of a step's rows to where the rows start: the step writes from there on."""
        slots, starts = columns.row_slot, columns.row_start
        if len(slots) == len(self._slots) and np.array_equal(slots, self._slots):
            np.minimum(self._num_known, starts, out=self._num_known)
            return
        row, place = np.nonzero(slots[:, None] == self._slots)
        self._num_known[place] = np.minimum(self._num_known[place], starts[row])

    def held(self, slot: int, kv: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Return what the copy of the layer of `kv` holds of a slot: from which token on, and [2, K, tokens, D]; None
        where it holds nothing."""
        copy, places = self._layers.get(kv.data_ptr()), np.flatnonzero(self._slots == slot)
        if copy is None or not len(places):
            return None
        place = int(places[0])
        first, end = int(self._offsets[place]), int(self._num_known[place])
        both = torch.from_numpy(copy.flat).view(2, len(self._slots), self._num_kv_heads, self._capacity, -1)
        return first, both[:, place, :, : max(0, end - first)]

    def suits(self, num_rows: int, longest: int) -> bool:
        """Return whether the step's rows, up to `longest` tokens, fit, and have lately filled enough of the places."""
        self._is_sparse = num_rows < FILLED * len(self._slots)
        self._num_sparse = self._num_sparse + 1 if self._is_sparse else 0
        return longest <= self._capacity and num_rows <= len(self._slots) and self._num_sparse <= SPARSE_STEPS

    # -- once per step -----------------------------------------------------------------------------------------------

    def advance(self, columns: StepColumns, num_rows: int, table: np.ndarray, shared: SharedPlan | None = None) -> None:
        """Add the tokens of the next step."""
        if num_rows == len(self._slots) == 1 and shared is None and self._advance_alone(columns):
            self.has_next_tokens = self.num_tokens == 1
            return
        if shared is None and self._advance_all(columns, num_rows):
            self.has_next_tokens = True
            return
        slots, starts, lengths = columns.row_slot[:num_rows], columns.row_start[:num_rows], columns.row_len[:num_rows]
        offsets = np.zeros(num_rows, dtype=np.int64) if shared is None else shared.offsets
        self.num_tokens = int(columns.query_start[num_rows])
        places = self._places_of(slots)
        moved = places[self._offsets[places] != offsets]
        self._num_known[moved] = 0  # all that is kept of them lies at other places now
        self._offsets[places] = offsets
        rows = columns.token_row[: self.num_tokens]
        positions = columns.positions[: self.num_tokens] - offsets[rows]
        self._written = self._first[places[rows]] + positions[:, None]
        self._longest = int((lengths - offsets).max())
        behind = np.flatnonzero(starts > self._num_known[places])
        self._joining = None
        if len(behind):
            self._joining = self._join(slots[behind], places[behind], lengths[behind], offsets[behind], table)
        self._num_known[places] = lengths
        self._queries, self._order = self._plan_queries(columns.query_start[: num_rows + 1], places, starts - offsets)
        first = self._queries[0]
        self.has_next_tokens = (
            self._order is None and first.num_queries == 1 and first.places is None and first.tokens is None
        )

    def _advance_alone(self, columns: StepColumns) -> bool:
        """Advance as `advance` does, for a step of one row; False where it is not that simple."""
        start, count = int(columns.row_start[0]), int(columns.query_start[1])
        if columns.row_slot[0] != self._slots[0] or start > self._num_known[0] or self._offsets[0]:
            return False
        self.num_tokens, self._longest, self._joining, self._order = count, start + count, None, None
        self._num_known[0] = start + count
        if count == 1:
            self._written, self._queries = self._first + start, _ALONE
            return True
        self._written = self._first + columns.positions[:count, None]
        hidden = np.zeros((1, 1, count, 1, start + count), dtype=np.float32)
        hidden[0, 0, :, 0, start:] = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
        self._queries = [Queries(count, None, None, hidden)]
        return True

    def _advance_all(self, columns: StepColumns, num_rows: int) -> bool:
        """Advance as `advance` does, for the next token of each place in their order; False where it is not that
        simple."""
        starts = columns.row_start[:num_rows]
        if columns.query_start[num_rows] != len(self._slots) or num_rows != len(self._slots):
            return False
        if (
            (columns.row_slot[:num_rows] != self._slots).any()
            or (starts > self._num_known).any()
            or self._offsets.any()
        ):
            return False
        self.num_tokens, self._joining, self._order = num_rows, None, None
        self._longest = int(starts.max()) + 1
        np.add(starts, 1, out=self._num_known)
        self._written = self._first + starts[:, None]
        self._queries = [Queries(1, None, None, self._mask(starts[:, None]))]
        return True

    def _places_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the place of each row; rows without one are given one that no row of this step has."""
        if np.array_equal(self._slots[: len(slots)], slots):
            return np.arange(len(slots))
        by_slot = np.full(int(max(slots.max(), self._slots.max())) + 2, -1)  # the last one: of no slot
        by_slot[self._slots] = np.arange(len(self._slots))
        by_slot[-1] = -1
        places: np.ndarray = by_slot[slots]
        new = np.flatnonzero(places < 0)
        if len(new):
            is_taken = np.zeros(len(self._slots), dtype=np.bool_)
            is_taken[places[places >= 0]] = True
            free = np.flatnonzero(~is_taken)[: len(new)]
            if self.num_tokens > len(slots):  # rows of several tokens come last, and only in this step
                new = new[np.argsort(slots[new])]
            places[new], self._slots[free], self._num_known[free], self._offsets[free] = free, slots[new], 0, 0
        return places

    def _join(
        self, slots: np.ndarray, places: np.ndarray, lengths: np.ndarray, offsets: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
        """Return (places, sources, hidden) of rows whose keys behind their prefix are to be gathered: J, rows of the
        paged cache, and [J, keys] that lie behind the row's last one."""
        lengths = lengths - offsets
        num_blocks = -(-lengths // self._block_size)
        index = np.minimum(np.arange(int(num_blocks.max())), num_blocks[:, None] - 1)
        index += offsets[:, None] // self._block_size
        sources = block_places(table[slots[:, None], index], self._num_kv_heads)
        hidden = np.arange(index.shape[1] * self._block_size) >= lengths[:, None]
        return places, torch.from_numpy(sources), hidden

    def _plan_queries(
        self, query_start: np.ndarray, places: np.ndarray, starts: np.ndarray
    ) -> tuple[list[Queries], np.ndarray | None]:
        """Plan all rows at once, the shorter ones padded; where that is much, first tokens at once, the others after
        them. With the place of each token's result, None: as they come."""
        counts, first = np.diff(query_start), query_start[:-1]
        num_queries = int(counts.max())
        if num_queries == 1 and np.array_equal(places, np.arange(len(self._slots))):
            return [Queries(1, None, None, self._mask(starts[:, None]))], None
        many = counts > 1
        parts = [(first, counts, places, starts, self._is_sparse)]
        if len(places) * num_queries - self.num_tokens > SPARE_QUERIES * (1 + many.sum()):
            after = (first[many] + 1, counts[many] - 1, places[many], starts[many] + 1, True)
            parts = [(first, np.ones_like(counts), places, starts, self._is_sparse), after]
        order, queries, num_results = np.empty(self.num_tokens, dtype=np.int64), [], 0
        for part in parts:
            tokens, results, found = self._plan_places(*part)
            queries.append(found)
            order[tokens] = num_results + results
            picked = None if found.places is None else len(found.places) // (2 * self._num_kv_heads)
            num_results += found.num_queries * (len(self._slots) if picked is None else picked)
        return queries, None if _in_order(order) and num_results == self.num_tokens else order

    def _plan_places(
        self, first: np.ndarray, counts: np.ndarray, places: np.ndarray, starts: np.ndarray, picked: bool
    ) -> tuple[np.ndarray, np.ndarray, Queries]:
        """Return, for rows of `counts` tokens from token `first` on, these tokens, which results are theirs, and the
        queries. `picked`: the rows' places alone, else all as they lie."""
        num_places = len(places) if picked else len(self._slots)
        at = np.arange(num_places) if picked else places
        within = np.arange(int(counts.max()))
        place_of = np.minimum(within, counts[:, None] - 1)  # [R, Q] of a query within its row
        tokens, last_key = np.zeros((2, num_places, len(within)), dtype=np.int64)
        tokens[at], last_key[at] = first[:, None] + place_of, starts[:, None] + place_of
        is_wanted = within < counts[:, None]
        results = (at[:, None] * len(within) + within)[is_wanted]
        flat = tokens.reshape(-1)
        queries = Queries(
            len(within),
            self._rows_of(places) if picked else None,
            None if len(flat) == self.num_tokens and _in_order(flat) else flat,
            self._mask(last_key),
        )
        return flat[results], results, queries

    def _rows_of(self, places: np.ndarray) -> np.ndarray:
        """Return rows [2 * X * K] of a copy seen as rows of `capacity` tokens: keys of each place and head, then
        values."""
        rows: np.ndarray = (self._first[places] // self._capacity).reshape(len(places), 2, -1)
        return rows.transpose(1, 0, 2).reshape(-1)

    def _mask(self, last_key: np.ndarray) -> np.ndarray | None:
        """Return which of the longest row's keys the queries [X, Q] must not see."""
        hidden = np.arange(self._longest) > last_key[:, :, None]  # [X, Q, keys]
        if not hidden.any():
            return None
        return np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :, None]

    # -- once per layer ----------------------------------------------------------------------------------------------

    def attention(
        self,
        q: torch.Tensor,
        new: torch.Tensor | None,
        kv: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
        shared: SharedPlan | None = None,
    ) -> torch.Tensor:
        """Attend with q [T, H, D] over the keys of each token's row -> [T, H * D]. `new` [T, 2K, D] are the step's own
        keys and values, which are in `kv` already; None: an earlier layer of the step has added them to the copy, too.
        `sinks` [H] as in kernels/cpu.py."""
        copy = self._with_new(kv, None if new is None else as_array(new))
        scaled = as_array(q) * np.float32(scale)  # here, not the scores: there are fewer of them
        parts = [
            self._attend(copy, scaled, queries, softcap, sinks if shared is None else None, shared is not None)
            for queries in self._queries
        ]
        mixed, totals = zip(*parts, strict=True)
        results = torch.from_numpy(self._by_token(mixed))
        if shared is not None:
            found = torch.from_numpy(self._by_token(totals))
            results = shared.add(results, found, torch.from_numpy(scaled), kv, softcap, sinks)
        return results if results.dtype == q.dtype else results.to(q.dtype)

    def next_tokens(self, kv: torch.Tensor, q: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Do `attention`, where `has_next_tokens`: scaled q [T, H, D] and new [T, 2K, D] -> [T, H * D]."""
        copy = self._with_new(kv, new)
        mask = self._queries[0].mask
        scores = products_with_keys(q.reshape(len(copy.keys), -1, q.shape[2]), copy.keys[:, : self._longest])
        if mask is not None:
            by_row = scores.reshape(len(q), -1, self._longest)
            by_row += mask.reshape(len(q), 1, -1)
        weights = torch.softmax(torch.from_numpy(scores), -1).numpy()
        return products_with_values(weights, copy.values[:, : self._longest]).reshape(len(q), -1)

    def _with_new(self, kv: torch.Tensor, new: np.ndarray | None) -> LayerCopy:
        """Return the copy of the layer of `kv`, with what joins in this step and the step's own keys and values."""
        copy = self._layers.get(kv.data_ptr())
        if copy is None:
            copy = self._layers[kv.data_ptr()] = self._make(kv)
        if new is None:
            return copy
        if self._joining is not None:
            self._gather(copy, kv, *self._joining)
        copy.flat[self._written] = new
        return copy

    def _by_token(self, parts: tuple[np.ndarray, ...]) -> np.ndarray:
        """Put what was computed of the queries in the order of the tokens."""
        results = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return results if self._order is None else results[self._order]

    def _attend(
        self,
        copy: LayerCopy,
        q: np.ndarray,
        queries: Queries,
        softcap: float | None,
        sinks: torch.Tensor | None,
        has_total: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the attention [X * Q, H * D] of queries that have been scaled, and with `has_total` the log-sum-exp [X
        * Q, H] of their scores, else nothing."""
        num_queries, (_, num_heads, head_dim) = queries.num_queries, q.shape
        keys, values = copy.keys, copy.values
        if queries.places is not None:
            keys, values = np.split(copy.by_place[queries.places, : self._longest], 2)
        if queries.tokens is not None:
            q = q[queries.tokens]
        by_head = q.reshape(-1, num_queries, self._num_kv_heads, num_heads // self._num_kv_heads, head_dim)
        if num_queries > 1:
            by_head = by_head.transpose(0, 2, 1, 3, 4)
        by_head = by_head.reshape(keys.shape[0], -1, head_dim)
        scores = products_with_keys(by_head, keys[:, : self._longest])
        found = torch.from_numpy(scores)
        if softcap is not None:
            found.div_(softcap).tanh_().mul_(softcap)
        if queries.mask is not None:
            by_query = scores.reshape(len(queries.mask), self._num_kv_heads, num_queries, -1, self._longest)
            by_query += queries.mask
        weights = torch.softmax(found, -1)
        mixed = products_with_values(weights.numpy(), values[:, : self._longest])
        if sinks is not None:
            without_sinks(torch.from_numpy(mixed), found, sinks, self._num_kv_heads)
        total = self._by_query(logsumexp_of(found, weights).numpy(), num_queries) if has_total else _NO_TOTAL
        return self._by_query(mixed, num_queries), total

    def _by_query(self, found: np.ndarray, num_queries: int) -> np.ndarray:
        """Reorder [X * K, Q * H / K, ..] to [X * Q, H * ..]."""
        found = found.reshape(-1, self._num_kv_heads, num_queries, found.size // len(found) // num_queries)
        return found.transpose(0, 2, 1, 3).reshape(-1, self._num_kv_heads * found.shape[3])

    def _make(self, kv: torch.Tensor) -> LayerCopy:
        """Make a copy full of zeros: what is hidden is multiplied by 0, which must give 0."""
        shape = 2, len(self._slots) * self._num_kv_heads, self._capacity, kv.shape[4]
        size = int(np.prod(shape))
        storage = self._storage.get(kv.data_ptr())
        if storage is None or len(storage) < size:
            storage = self._storage[kv.data_ptr()] = np.empty(size, dtype=np.float32)
        both = storage[:size].reshape(shape)
        both.fill(0.0)
        return LayerCopy(both.reshape(-1, shape[3]), both.reshape(-1, *shape[2:]), both[0], both[1])

    def _gather(
        self, copy: LayerCopy, kv: torch.Tensor, places: np.ndarray, sources: torch.Tensor, hidden: np.ndarray
    ) -> None:
        """Fill places from the paged cache, with zeros behind each row's last token: what a request before left there
        may be no number."""
        block_size, head_dim = kv.shape[3:]
        found = as_array(kv.view(-1, block_size * head_dim).index_select(0, sources))
        found = found.reshape(2, len(places), self._num_kv_heads, -1, head_dim)
        np.copyto(found, 0.0, where=hidden[None, :, None, :, None])
        both = copy.flat.reshape(2, len(self._slots), self._num_kv_heads, self._capacity, head_dim)
        filled = min(self._capacity, found.shape[3])
        both[:, places, :, :filled] = found[:, :, :, :filled]
        both[:, places, :, filled:] = 0.0


_NO_TOTAL = np.zeros(0, dtype=np.float32)


def _in_order(indices: np.ndarray) -> bool:
    return np.array_equal(indices, np.arange(len(indices)))
