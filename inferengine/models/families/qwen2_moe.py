"""Qwen 1.5 and 2, mixture of experts (Qwen team 2024): Qwen 2 with experts, and a block beside them that all tokens
take and a gate of its own weighs."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, moe_targets
from inferengine.models.families.qwen2 import read_switched_window
from inferengine.models.hf_config import ConfigReader, read_windows, refused

build = llama.build
EXPERTS = {"num_local_experts": "num_experts"}  # transformers writes either


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Qwen2MoeConfig."""
    shared = llama.read_decoder(config, _windows(config))
    moe = read_moe(config)
    size = config.integer("shared_expert_intermediate_size", 5632)
    moe = None if moe is None else dataclasses.replace(moe, shared_size=size, gated_shared=True)
    return dataclasses.replace(shared, qkv_bias=config.flag("qkv_bias", True), moe=moe)


def read_moe(config: ConfigReader) -> MoeConfig | None:
    """Read the experts of Qwen's configs: in every `decoder_sparse_step`-th layer but those in `mlp_only_layers`."""
    config.rename(EXPERTS)
    num_layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    plain = config.value("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
        raise refused(f"{config.where}: mlp_only_layers must be a list of numbers of layers; got {plain!r}")
    dense = tuple(layer for layer in range(num_layers) if layer in plain or (layer + 1) % step)
    moe = MoeConfig(
        num_experts=config.integer("num_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        renormalized=config.flag("norm_topk_prob", False),
        dense_layers=dense,
    )
    config.skip_training_of_experts()
    return None if len(dense) == num_layers else moe


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return each layer's window. Without `layer_types`: every second layer of the lower ones, as transformers reads
    it."""
    num_layers = config.integer("num_hidden_layers")
    window = read_switched_window(config)
    lower = config.integer("max_window_layers", 28, least=0)
    if config.value("layer_types") is not None:
        return read_windows(config, num_layers, window)
    return tuple(window if layer % 2 == 0 and layer < lower else None for layer in range(num_layers))


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map()
    return names._replace(targets=names.targets | moe_targets("model.layers.{}.mlp", config.moe))
