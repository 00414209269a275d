"""Attention on the CPU: rotation, cache write and paged attention in vectorised torch, no loop over rows.

Block-granular flash decoding (Dao et al. 2023): the keys of all decode rows are gathered at once in chunks of whole
blocks, every (row, chunk) pair is one item of a batched matrix product, and partial results are combined by their
log-sum-exp. Prompt tokens run in tiles of flattened queries over the keys of the rows they belong to. What depends only
on the step (which blocks, which masks) is worked out once for all layers of a group: cpu_attention_plan.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from inferengine.kernels.cpu.attention_plan import (
    FP8,
    Angles,
    AttentionPlan,
    DecodePlan,
    TilePlan,
    number_type,
    stored,
)
from inferengine.kernels.reference.ops import rms_norm

FP8_MAX = 448.0


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
) -> torch.Tensor:
    """Packed qkv [T, (H + 2K) * D] -> [T, H * D], K and V of the tokens in the cache.

    Optional norm of each query and key head, NeoX rotation (Su et al. 2021) by `cos_sin` [max_position, D] (cosines in
    the first half; None: no rotation), the write to `kv` [num_blocks, 2, K, block_size, D], then attention. `kv_scales`
    divide K and V before they are stored: 1 unless the cache is FP8.
    """
    plan: AttentionPlan = batch.plans[group]
    head_dim = kv.shape[-1]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    if q_norm is not None and k_norm is not None:
        gain = torch.cat((q_norm.expand(num_heads, head_dim), k_norm.expand(num_kv_heads, head_dim)))
        heads[:, :-num_kv_heads] = rms_norm(heads[:, :-num_kv_heads], gain, eps)
    if cos_sin is not None:
        cos, sin = plan.angles.get(id(cos_sin)) or _angles(plan, cos_sin, batch.positions)
        heads = heads if heads.dtype == torch.float32 else heads.float()
        turned = heads.narrow(1, 0, num_heads + num_kv_heads)
        rolled = torch.roll(turned, head_dim // 2, -1)
        turned.mul_(cos).addcmul_(rolled, sin)
    queries, new = heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, 2 * num_kv_heads)
    if queries.dtype != number_type(kv):
        queries = queries.to(number_type(kv))
    if kv.dtype != FP8:
        new = new if new.dtype == kv.dtype else new.to(kv.dtype)
        kv.view(-1, head_dim).index_put_((plan.written,), new)
        if plan.kv_copy is not None:
            return _copied_first(queries, new, kv, plan, scale, softcap)
        return attention(queries, kv, batch, group, scale, window, softcap)
    new = torch.cat((new[:, :num_kv_heads] / kv_scales[0], new[:, num_kv_heads:] / kv_scales[1]), 1)
    codes = new.clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    kv.view(torch.uint8).view(-1, head_dim).index_put_((plan.written,), codes)
    mixed = attention(queries, kv, batch, group, scale * kv_scales[0], window, softcap)
    return mixed.mul_(kv_scales[1]).to(qkv.dtype)


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: Any,
    group: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [T, H, D] over the paged keys of each token's row -> [T, H * D]. `window` is baked into the step's plan."""
    plan: AttentionPlan = batch.plans[group]
    num_tokens, num_heads, head_dim = q.shape
    if len(plan.decodes) == 1 and not plan.tiles:
        return _decode(q, kv, plan.decodes[0], scale, softcap)
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
    for part in plan.decodes:
        out[part.begin : part.end] = _decode(q[part.begin : part.end], kv, part, scale, softcap)
    for tile in plan.tiles:
        out[tile.begin : tile.end] = _prompt_tile(q[tile.begin : tile.end], kv, tile, scale, softcap)
    return out


def _copied_first(
    q: torch.Tensor, new: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float, softcap: float | None
) -> torch.Tensor:
    """The rows whose keys lie side by side, then the tiles of prompts."""
    count = plan.kv_copy.num_tokens
    mixed: torch.Tensor = plan.kv_copy.attention(q[:count], new[:count], kv, scale, softcap)
    if not plan.tiles:
        return mixed
    tiles = [_prompt_tile(q[tile.begin : tile.end], kv, tile, scale, softcap) for tile in plan.tiles]
    return torch.cat((mixed, *tiles))


