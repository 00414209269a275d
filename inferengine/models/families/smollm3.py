"""SmolLM 3 (Hugging Face 2025): Llama without rotation in one layer of four (NoPE), and there a sliding window where
the config turns it on."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader, read_windows, refused

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    num_layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    turns = config.value("no_rope_layers")  # 1: the layer has a rotation
    if turns is None:
        turns = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(turns, list) or len(turns) != num_layers or not all(item in (0, 1) for item in turns):
        raise refused(f"{config.where}: no_rope_layers must be a list of {num_layers} numbers, 0 or 1")
    no_rope = tuple(layer for layer, turn in enumerate(turns) if not turn)
    on = config.flag("use_sliding_window", False) and config.value("sliding_window") is not None
    window = config.integer("sliding_window") if on else None
    config.value("sliding_window")
    windows = tuple(window if layer in no_rope else None for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    shared = llama.read_decoder(config, windows, llama.Defaults(theta=2_000_000.0, tied=True))
    return dataclasses.replace(shared, no_rope_layers=no_rope)
