"""Attention over the paged cache: projections around two ops. Knows its KV group and its cache tensor, nothing else."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.layers.norm import RMSNorm


class Attention(nn.Module):
    """Grouped-query attention. `kv` and `cos_sin` are bound after loading, at fixed addresses."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.ops = ops
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.norm_eps
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.window = config.windows[layer]
        self.group = config.group_windows.index(self.window)
        self.rope = config.rope_of(layer)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(ops, config.hidden_size, [queries, keys, keys], bias=config.qkv_bias)
        self.out = Linear(ops, queries, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(ops, config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(ops, config.head_dim, config.norm_eps) if config.qk_norm else None
        self.kv: torch.Tensor | None = None
        self.cos_sin: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [T, E] -> [T, E]; K and V of the batch's tokens are in the cache afterwards."""
        q = self.ops.qkv_rope_write(
            self.qkv(x),
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            self.cos_sin,
            batch.positions,
            batch.slot_mapping[self.group],
            self.kv,
            self.num_heads,
            self.num_kv_heads,
        )
        mixed = self.ops.attention(q, self.kv, batch, self.group, self.scale, self.window, self.softcap)
        return self.out(mixed)
