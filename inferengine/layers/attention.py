"""Attention over the paged cache: projections around one op. It knows only its KV group and its cache tensor."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.batch import Batch, NewKeys
from inferengine.kernels.bidirectional import bidirectional_attention, rotate
from inferengine.kernels.ops import Ops
from inferengine.kernels.reference.ops import rms_norm
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.layers.norm import HeadNorm, RMSNorm
from inferengine.layers.parallel import DimensionRange, ParallelRMSNorm
from inferengine.layers.rotary import RopeConfig, head_order


class CachedAttention(nn.Module):
    """An attention layer's place in the KV cache: what KVCache binds to it. `rope` is the rotation that it needs."""

    def __init__(self, rope: RopeConfig | None = None) -> None:
        super().__init__()
        self.rope = rope
        self.kv: torch.Tensor | None = None
        self.kv_scales = (1.0, 1.0)  # of an FP8 cache: K and V are divided by them before they are stored
        self.cos_sin: torch.Tensor | None = None


class Attention(CachedAttention):
    """Grouped-query attention; the decoder layer decides what is fused with `qkv` and `out`.

    `kv` and `cos_sin` are bound after loading and stay at fixed addresses.
    """

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__(config.rope_of(layer))
        self.ops = ops
        self.window = config.windows[layer]
        self.num_heads, self.eps = config.num_heads, config.norm_eps
        self.num_kv_heads, self.head_dim = config.kv_shape(self.window)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.group = config.group_windows.index(self.window)
        parts, has_keys = config.qkv_parts(layer), config.kv_source(layer) == layer
        self.new_keys = NewKeys(has_keys, not config.has_keys_as_values(layer), config.value_norm)
        self.qkv = Linear(ops, config.hidden_size, parts, bias=config.qkv_bias)
        self.out = Linear(ops, parts[0], config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(ops, self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(ops, self.head_dim, config.norm_eps) if config.qk_norm and has_keys else None
        self.qkv.order = _row_order(config, self.rope)
        self.query_scaling, self.has_wide_norms = config.query_scaling, bool(config.wide_qk_norm)
        self.is_adjusted = self.has_wide_norms or config.query_scaling is not None
        if self.has_wide_norms:
            self.q_wide = _wide_norm(ops, config, config.num_heads)
            self.k_wide = _wide_norm(ops, config, config.num_kv_heads)
        self.sinks = nn.Parameter(torch.empty(config.num_heads), requires_grad=False) if config.sinks else None
        self.is_causal = config.is_causal
        self.held: DimensionRange | None = None  # which of the model's query heads it has; None: all
        self.sink_scores: torch.Tensor | None = None
        self.q_gain: torch.Tensor | None = None
        self.k_gain: torch.Tensor | None = None
        self.norms_together: tuple[torch.Tensor, torch.Tensor] | None = None  # gains of norms that one kernel computes

    def mix(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend with packed qkv [T, (H + 2K) * D], or what `new_keys` says -> [T, H * D]; K and V of the batch's
        tokens are in the cache afterwards, unless tokens see later ones."""
        if not self.is_causal:
            return self._mix_both_ways(qkv, batch)
        return self.ops.attention_qkv(
            self._adjusted(qkv, batch) if self.is_adjusted else qkv,
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
            self.sink_scores,
            self.new_keys,
        )

    def _mix_both_ways(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend among all tokens of each row, which are all of its sequence."""
        assert batch.columns is not None  # such steps are never captured
        qkv = self._adjusted(qkv, batch) if self.is_adjusted else qkv
        heads = qkv.view(len(qkv), -1, self.head_dim)
        queries, keys, values = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_gain is not None and self.k_gain is not None:
            queries, keys = rms_norm(queries, self.q_gain, self.eps), rms_norm(keys, self.k_gain, self.eps)
        if self.cos_sin is not None:
            queries, keys = (rotate(each, self.cos_sin, batch.positions) for each in (queries, keys))
        bounds = batch.columns.query_start.tolist()
        mixed = bidirectional_attention(
            queries, keys, values, bounds, self.scale, self.window, query_start=batch.query_start
        )
        return mixed.reshape(len(qkv), -1)

    def finish(self) -> None:
        """Set the plain attributes that `mix` reads, once the weights are loaded."""
        self.sink_scores = None if self.sinks is None else self.sinks.data.float()
        order = None if self.rope is None else head_order(self.rope)
        self.q_gain = None if self.q_norm is None else _in_order(self.q_norm.weight.data, order)
        self.k_gain = None if self.k_norm is None else _in_order(self.k_norm.weight.data, order)
        if order is not None and self.has_wide_norms:
            for norm in (self.q_wide, self.k_wide):
                norm.weight.data.copy_(_in_order(norm.weight.data.view(-1, self.head_dim), order).view_as(norm.weight))
        if self.has_wide_norms and isinstance(self.q_wide, RMSNorm) and isinstance(self.k_wide, RMSNorm):
            self.norms_together = self.q_wide.weight.data, self.k_wide.weight.data

    def _adjusted(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Norm and scale queries and keys in place as the kernels do not, before they rotate them."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.norms_together is not None:
            self.ops.norm_queries_keys(qkv, *self.norms_together, self.eps)
        elif self.has_wide_norms:
            for norm, first, size in ((self.q_wide, 0, queries), (self.k_wide, queries, keys)):
                part = qkv.narrow(1, first, size)
                part.copy_(norm(part.contiguous()))
        if self.query_scaling is not None:
            beta, context = self.query_scaling
            factors = torch.log1p((batch.positions // context).float()).mul_(beta).add_(1.0)
            qkv.narrow(1, 0, queries).mul_(factors.to(qkv.dtype).unsqueeze(1))
        return qkv


def _row_order(config: DecoderConfig, rope: RopeConfig | None) -> torch.Tensor | None:
    """Return the order of the kernels for rows of a checkpoint's q, k and v [(H + 2K) * D] in the order of the kernels;
    None: as they are."""
    within = None if rope is None else head_order(rope)
    if within is None and not config.qkv_interleaved:
        return None
    plain = torch.arange(config.head_dim, device="cpu")
    within = plain if within is None else within
    heads = torch.arange(config.num_heads + 2 * config.num_kv_heads, device="cpu")
    if config.qkv_interleaved:  # queries of all heads, then keys, then values
        heads = torch.cat([heads[kind::3] for kind in range(3)])
    orders = [within] * (config.num_heads + config.num_kv_heads) + [plain] * config.num_kv_heads
    return torch.cat([head * config.head_dim + order for head, order in zip(heads, orders, strict=True)])


def _in_order(gain: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return gain if order is None else gain[..., order.to(gain.device)]


def _wide_norm(ops: Ops, config: DecoderConfig, num_heads: int) -> RMSNorm | HeadNorm | ParallelRMSNorm:
    if config.wide_qk_norm == "all_heads":
        return RMSNorm(ops, num_heads * config.head_dim, config.norm_eps)
    return HeadNorm(num_heads, config.head_dim, config.norm_eps, parts=config.wide_qk_norm == "each_head_by_itself")
