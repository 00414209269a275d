"""GLM-4-0414 (Zhipu 2025): GLM-4 with further norms after both blocks."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap
from inferengine.models.families import glm, phi3
from inferengine.models.hf_config import ConfigReader

build = glm.build
NORMS = {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "mlp_out_norm"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    return dataclasses.replace(glm.read_config(config), post_norms=True)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return phi3.with_fused(llama.decoder_weight_map(norms=NORMS), phi3.GATE_UP)
