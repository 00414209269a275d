"""OLMo 3 (OLMo team 2025): OLMo 2 with a sliding window in three layers of four; the scaling of the rotation is of
the layers with full attention alone."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.rotary import RopeConfig
from inferengine.models.families import olmo2
from inferengine.models.hf_config import ConfigReader, read_rope, read_windows

build, weight_map = olmo2.build, olmo2.weight_map
THETA = 500_000.0


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Olmo3Config."""
    num_layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    windows = tuple(window if (layer + 1) % 4 else None for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    parameters = config.value("rope_parameters")
    if not isinstance(parameters, dict) or not {"full_attention", "sliding_attention"} & parameters.keys():
        shared = olmo2.read_olmo(config, windows, theta=THETA)
        assert shared.rope is not None
        return dataclasses.replace(shared, local_rope=RopeConfig(shared.rope.theta, shared.head_dim))
    shared = olmo2.read_olmo(config.without("rope_parameters"), windows)
    by_type = [
        read_rope(reader, shared.head_dim, shared.max_position, layer_type=name, default_theta=THETA)
        for reader, name in ((config, "full_attention"), (config.without("rope_theta"), "sliding_attention"))
    ]
    return dataclasses.replace(shared, rope=by_type[0], local_rope=by_type[1])
