"""DeepSeek-V3 and R1 (DeepSeek-AI 2024), and Kimi K2, which is built like them: V2 with experts that are chosen by the
sigmoid of their scores. The layer that predicts a second token is left out."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.families import deepseek_v2
from inferengine.models.hf_config import ConfigReader, refused

build = llama.build
weight_map = deepseek_v2.weight_map


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' DeepseekV3Config."""
    shared = deepseek_v2.read_decoder(config, interleaved=config.flag("rope_interleave", True))
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    moe = deepseek_v2.read_moe(config, first_expert_layer=3, num_shared=1, size=2048)
    groups = deepseek_v2.read_groups(config, moe, (8, 4))
    if groups is not None and moe.num_experts // groups[0] < 2:
        raise refused(f"{config.where}: a group of experts must have two at least, of which the best are compared")
    moe = dataclasses.replace(
        moe,
        sigmoid=True,
        corrected=True,
        groups=groups,
        renormalized=config.flag("norm_topk_prob", True),
        factor=config.number("routed_scaling_factor", 2.5),
    )
    unused = config.integer("num_nextn_predict_layers", 1, least=0)
    return dataclasses.replace(shared, moe=moe, unused_layers=unused)
