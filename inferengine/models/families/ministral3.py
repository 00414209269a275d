"""Ministral 3 (Mistral 2025): Mistral with YaRN, and queries that grow with the logarithm of their position beyond
the original context."""

from __future__ import annotations

import dataclasses
from typing import Any

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader, read_one_window

build, weight_map = llama.build, llama.weight_map
ROPE: dict[str, Any] = {  # of a config without a rotation
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Ministral3Config."""
    windows = read_one_window(config)
    config.default_rope(ROPE)
    rope = config.value("rope_parameters") or config.value("rope_scaling")
    scaling = None
    if isinstance(rope, dict) and rope.get("llama_4_scaling_beta"):
        reader = ConfigReader(rope, f"{config.where}: rope_parameters")
        beta = reader.number("llama_4_scaling_beta")
        scaling = (beta, reader.integer("original_max_position_embeddings"))
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    shared = llama.read_decoder(config, windows, llama.Defaults(head_dim=128, rope_keys=own))
    eps = config.number("rms_norm_eps", 1e-5, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, query_scaling=scaling)
