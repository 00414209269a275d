"""Granite 3 (IBM 2024): Llama with factors on the embeddings, the attention scores, the residual stream and the
logits.

What blocks add to the residual stream has a factor f. Here the stream is that stream divided by f, which norms do not
see: embeddings have the factor 1 / f more, norms f^2 less to add to the mean square, and layers are Llama's.
"""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.hf_config import ConfigReader

build, weight_map = llama.build, llama.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    shared = llama.read_config(config)
    residual = config.number("residual_multiplier", 1.0)
    embedding = config.number("embedding_multiplier", 1.0) / residual
    logits = config.number("logits_scaling", 1.0)
    return dataclasses.replace(
        shared,
        norm_eps=shared.norm_eps / residual**2,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=None if embedding == 1.0 else embedding,
        logits_scale=None if logits == 1.0 else 1.0 / logits,
    )
