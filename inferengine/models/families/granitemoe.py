"""Granite 3, mixture of experts (IBM 2024): Granite with experts in every layer."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap, moe_targets
from inferengine.models.families import granite
from inferengine.models.families.qwen2_moe import EXPERTS
from inferengine.models.hf_config import ConfigReader

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    shared = granite.read_config(config)
    config.rename(EXPERTS)
    moe = MoeConfig(
        num_experts=config.integer("num_experts", 8),
        num_chosen=config.integer("num_experts_per_tok", 2),
        intermediate_size=shared.intermediate_size,
    )
    config.skip_training_of_experts()
    return dataclasses.replace(shared, moe=moe)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes: under the names of the first release, or of transformers 5."""
    names, here, there = llama.decoder_weight_map(), "model.layers.{}.block_sparse_moe", "layers.{}.mlp"
    experts = {
        **moe_targets(here, config.moe, router="router"),
        f"{here}.router.layer.weight": Target(f"{there}.router.weight"),
        f"{here}.input_linear.weight": Target(f"{there}.gate_up.weight", stacked=True),
        f"{here}.output_linear.weight": Target(f"{there}.down.weight", stacked=True),
    }
    return names._replace(targets=names.targets | experts)
