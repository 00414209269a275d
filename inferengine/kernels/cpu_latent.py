"""Latent attention in plain torch (DeepSeek-V2, 2024): the CPU path, and what the kernels are compared with.

The keys and values of a head are products of a token's latent with matrices of the head. The cache holds the latent
and the rotated key that all heads share. There are two ways to attend, with equal results:

Absorbed: no key or value is made. q . (U c) = (U^T q) . c, so the query is multiplied by the key's matrix, attention
mixes latents, and what it mixed is multiplied by the value's matrix. Little is read, but a pair of tokens costs R + P
multiplications for its score and R for its mixture.

Up-projected: the keys and values of all heads are made of the context's latents, block by block, and forgotten once
the queries have seen them; softmax is computed online (Milakov and Gimelshein 2018). A pair costs N + P and V.

Decodes are absorbed. Of prompts what takes fewer multiplications is computed, see `_should_up_project`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu import (
    FP8,
    FP8_MAX,
    KEY_TILE,
    QUERY_TILE,
    AttentionPlan,
    DecodePlan,
    TilePlan,
    angles_of,
    attend,
    number_type,
    plan_tiles,
    stored,
    write_rows,
)
from inferengine.kernels.reference.ops import rms_norm

KEYS_AT_ONCE = 256  # whose keys and values exist at a time: of 128 heads of 128 + 64 and 128, 40 MiB in fp32
QUERIES_AT_ONCE = 256  # whose scores exist at a time
LOWEST = -1e30  # a finite peak of scores before any


class Absorbed(NamedTuple):
    """Tokens [begin, end) of the step, whose plans count from `begin`."""

    begin: int
    end: int
    decodes: list[DecodePlan]
    tiles: list[TilePlan]


class UpProjected(NamedTuple):
    """Tokens [begin, end) of the step, and the context of their rows one after the other. A query sees keys
    first_key to last_key of it; both ascend."""

    begin: int
    end: int
    places: torch.Tensor  # [keys] rows of kv seen as [.., R + P]
    first_key: np.ndarray  # [end - begin]
    last_key: np.ndarray


class Weights(NamedTuple):
    """The matrices of H heads that make keys and values of a latent: `key_up` [H, N, R] and `value_up` [H, R, V]."""

    key_up: torch.Tensor
    value_up: torch.Tensor


def latent_attention(
    q: torch.Tensor,
    new: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    batch: Any,
    group: int,
    scale: float,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """Attend with queries q [T, H * (N + P)] -> [T, H * V], and write the latents new [T, R + P] into the cache.

    The last P numbers of each query and of `new` are rotated (NeoX) by `cos_sin` [max_position, P]. The first R of
    `new` are normed with `gain` [R]. `key_up` [H, N, R] and `value_up` [H, R, V] make a head's keys and values of a
    latent. `kv` [num_blocks, 1, 1, block_size, R + P]; `kv_scale` divides what is stored: 1 unless the cache is FP8.
    """
    plan: AttentionPlan = batch.plans[group]
    num_tokens, (num_heads, plain, rank), width = q.shape[0], key_up.shape, kv.shape[-1]
    weights = Weights(key_up, value_up)
    latents = torch.empty(num_tokens, width, dtype=torch.float32)
    latents[:, :rank] = rms_norm(new[:, :rank].contiguous(), gain, eps)
    latents[:, rank:] = _rotated(new[:, None, rank:], plan, cos_sin, batch.positions)[:, 0]
    if kv.dtype == FP8:
        codes = latents.div_(kv_scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        write_rows(kv, plan.written, codes.unsqueeze(1))
    else:
        write_rows(kv, plan.written, latents.to(kv.dtype).unsqueeze(1))
    if plan.latent_parts is None:
        plan.latent_parts = _plan_parts(plan, batch, group, weights, kv)
    queries = q.view(num_tokens, num_heads, -1)
    turned = _rotated(queries[..., plain:], plan, cos_sin, batch.positions)
    out = q.new_empty(num_tokens, num_heads, value_up.shape[2])
    for part in plan.latent_parts:
        tokens = slice(part.begin, part.end)
        compute = _absorbed if isinstance(part, Absorbed) else _up_projected
        out[tokens] = compute(queries[tokens, :, :plain], turned[tokens], weights, kv, part, scale, kv_scale)
    return out.flatten(1)


# -- plan --------------------------------------------------------------------------------------------------------------


def _plan_parts(
    plan: AttentionPlan, batch: Batch, group: int, weights: Weights, kv: torch.Tensor
) -> list[Absorbed | UpProjected]:
    """Divide a step: rows of few tokens, then prompts, short ones together and each longer one by itself."""
    columns = batch.columns
    assert columns is not None  # `prepare_attention` needed it
    if plan.tiles:  # each row is computed by itself
        return [Absorbed(0, batch.num_tokens, [], plan.tiles)]
    first_token = plan.decodes[-1].end if plan.decodes else 0
    parts: list[Absorbed | UpProjected] = []
    if first_token:
        parts.append(Absorbed(0, first_token, plan.decodes, []))
    if first_token == batch.num_tokens:
        return parts
    table = batch.block_tables[group].numpy()
    for rows in _together(columns, int(columns.token_row[first_token])):
        found = _contexts(columns, rows, table, kv)
        if _should_up_project(found, weights, kv.shape[-1]):
            parts.append(found)
            continue
        tiles = plan_tiles(columns, rows, table, kv, None)
        begin = found.begin
        tiles = [tile._replace(begin=tile.begin - begin, end=tile.end - begin) for tile in tiles]
        parts.append(Absorbed(begin, found.end, [], tiles))
    return parts


def _together(columns: StepColumns, first_row: int) -> list[range]:
    """Group neighbouring rows of few queries and keys; a longer row is alone."""
    groups: list[range] = []
    num_queries = num_keys = 0
    begin = first_row
    for row in range(first_row, len(columns.row_slot)):
        num_queries += int(columns.query_start[row + 1] - columns.query_start[row])
        num_keys += int(columns.row_len[row])
        if row > begin and (num_queries > QUERY_TILE or num_keys > KEY_TILE):
            groups.append(range(begin, row))
            begin = row
            num_queries = int(columns.query_start[row + 1] - columns.query_start[row])
            num_keys = int(columns.row_len[row])
    groups.append(range(begin, len(columns.row_slot)))
    return groups


def _contexts(columns: StepColumns, rows: range, table: np.ndarray, kv: torch.Tensor) -> UpProjected:
    block_size = kv.shape[3]
    begin, end = int(columns.query_start[rows[0]]), int(columns.query_start[rows[-1] + 1])
    lengths = columns.row_len[rows[0] : rows[-1] + 1].astype(np.int64)
    first_key = np.repeat(np.cumsum(lengths) - lengths, np.diff(columns.query_start[rows[0] : rows[-1] + 2]))
    places = []
    for row, length in zip(rows, lengths, strict=True):
        at = np.arange(length)
        blocks = table[columns.row_slot[row]].astype(np.int64)
        places.append(blocks[at // block_size] * block_size + at % block_size)
    last_key = first_key + columns.positions[begin:end]
    return UpProjected(begin, end, torch.from_numpy(np.concatenate(places)), first_key, last_key)


def _should_up_project(part: UpProjected, weights: Weights, cached: int) -> bool:
    """Return whether keys and values of each head take fewer multiplications than latents, for queries T, keys K and
    the pairs of both that are computed, of each head:

    absorbed      pairs * (R + P + R) + T * R * (N + V)
    up-projected  pairs * (N + P + V) + K * R * (N + V)

    Both forms are DeepSeek-V2's (2024, section 2.1.2). vLLM (v1/attention/backends/mla/common.py) names them
    "data-movement friendly" and "compute friendly", and takes the second for all that its scheduler calls a prompt.
    With the published sizes a prompt without cached tokens is always up-projected, and a chunk of 171 tokens or more
    behind any context.
    """
    _, plain, rank = weights.key_up.shape
    value, turning = weights.value_up.shape[2], cached - rank
    num_queries, num_keys = part.end - part.begin, len(part.places)
    if part.first_key[-1] == 0:  # one row: what lies behind a query is hardly computed
        pairs = int(part.last_key.sum()) + num_queries
    else:
        pairs = num_queries * num_keys
    absorbed = pairs * (2 * rank + turning) + num_queries * rank * (plain + value)
    return pairs * (plain + turning + value) + num_keys * rank * (plain + value) < absorbed


# -- computation -------------------------------------------------------------------------------------------------------


def _absorbed(
    queries: torch.Tensor,
    turned: torch.Tensor,
    weights: Weights,
    kv: torch.Tensor,
    part: Absorbed,
    scale: float,
    kv_scale: float,
) -> torch.Tensor:
    """Attend in the latent space with queries [T, H, N] and their rotated numbers [T, H, P] -> [T, H, V]."""
    (num_tokens, num_heads, _), rank = queries.shape, weights.key_up.shape[2]
    wide = torch.empty(num_tokens, num_heads, kv.shape[-1], dtype=number_type(kv))
    wide[..., :rank] = torch.bmm(queries.transpose(0, 1), weights.key_up).transpose(0, 1)
    wide[..., rank:] = turned
    mixed = attend(wide, kv, part.decodes, part.tiles, scale * kv_scale, value_dim=rank)
    mixed = mixed.view(num_tokens, num_heads, rank)
    if kv_scale != 1.0:
        mixed = mixed.mul_(kv_scale)
    return torch.bmm(mixed.to(queries.dtype).transpose(0, 1), weights.value_up).transpose(0, 1)


def _up_projected(
    queries: torch.Tensor,
    turned: torch.Tensor,
    weights: Weights,
    kv: torch.Tensor,
    part: UpProjected,
    scale: float,
    kv_scale: float,
) -> torch.Tensor:
    """Attend as `_absorbed` does, with keys and values up-projected from the latents."""
    num_tokens, num_heads, plain = queries.shape
    rank, turning, value = weights.key_up.shape[2], turned.shape[2], weights.value_up.shape[2]
    by_head = queries.new_empty(num_heads, num_tokens, plain + turning)
    by_head[..., :plain] = queries.transpose(0, 1)
    by_head[..., plain:] = turned.transpose(0, 1)
    by_head.mul_(scale)
    mixed = torch.zeros(num_heads, num_tokens, value, dtype=torch.float32)
    peak = torch.full((num_heads, num_tokens, 1), LOWEST, dtype=torch.float32)
    total = torch.zeros(num_heads, num_tokens, 1, dtype=torch.float32)
    held = stored(kv).view(-1, rank + turning)
    for key in range(0, len(part.places), KEYS_AT_ONCE):
        gathered = held.index_select(0, part.places[key : key + KEYS_AT_ONCE])
        latents = (gathered.view(FP8) if kv.dtype == FP8 else gathered).to(queries.dtype)
        if kv_scale != 1.0:
            latents = latents * kv_scale
        num_keys = len(latents)
        shared = latents[:, :rank].expand(num_heads, num_keys, rank)
        keys = latents.new_empty(num_heads, num_keys, plain + turning)
        keys[..., :plain] = torch.bmm(shared, weights.key_up.transpose(1, 2))
        keys[..., plain:] = latents[:, rank:]
        values = torch.bmm(shared, weights.value_up)
        for query in range(0, num_tokens, QUERIES_AT_ONCE):
            first_key, last_key = (
                ends[query : query + QUERIES_AT_ONCE] - key for ends in (part.first_key, part.last_key)
            )
            if last_key[-1] < 0 or first_key[0] >= num_keys:
                continue
            some = slice(query, query + QUERIES_AT_ONCE)
            scores = torch.bmm(by_head[:, some], keys.transpose(1, 2)).float()
            if first_key[-1] > 0 or last_key[0] < num_keys - 1:
                at = np.arange(num_keys)
                hidden = (at < first_key[:, None]) | (at > last_key[:, None])
                scores.masked_fill_(torch.from_numpy(hidden), float("-inf"))
            highest = torch.maximum(scores.amax(-1, keepdim=True), peak[:, some])
            shrink = (peak[:, some] - highest).exp_()
            scores.sub_(highest).exp_()
            peak[:, some] = highest
            total[:, some].mul_(shrink).add_(scores.sum(-1, keepdim=True))
            mixed[:, some].mul_(shrink).add_(torch.bmm(scores.to(values.dtype), values))
    return mixed.div_(total).transpose(0, 1)


def _rotated(x: torch.Tensor, plan: AttentionPlan, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, P], in fp32."""
    cos, sin = angles_of(plan, cos_sin, positions)
    wide = x.float()
    return (wide * cos).addcmul_(torch.roll(wide, x.shape[-1] // 2, -1), sin)
