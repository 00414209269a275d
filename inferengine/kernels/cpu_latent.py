"""Latent attention in plain torch (DeepSeek-V2, 2024): the CPU path, and what the kernels are compared with.

The keys and values of a head are products of a token's latent with matrices of the head. Here no key or value is ever
made: q . (U c) = (U^T q) . c, so the query is multiplied by the key's matrix, attention mixes latents, and what it
mixed is multiplied by the value's matrix. The cache holds the latent and the rotated key that all heads share.
"""

from __future__ import annotations

from typing import Any

import torch

from inferengine.kernels.cpu import FP8, FP8_MAX, AttentionPlan, angles_of, attention, number_type
from inferengine.kernels.reference.ops import rms_norm


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
    """Queries q [T, H * (N + P)] and latents new [T, R + P] -> [T, H * V], the step's latents in the cache.

    The last P numbers of each query and of `new` are rotated (NeoX) by `cos_sin` [max_position, P]. The first R of
    `new` are normed with `gain` [R]. `key_up` [H, N, R] and `value_up` [H, R, V] make a head's keys and values of a
    latent. `kv` [num_blocks, 1, 1, block_size, R + P]; `kv_scale` divides what is stored: 1 unless the cache is FP8.
    """
    plan: AttentionPlan = batch.plans[group]
    num_tokens = q.shape[0]
    num_heads, plain, rank = key_up.shape
    turning = kv.shape[-1] - rank
    queries = q.view(num_tokens, num_heads, plain + turning)
    wide = torch.empty(num_tokens, num_heads, rank + turning, dtype=number_type(kv))
    wide[..., :rank] = torch.bmm(queries[..., :plain].transpose(0, 1), key_up).transpose(0, 1)
    wide[..., rank:] = _rotated(queries[..., plain:], plan, cos_sin, batch.positions)
    latents = torch.empty(num_tokens, rank + turning, dtype=torch.float32)
    latents[:, :rank] = rms_norm(new[:, :rank].contiguous(), gain, eps)
    latents[:, rank:] = _rotated(new[:, None, rank:], plan, cos_sin, batch.positions)[:, 0]
    if kv.dtype == FP8:
        codes = latents.div_(kv_scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        kv.view(torch.uint8).view(-1, rank + turning).index_put_((plan.written,), codes.unsqueeze(1))
    else:
        kv.view(-1, rank + turning).index_put_((plan.written,), latents.to(kv.dtype).unsqueeze(1))
    mixed = attention(wide, kv, batch, group, scale * kv_scale, value_dim=rank).view(num_tokens, num_heads, rank)
    if kv_scale != 1.0:
        mixed = mixed.mul_(kv_scale)
    out = torch.bmm(mixed.to(q.dtype).transpose(0, 1), value_up)
    return out.transpose(0, 1).reshape(num_tokens, -1)


def _rotated(x: torch.Tensor, plan: AttentionPlan, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, heads, P] -> the same, rotated, in fp32."""
    cos, sin = angles_of(plan, cos_sin, positions)
    wide = x.float()
    return (wide * cos).addcmul_(torch.roll(wide, x.shape[-1] // 2, -1), sin)
