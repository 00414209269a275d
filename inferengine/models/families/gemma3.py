"""Gemma 3, text (Gemma team 2025): norms before and after both blocks, norms on q and k, five sliding layers to one
full layer with a rotation of its own, embeddings scaled by sqrt(E). Norms multiply by 1 + w: folded in at load."""

from __future__ import annotations

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.rotary import RopeConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.families import gemma2
from inferengine.models.hf_config import ConfigReader, read_rope, read_windows

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Gemma3TextConfig."""
    num_layers, num_heads = config.integer("num_hidden_layers", 26), config.integer("num_attention_heads", 8)
    hidden_size, head_dim = config.integer("hidden_size", 2304), config.integer("head_dim", 256)
    max_position = config.integer("max_position_embeddings", 131_072)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    sees_later = config.flag("use_bidirectional_attention", False)  # EmbeddingGemma
    config.expect("attn_logit_softcapping")  # transformers keeps the key and applies nothing
    window = config.integer("sliding_window", 4096)
    if sees_later:  # it counts tokens on both sides then, and the attention those on one
        window = window // 2 + 1
    pattern = config.integer("sliding_window_pattern", 6)
    if config.value("layer_types") is not None:
        config.value("_sliding_window_pattern")
        windows = read_windows(config, num_layers, window)
    else:
        config.expect("_sliding_window_pattern", pattern)  # a note of transformers, which reads the other name alone
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
            read_rope(
                config.without("rope_theta"),
                head_dim,
                max_position,
                layer_type="sliding_attention",
                default_theta=local_theta,
            )
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
        rounds_embedding_scale=True,
        post_norms=True,
        is_causal=not sees_later,
        dtype=config.dtype(),
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return llama.decoder_weight_map(norms=gemma2.NORMS, plus_one=True)
