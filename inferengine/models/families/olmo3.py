"""OLMo 3 (OLMo team 2025): OLMo 2 with a sliding window in three layers of four; the scaling of the rotation is of
the layers with full attention alone."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.families import olmo2
from inferengine.models.hf_config import ConfigReader, read_rope, read_windows, refused

build, weight_map = olmo2.build, olmo2.weight_map
THETA = 500_000.0


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Olmo3Config."""
    num_layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    windows = tuple(window if (layer + 1) % 4 else None for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    shared = olmo2.read_olmo(config.without("rope_parameters", "rope_scaling", "rope_theta"), windows)
    scaled_alone = config.without("rope_scaling", "rope_theta")
    full, local = (
        read_rope(reader, shared.head_dim, shared.max_position, layer_type=name, default_theta=THETA)
        for reader, name in ((config, "full_attention"), (scaled_alone, "sliding_attention"))
    )
    if config.value("rope_parameters") is None and full.theta != local.theta and any(windows):
        raise refused(
            f"{config.where}: rope_theta = {full.theta:g} is that of full_attention alone for transformers 5: write "
            "rope_parameters with full_attention and sliding_attention"
        )
    reach = int(full.original_max_position * full.factor) if full.kind == "yarn" else 0
    return dataclasses.replace(shared, rope=full, local_rope=local, max_position=max(shared.max_position, reach))
