"""GLM-4 of 2024 (GLM team 2024): Llama with biases on q, k and v, gate and up in one tensor; half of each head turns,
neighbours together."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.families import phi3
from inferengine.models.hf_config import ConfigReader

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(
        config, windows, llama.Defaults(head_dim=128, partial=0.5, interleaved=True, attention_bias=True)
    )
    eps = config.number("rms_norm_eps", 1.5625e-7, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, out_bias=False)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return phi3.with_fused(llama.decoder_weight_map(), phi3.GATE_UP)
