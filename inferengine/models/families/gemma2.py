"""Gemma 2 (Gemma team 2024): norms before and after both blocks, soft caps on attention scores and logits, a sliding
window in every other layer."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.hf_config import ConfigReader, read_windows

build = llama.build
NORMS = {
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Gemma2Config."""
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False)
    config.value("sliding_window_size")  # published beside sliding_window, which alone is read
    num_layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    windows = tuple(None if layer % 2 else window for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    shared = llama.read_decoder(config, windows, llama.Defaults(head_dim=256, activations=llama.GELU_TANH, tied=True))
    return dataclasses.replace(
        shared,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_cap(config, "attn_logit_softcapping", 50.0),
        logits_softcap=_cap(config, "final_logit_softcapping", 30.0),
        embedding_scale=shared.hidden_size**0.5,
        rounds_embedding_scale=True,
        post_norms=True,
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return llama.decoder_weight_map(norms=NORMS, plus_one=True)


def _cap(config: ConfigReader, name: str, default: float) -> float | None:
    return config.optional_number(name) if name in config.values else default
