"""Gemma 3, text (Gemma team 2025): norms before and after both blocks, norms on q and k, five sliding layers to one
full layer with a rotation of its own, embeddings scaled by sqrt(E). Norms multiply by 1 + w: folded in at load."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.mlp import GatedMLP
from inferengine.layers.norm import RMSNorm
from inferengine.layers.rotary import RopeConfig
from inferengine.models.decoder import DecoderModel, Target, WeightMap, attention_targets, gated_mlp_targets
from inferengine.models.hf_config import ConfigReader, read_rope, read_windows


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Gemma3TextConfig."""
    num_layers, num_heads = config.integer("num_hidden_layers", 26), config.integer("num_attention_heads", 8)
    hidden_size, head_dim = config.integer("hidden_size", 2304), config.integer("head_dim", 256)
    max_position = config.integer("max_position_embeddings", 131_072)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False)
    config.expect("attn_logit_softcapping")  # transformers keeps the key and applies nothing
    window = config.integer("sliding_window", 4096)
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    else:
        windows = tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    by_layer_type = config.value("rope_parameters") is not None
    bias = config.flag("attention_bias", False)
    return DecoderConfig(
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size", 262_208),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6, zero=True),
        windows=windows,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        rope=read_rope(config, head_dim, max_position, layer_type="full_attention", default_theta=1e6),
        local_rope=(
            read_rope(config, head_dim, max_position, layer_type="sliding_attention")
            if by_layer_type
            else RopeConfig(local_theta, head_dim)
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        activation="gelu_tanh",
        logits_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5,
        dtype=config.dtype(),
    )


class Gemma3Layer(nn.Module):
    """Each block's output is normed again before it joins the residual stream."""

    def __init__(self, ops: Ops, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm, self.attention_out_norm = RMSNorm(ops, size, eps), RMSNorm(ops, size, eps)
        self.attention = Attention(ops, config, layer)
        self.mlp_norm, self.mlp_out_norm = RMSNorm(ops, size, eps), RMSNorm(ops, size, eps)
        self.mlp = GatedMLP(ops, size, config.intermediate_size, activation=config.activation)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Residual stream [T, E] -> the same after this layer, in place."""
        attention, mlp = self.attention, self.mlp
        mixed = attention.mix(attention.qkv.of_norm(x, self.attention_norm), batch)
        x = x.add_(self.attention_out_norm(attention.out(mixed)))
        return x.add_(self.mlp_out_norm(mlp.down(mlp.hidden(x, self.mlp_norm))))


class Gemma3(DecoderModel):
    """Token ids of a batch -> residual stream; `logits` for the rows of it that draw."""

    norm: RMSNorm

    def __init__(self, ops: Ops, config: DecoderConfig) -> None:
        super().__init__()
        self.embed = TokenEmbedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale)
        self.layers = nn.ModuleList(Gemma3Layer(ops, config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(ops, config.hidden_size, config.norm_eps)
        tied = self.embed if config.tied_embeddings else None
        self.head = Head(ops, config.vocab_size, config.hidden_size, tied=tied, softcap=config.logits_softcap)

    def forward(self, batch: Batch) -> torch.Tensor:
        """[T] ids -> residual stream [T, E]."""
        x: torch.Tensor = self.embed(batch.input_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] rows of the residual stream -> [N, V]."""
        return self.head.of_norm(x, self.norm)


def build(ops: Ops, config: DecoderConfig) -> Gemma3:
    """Build the model on torch's default device, without weights."""
    return Gemma3(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    norms = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
    }
    return WeightMap(
        {
            "model.embed_tokens.weight": Target("embed.weight"),
            **{
                f"model.layers.{{}}.{here}.weight": Target(f"layers.{{}}.{there}.weight", plus_one=True)
                for here, there in norms.items()
            },
            **attention_targets("model.layers.{}.self_attn", "layers.{}.attention"),
            **gated_mlp_targets("model.layers.{}.mlp", "layers.{}.mlp"),
            "model.norm.weight": Target("norm.weight", plus_one=True),
            "lm_head.weight": Target("head.weight"),
        }
    )
