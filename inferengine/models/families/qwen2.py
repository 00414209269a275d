"""Qwen 2 and 2.5 (Qwen team 2024): Llama with biases on q, k and v, and a sliding window in the upper layers where the
config turns it on."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader, read_windows

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    return dataclasses.replace(llama.read_decoder(config, read_upper_windows(config)), qkv_bias=True)


def read_upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return each layer's window, from `layer_types`; before transformers 5, layers from `max_window_layers` on have
    one where `use_sliding_window` is set."""
    num_layers = config.integer("num_hidden_layers")
    window = read_switched_window(config)
    if window is None or config.value("layer_types") is not None:
        return read_windows(config, num_layers, window)
    first = config.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def read_switched_window(config: ConfigReader) -> int | None:
    """Return the window where `use_sliding_window` is set: 4096 where the config says none, no window where it says
    null. Where it is not set the width says nothing: transformers writes 0 for Qwen 2 MoE."""
    on, width = config.flag("use_sliding_window", False), config.value("sliding_window")
    if not on or ("sliding_window" in config.values and width is None):
        return None
    return config.integer("sliding_window", 4096)
