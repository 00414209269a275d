"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(config, windows, llama.Defaults(head_dim=128, attention_bias=True))
    return dataclasses.replace(shared, out_bias=config.flag("attention_out_bias", False))
