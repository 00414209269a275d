"""Qwen 3, mixture of experts (Qwen team 2025): Qwen 3 with experts in every layer, or in those that the config
names."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, moe_targets
from inferengine.models.families.qwen2_moe import read_moe
from inferengine.models.hf_config import ConfigReader

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    on = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if config.value("sliding_window") is not None or on else None
    windows = (window if on else None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(config, windows)
    return dataclasses.replace(shared, qk_norm=True, moe=read_moe(config))


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map()
    return names._replace(targets=names.targets | moe_targets("model.layers.{}.mlp", config.moe))
