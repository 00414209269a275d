"""Attention over the paged cache: projections around one op. It knows only its KV group and its cache tensor."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.layers.norm import RMSNorm


class Attention(nn.Module):
    """Grouped-query attention; the decoder layer decides what is fused with `qkv` and `out`.

    `kv` and `cos_sin` are bound after loading and stay at fixed addresses.
    """

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
        self.kv_scales = (1.0, 1.0)  # of an FP8 cache: K and V are divided by them before they are stored
        self.cos_sin: torch.Tensor | None = None
        self.q_gain: torch.Tensor | None = None
        self.k_gain: torch.Tensor | None = None

    def mix(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Packed qkv [T, (H + 2K) * D] -> [T, H * D]; K and V of the batch's tokens are in the cache afterwards."""
        return self.ops.attention_qkv(
            qkv,
            self.q_gain,
            self.k_gain,
            self.eps,
            self.cos_sin,
            self.kv,
            batch,
            self.group,
            self.num_heads,
            self.num_kv_heads,
            self.scale,
            self.window,
            self.softcap,
            self.kv_scales,
        )

    def finish(self) -> None:
        """Set the plain attributes that `mix` reads, once the weights are loaded."""
        self.q_gain = None if self.q_norm is None else self.q_norm.weight.data
        self.k_gain = None if self.k_norm is None else self.k_norm.weight.data
