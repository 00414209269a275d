"""Qwen 3, dense (Qwen team 2025): Llama with a norm on every query and key head, and no biases."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.families.qwen2 import read_upper_windows
from inferengine.models.hf_config import ConfigReader

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    return dataclasses.replace(
        llama.read_decoder(config, read_upper_windows(config), llama.Defaults(head_dim=128)), qk_norm=True
    )
