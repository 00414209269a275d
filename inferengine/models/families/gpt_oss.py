"""GPT-OSS (OpenAI 2025): experts in every layer with biases, a clamped gate and MXFP4 weights, sliding windows in every
second layer, and a score of each head that takes attention without being a key."""

from __future__ import annotations

import dataclasses
from typing import Any

from inferengine.kernels.experts import Gating
from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap, moe_targets
from inferengine.models.families.qwen2_moe import EXPERTS
from inferengine.models.hf_config import ConfigReader, read_windows

build = llama.build
ROPE: dict[str, Any] = {  # of a config without a rotation
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
}  # fmt: skip
LAST_KEYS = ("initial_context_length", "experts_per_token")  # others say the same


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' GptOssConfig."""
    config.rename(EXPERTS)
    config.default_rope(ROPE)
    num_layers, window = config.integer("num_hidden_layers"), config.integer("sliding_window", 128)
    windows = tuple(None if layer % 2 else window for layer in range(num_layers))
    if config.value("layer_types") is not None:
        windows = read_windows(config, num_layers, window)
    for key in LAST_KEYS:
        config.value(key)
    defaults = llama.Defaults(head_dim=64, theta=150_000.0, attention_bias=True)
    shared = llama.read_decoder(config, windows, defaults)
    moe = MoeConfig(
        num_experts=config.integer("num_experts", 128),
        num_chosen=config.integer("num_experts_per_tok", 4),
        intermediate_size=shared.intermediate_size,
        router_bias=True,
        bias=True,
        interleaved=config.flag("interleaved_experts", True),  # false of GGUF files (gguf/checkpoint.py)
        gating=Gating("swiglu_clamped", config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
    )
    config.skip_training_of_experts()
    return dataclasses.replace(shared, norm_eps=config.number("rms_norm_eps", 1e-5, zero=True), moe=moe, sinks=True)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes: experts in MXFP4 or as numbers, in a tensor for all with gate and up
    in turn, or one for each projection of each."""
    names = llama.decoder_weight_map()
    here, there = "model.layers.{}", "layers.{}"
    targets = {f"{here}.self_attn.sinks": Target(f"{there}.attention.sinks")}
    if config.moe is not None and not config.moe.interleaved:
        targets |= moe_targets(f"{here}.mlp", config.moe, router="router")
        return names._replace(targets=names.targets | targets)
    targets |= {f"{here}.mlp.router.{kind}": Target(f"{there}.mlp.router.{kind}") for kind in ("weight", "bias")}
    for stored, place in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
        experts = f"{here}.mlp.experts.{stored}"
        targets[experts] = Target(f"{there}.mlp.{place}.weight", transpose=True, stacked=True)
        targets[f"{experts}_bias"] = Target(f"{there}.mlp.{place}.bias", stacked=True)
        targets[f"{experts}_blocks"] = Target(f"{there}.mlp.{place}.blocks")
        targets[f"{experts}_scales"] = Target(f"{there}.mlp.{place}.scales")
    return names._replace(targets=names.targets | targets)
