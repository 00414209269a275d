"""Nemotron 3 and 4, Minitron (NVIDIA 2024): layer norms that multiply by 1 + w, a plain feed-forward with squared
ReLU, rotary embedding on half of each head."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, mlp_targets
from inferengine.models.hf_config import ConfigReader

build = llama.build
ACTIVATIONS = {"relu2": "relu2"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(config, windows, llama.Defaults(eps="norm_eps", activations=ACTIVATIONS, partial=0.5))
    return dataclasses.replace(shared, norm="layer", gated_mlp=False)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map(plus_one=True)
    return names._replace(targets=names.targets | mlp_targets("model.layers.{}.mlp", up="up_proj", down="down_proj"))
