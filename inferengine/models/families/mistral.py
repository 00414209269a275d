"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer, where the config sets one."""

from __future__ import annotations

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader, read_windows

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json. `sliding_window` null: no window; absent: 4096, as in the first Mistral."""
    on = "sliding_window" not in config.values or config.value("sliding_window") is not None
    window = config.integer("sliding_window", 4096) if on else None
    return llama.read_decoder(config, read_windows(config, config.integer("num_hidden_layers"), window))
