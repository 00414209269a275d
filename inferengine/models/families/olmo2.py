"""OLMo 2 (OLMo team 2025): Llama with norms after both blocks in place of those before, and norms of all queries and
all keys of a token together."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.hf_config import ConfigReader

build = llama.build
NORMS = {
    "post_attention_layernorm": "attention_out_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
    "self_attn.q_norm": "attention.q_wide",
    "self_attn.k_norm": "attention.k_wide",
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    return read_olmo(config, (None,) * config.integer("num_hidden_layers"))


def read_olmo(config: ConfigReader, windows: tuple[int | None, ...], *, theta: float = 10_000.0) -> DecoderConfig:
    """Read what OLMo 2 and 3 share. `theta` is the default of the rotation's base."""
    shared = llama.read_decoder(config, windows, llama.Defaults(theta=theta))
    eps = config.number("rms_norm_eps", 1e-5, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, pre_norms=False, post_norms=True, wide_qk_norm="all_heads")


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return llama.decoder_weight_map(norms=NORMS)
