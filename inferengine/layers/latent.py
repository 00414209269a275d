"""Latent attention (DeepSeek-V2, 2024) over the paged cache: projections around one op.

A token's latent is a short vector of which the keys and values of all heads are products. The cache holds it, with one
rotated key that all heads share, in place of every head's keys and values.
"""

from __future__ import annotations

import torch

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import CachedAttention
from inferengine.layers.decoder_config import DecoderConfig, LatentConfig
from inferengine.layers.linear import Linear
from inferengine.layers.norm import RMSNorm
from inferengine.layers.rotary import RopeConfig, head_order

EPS = 1e-6  # of the norms within the block, which no config names


class UpProjection(Linear):
    """The weight that makes keys and values of a latent. Attention multiplies queries, and what it has mixed, by its
    two halves, head by head: `key_up` [H, N, R] and `value_up` [H, R, V]. They are held as numbers, whatever a
    checkpoint stores."""

    takes_adapters = False

    def __init__(self, ops: Ops, latent: LatentConfig, num_heads: int) -> None:
        super().__init__(ops, latent.rank, num_heads * (latent.plain_dim + latent.value_dim))
        self.num_heads, self.plain_dim = num_heads, latent.plain_dim
        self.dtype = torch.float32  # of the model's arithmetic
        self.key_up: torch.Tensor | None = None
        self.value_up: torch.Tensor | None = None

    def finish(self) -> None:
        """Divide the weight into the matrices of the heads, once it is loaded."""
        if self.source is None:
            assert self.weight is not None
            numbers = self.weight.data
        else:
            numbers = self.source.numbers().to(self.dtype)
        heads = numbers.view(self.num_heads, -1, self.in_features)
        self.key_up = heads[:, : self.plain_dim].contiguous()
        self.value_up = heads[:, self.plain_dim :].transpose(1, 2).contiguous()
        self.weight = self.source = None


class LatentAttention(CachedAttention):
    """The decoder layer decides what is fused with `qkv` and `out`. `qkv` makes the queries, or what queries are made
    of, and the latent with the key to be rotated."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__(config.rope_of(layer))
        latent, rope = config.latent, self.rope
        assert latent is not None  # what such a layer is built of
        assert rope is not None
        self.ops, self.rank, self.scale = ops, latent.rank, config.attention_scale
        self.group = config.group_windows.index(config.windows[layer])
        queries = config.num_heads * latent.query_dim
        self.query_width = latent.query_rank or queries
        cached = latent.rank + latent.rotary_dim
        self.qkv = Linear(ops, config.hidden_size, [self.query_width, cached], bias=config.qkv_bias)
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if latent.query_rank is not None:
            self.query_norm = RMSNorm(ops, latent.query_rank, EPS)
            self.query_up = Linear(ops, latent.query_rank, queries)
        self.latent_norm = RMSNorm(ops, latent.rank, EPS)
        self.up = UpProjection(ops, latent, config.num_heads)
        self.out = Linear(ops, config.num_heads * latent.value_dim, config.hidden_size, bias=config.out_bias)
        self._set_orders(rope, latent, config.num_heads)

    def mix(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend with [T, what `qkv` makes] -> [T, H * V]; the latents of the batch's tokens are in the cache
        afterwards."""
        queries, new = qkv[:, : self.query_width], qkv[:, self.query_width :]
        if self.query_norm is not None and self.query_up is not None:
            queries = self.query_up(self.query_norm(queries))
        return self.ops.latent_attention(
            queries,
            new,
            self.latent_norm.gain,
            EPS,
            self.up.key_up,
            self.up.value_up,
            self.cos_sin,
            self.kv,
            batch,
            self.group,
            self.scale,
            self.kv_scales[0],
        )

    def finish(self) -> None:
        """Tell the number format of the arithmetic to the layer that is held as numbers. It finishes after this one."""
        self.up.dtype = self.latent_norm.weight.dtype

    def _set_orders(self, rope: RopeConfig, latent: LatentConfig, num_heads: int) -> None:
        """Put the rotated numbers of queries and keys in the order of the kernels."""
        turning = head_order(rope)
        if turning is None:
            return
        plain = torch.arange(latent.plain_dim, device="cpu")
        query = torch.cat((plain, latent.plain_dim + turning))
        heads = torch.arange(num_heads, device="cpu").unsqueeze(1)
        queries = (heads * latent.query_dim + query).flatten()
        key = torch.cat((torch.arange(latent.rank, device="cpu"), latent.rank + turning))
        if self.query_up is None:
            self.qkv.order = torch.cat((queries, len(queries) + key))
        else:
            self.query_up.order = queries
            first = torch.arange(self.query_width, device="cpu")
            self.qkv.order = torch.cat((first, self.query_width + key))
