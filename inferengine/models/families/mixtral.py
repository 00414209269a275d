"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, moe_targets
from inferengine.models.families.qwen2_moe import EXPERTS
from inferengine.models.hf_config import ConfigReader, read_one_window

build = llama.build
PARTS = ("w1", "w3", "w2")  # gate, up and down


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    windows = read_one_window(config)
    shared = llama.read_decoder(config, windows, llama.Defaults(theta=1e6))
    config.rename(EXPERTS)
    moe = MoeConfig(
        num_experts=config.integer("num_experts", 8),
        num_chosen=config.integer("num_experts_per_tok", 2),
        intermediate_size=shared.intermediate_size,
    )
    config.skip_training_of_experts()
    eps = config.number("rms_norm_eps", 1e-5, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, moe=moe)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes: under the names of the first release, or of transformers 5."""
    names = llama.decoder_weight_map()
    here = "model.layers.{}"
    experts = {
        **moe_targets(f"{here}.mlp", config.moe, parts=PARTS),
        **moe_targets(f"{here}.block_sparse_moe", config.moe, parts=PARTS),
    }
    return names._replace(targets=names.targets | experts)
