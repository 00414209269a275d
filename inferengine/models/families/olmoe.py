"""OLMoE (Muennighoff et al. 2024): Llama with experts in every layer and norms of all queries and all keys of a token
together."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, moe_targets
from inferengine.models.families.qwen2_moe import EXPERTS
from inferengine.models.hf_config import ConfigReader

build = llama.build
NORMS = {"self_attn.q_norm": "attention.q_wide", "self_attn.k_norm": "attention.k_wide"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json. `clip_qkv`, which no published model sets, is refused."""
    config.expect("clip_qkv")
    shared = llama.read_config(config)
    config.rename(EXPERTS)
    moe = MoeConfig(
        num_experts=config.integer("num_experts", 64),
        num_chosen=config.integer("num_experts_per_tok", 8),
        intermediate_size=shared.intermediate_size,
        renormalized=config.flag("norm_topk_prob", False),
    )
    config.skip_training_of_experts()
    eps = config.number("rms_norm_eps", 1e-5, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, wide_qk_norm="all_heads", moe=moe)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map(norms=NORMS)
    return names._replace(targets=names.targets | moe_targets("model.layers.{}.mlp", config.moe))
