"""Gemma (Gemma team 2024): Llama with tanh GELU, embeddings scaled by sqrt(E), and norms that multiply by 1 + w."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.hf_config import ConfigReader

build = llama.build
ACTIVATIONS = {**llama.GELU_TANH, "gelu": "gelu_tanh"}  # the first configs say gelu and mean its approximation


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", False)
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(config, windows, llama.Defaults(head_dim=256, activations=ACTIVATIONS, tied=True))
    return dataclasses.replace(shared, embedding_scale=shared.hidden_size**0.5, rounds_embedding_scale=True)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return llama.decoder_weight_map(plus_one=True)