def _numbers(gathered: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """What was gathered, as numbers still to be scaled."""
    return gathered.view(FP8).to(torch.float32) if kv.dtype == FP8 else gathered


def _angles(plan: AttentionPlan, cos_sin: torch.Tensor, positions: torch.Tensor) -> Angles:
    """Looked up once per step."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin.index_select(0, positions).view(-1, 2, 1, half)
    made = plan.angles[id(cos_sin)] = Angles(*torch.mul(rows, _HALVES).view(-1, 2, 1, 2 * half).unbind(1))
    return made


_HALVES = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).view(2, 2, 1)  # cosines as they are, sines against their partners


def _decode(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, scale: float, softcap: float | None) -> torch.Tensor:
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size, num_rows = kv.shape[2], kv.shape[3], len(plan.row_begin)
    if plan.num_queries > 1:
        q = _by_kv_head(q, plan, num_rows, num_kv_heads)
    torch.index_select(stored(kv).view(-1, block_size * head_dim), 0, plan.places, out=plan.gathered)
    keys, values = _numbers(plan.gathered, kv).view(2, plan.num_items * num_kv_heads, -1, head_dim).unbind(0)
    queries = q if plan.rows is None else q.index_select(0, plan.rows)
    queries = queries.reshape(plan.num_items * num_kv_heads, -1, head_dim)
    if softcap is None and plan.num_queries == 1:
        scores = torch.baddbmm(plan.mask, queries, keys.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_query = scores.view(len(scores), plan.num_queries, -1, scores.shape[2])
        by_query.add_(plan.mask.unsqueeze(2))
    weights = torch.softmax(scores, -1)
    partial = torch.bmm(weights, values)
    if plan.rows is None:
        return _by_token(partial, plan, num_rows, num_kv_heads, num_heads * head_dim)
    # log-sum-exp without another pass of exponentials: the largest weight is exp(0) / sum
    peak = scores.amax(-1).float() - weights.amax(-1).float().log_()
    logsumexp = peak.view(plan.num_items, -1).numpy()
    top = np.maximum.reduceat(logsumexp, plan.row_begin, axis=0)
    share = np.exp(logsumexp - top[plan.host_rows])
    share /= np.add.reduceat(share, plan.row_begin, axis=0)[plan.host_rows]
    partial = partial.view(plan.num_items, -1, head_dim).mul_(torch.from_numpy(share).unsqueeze(-1))
    out = torch.zeros(num_rows, partial.shape[1] * head_dim, dtype=q.dtype)
    out.index_add_(0, plan.rows, partial.view(plan.num_items, -1))
    return _by_token(out, plan, num_rows, num_kv_heads, num_heads * head_dim)


def _by_kv_head(q: torch.Tensor, plan: DecodePlan, num_rows: int, num_kv_heads: int) -> torch.Tensor:
    """[T, H, D] -> [R, K * Q * H / K, D]: queries of a row that read the same keys become neighbours."""
    _, num_heads, head_dim = q.shape
    queries = q if plan.tokens is None else q.index_select(0, plan.tokens)
    queries = queries.view(num_rows, plan.num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return queries.transpose(1, 2).reshape(num_rows, -1, head_dim)


def _by_token(mixed: torch.Tensor, plan: DecodePlan, num_rows: int, num_kv_heads: int, width: int) -> torch.Tensor:
    """The way back -> [T, H * D]; repetitions are left out."""
    if plan.num_queries == 1:
        return mixed.view(num_rows, width)
    by_query = mixed.view(num_rows, num_kv_heads, plan.num_queries, -1).transpose(1, 2).reshape(-1, width)
    return by_query if plan.is_first is None else by_query[plan.is_first]


def _prompt_tile(
    q: torch.Tensor, kv: torch.Tensor, tile: TilePlan, scale: float, softcap: float | None
) -> torch.Tensor:
    count, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group_heads = num_heads // num_kv_heads
    gathered = _numbers(stored(kv).view(-1, block_size * head_dim).index_select(0, tile.places), kv).to(q.dtype)
    keys, values = gathered.view(2, num_kv_heads, 1, -1, head_dim)[:, :, :, : tile.mask.shape[1]]
    queries = q.view(count, num_kv_heads, group_heads, head_dim).permute(1, 2, 0, 3)
    if softcap is None:
        shape = (num_kv_heads, group_heads, -1, head_dim)
        mixed = functional.scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=tile.mask.view(1, 1, count, -1), scale=scale
        )
    else:
        scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
        mixed = torch.matmul(torch.softmax(scores.add_(tile.mask), -1), values)
    return mixed.permute(2, 0, 1, 3).reshape(count, num_heads * head_dim)
