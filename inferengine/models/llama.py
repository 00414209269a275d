"""Llama (Touvron et al. 2023; 3.x), and what Mistral (sliding window), Qwen 2 (biases on q, k, v) and Qwen 3 (norms on
q and k) share with it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.mlp import GatedMLP
from inferengine.layers.norm import RMSNorm
from inferengine.models.decoder import DecoderModel, Target, WeightMap, attention_targets, gated_mlp_targets
from inferengine.models.hf_config import ConfigReader, read_rope


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json: full attention in every layer. A window is refused (by `finish`): no Llama was trained with
    one."""
    return read_decoder(config, (None,) * config.integer("num_hidden_layers"))


def read_decoder(
    config: ConfigReader, windows: tuple[int | None, ...], *, head_dim: int | None = None
) -> DecoderConfig:
    """Read the keys that Llama-like families share. `head_dim` is the family's default (None: hidden / heads)."""
    num_layers, num_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", head_dim or hidden_size // num_heads)
    max_position = config.integer("max_position_embeddings", 2048)
    config.expect("hidden_act", "silu")
    config.expect("activation", "swiglu")  # Falcon 3's name for it
    bias = config.flag("attention_bias", False)
    rope = read_rope(config, head_dim, max_position)
    if rope.kind == "yarn":  # max_position_embeddings may still be what it was before the context was extended
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    return DecoderConfig(
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6, zero=True),
        windows=windows,
        attention_scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
    )


class LlamaLayer(nn.Module):
    """Pre-norm attention and feed-forward around a residual stream."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        self.attention = Attention(ops, config, layer)
        self.mlp_norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            ops, config.hidden_size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
        )
        self.following: tuple[RMSNorm | None] = (None,)  # the next layer's first norm; in a tuple: not a submodule

    def forward(
        self, x: torch.Tensor, batch: Batch, normed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream [T, E] -> the same after this layer, in place where the device can. `normed` is x after this
        layer's first norm, where the layer before has computed it. Returned beside it: the same for the next layer."""
        attention, mlp = self.attention, self.mlp
        mixed = attention.mix(attention.qkv.of_norm(x, self.attention_norm, normed), batch)
        x, normed = attention.out.add_to_and_norm(x, mixed, self.mlp_norm)
        return mlp.down.add_to_and_norm(x, mlp.hidden(x, self.mlp_norm, normed), self.following[0])


class Llama(DecoderModel):
    """Token ids of a batch -> residual stream; `logits` for the rows of it that draw."""

    norm: RMSNorm

    def __init__(self, ops: Ops, config: DecoderConfig) -> None:
        super().__init__()
        self.embed = TokenEmbedding(config.vocab_size, config.hidden_size)
        layers = [LlamaLayer(ops, config, layer) for layer in range(config.num_layers)]
        for layer, after in pairwise(layers):
            layer.following = (after.attention_norm,)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        tied = self.embed if config.tied_embeddings else None
        self.head = Head(ops, config.vocab_size, config.hidden_size, tied=tied, softcap=config.logits_softcap)

    def forward(self, batch: Batch) -> torch.Tensor:
        """[T] ids -> residual stream [T, E]."""
        x: torch.Tensor = self.embed(batch.input_ids)
        normed = None
        for layer in self.layers:
            x, normed = layer(x, batch, normed)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] rows of the residual stream -> [N, V]."""
        return self.head.of_norm(x, self.norm)


def build(ops: Ops, config: DecoderConfig) -> Llama:
    """Build the model on torch's default device, without weights."""
    return Llama(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return WeightMap(
        {
            "model.embed_tokens.weight": Target("embed.weight"),
            "model.layers.{}.input_layernorm.weight": Target("layers.{}.attention_norm.weight"),
            "model.layers.{}.post_attention_layernorm.weight": Target("layers.{}.mlp_norm.weight"),
            "model.layers.{}.self_attn.q_norm.weight": Target("layers.{}.attention.q_norm.weight"),
            "model.layers.{}.self_attn.k_norm.weight": Target("layers.{}.attention.k_norm.weight"),
            **attention_targets("model.layers.{}.self_attn", "layers.{}.attention"),
            **gated_mlp_targets("model.layers.{}.mlp", "layers.{}.mlp"),
            "model.norm.weight": Target("norm.weight"),
            "lm_head.weight": Target("head.weight"),
        },
        ignored=(r".*\.rotary_emb\.inv_freq",),
    )
