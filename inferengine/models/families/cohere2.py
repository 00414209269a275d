"""Cohere's Command R7B and Command A (2024, 2025): Command R with a sliding window in three layers of four; the
layers with full attention have no rotation."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.families import cohere
from inferengine.models.hf_config import ConfigReader, read_windows

build, weight_map = cohere.build, cohere.weight_map
IN_WORDS = {  # what the published configs say in words, and the code does always
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Cohere2Config."""
    for name, only in IN_WORDS.items():
        config.expect(name, only)
    num_layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    pattern = config.integer("sliding_window_pattern", config.integer("layer_switch", 4))
    windows = tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    shared = cohere.read_cohere(config, windows, theta=10_000.0)
    full = tuple(layer for layer, window in enumerate(windows) if window is None)
    return dataclasses.replace(shared, no_rope_layers=full)
