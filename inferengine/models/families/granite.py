"""Granite 3 (IBM 2024): Llama with factors on the embeddings, the attention scores, the residual stream and the
logits."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    embedding = config.number("embedding_multiplier", 1.0)
    logits = config.number("logits_scaling", 1.0)
    return dataclasses.replace(
        llama.read_config(config),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=None if embedding == 1.0 else embedding,
        logits_scale=None if logits == 1.0 else 1.0 / logits,
        residual_scale=config.number("residual_multiplier", 1.0),
    )
