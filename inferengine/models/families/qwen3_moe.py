"""Qwen 3, mixture of experts (Qwen team 2025): Qwen 3 with experts in every layer, or in those that the config
names."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.families import qwen2_moe
from inferengine.models.families.qwen2 import read_switched_window
from inferengine.models.hf_config import ConfigReader

build, weight_map = llama.build, qwen2_moe.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    config.expect("use_qk_norm", True)  # Qwen3-Coder says what all have
    windows = (read_switched_window(config),) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(config, windows)
    return dataclasses.replace(shared, qk_norm=True, moe=qwen2_moe.read_moe(config))
