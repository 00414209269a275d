"""Cohere's Command R (2024): attention and feed-forward side by side behind one layer norm without bias, neighbours
of a head turn together, and a factor on the logits."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.hf_config import ConfigReader

build = llama.build
NORMS = {"self_attn.q_norm": "attention.q_wide", "self_attn.k_norm": "attention.k_wide"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    shared = read_cohere(config, (None,) * config.integer("num_hidden_layers"), theta=500_000.0)
    norm = "each_head" if config.flag("use_qk_norm", False) else ""
    return dataclasses.replace(shared, wide_qk_norm=norm)


def read_cohere(config: ConfigReader, windows: tuple[int | None, ...], *, theta: float) -> DecoderConfig:
    """Read what Command R and its successors share. `theta` is the default of the rotation's base."""
    return dataclasses.replace(
        llama.read_decoder(
            config, windows, llama.Defaults(eps="layer_norm_eps", interleaved=True, theta=theta, tied=True)
        ),
        norm="layer_without_bias",
        parallel="shared",
        logits_scale=config.number("logit_scale", 0.0625),
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return llama.decoder_weight_map(norms=NORMS)
