"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): latent attention, whose cache holds one short vector of each token, and
experts beside a block that all tokens take. V3 (families/deepseek_v3.py) shares all but the routing."""

from __future__ import annotations

import dataclasses
import math

from inferengine.layers.decoder_config import DecoderConfig, LatentConfig, MoeConfig
from inferengine.layers.rotary import RopeConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap, moe_targets
from inferengine.models.hf_config import ConfigReader, refused

build = llama.build
EXPERTS = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}  # transformers writes either


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' DeepseekV2Config."""
    shared = read_decoder(config, interleaved=True)
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refused(
            f"{config.where}: topk_method = {method!r} is not supported; only greedy and group_limited_greedy are"
        )
    moe = read_moe(config, first_expert_layer=0, num_shared=2, size=1407)
    groups = read_groups(config, moe)
    moe = dataclasses.replace(
        moe, renormalized=False, factor=config.number("routed_scaling_factor", 1.0),
        groups=groups if method == "group_limited_greedy" else None,
    )  # fmt: skip
    return dataclasses.replace(shared, moe=moe)


def read_decoder(config: ConfigReader, *, interleaved: bool) -> DecoderConfig:
    """Read all but the experts. `interleaved`: neighbours in a key turn together."""
    num_heads = config.integer("num_attention_heads")
    latent = LatentConfig(
        rank=config.integer("kv_lora_rank", 512),
        rotary_dim=config.integer("qk_rope_head_dim", 64),
        plain_dim=config.integer("qk_nope_head_dim", 128),
        value_dim=config.integer("v_head_dim", 128),
        query_rank=_query_rank(config),
    )
    config.expect("num_key_value_heads", num_heads)
    config.expect("mlp_bias", False)
    config.expect("qk_head_dim", latent.query_dim)
    defaults = llama.Defaults(head_dim=latent.rotary_dim, interleaved=interleaved)
    shared = llama.read_decoder(
        config.without("head_dim", "num_key_value_heads"), (None,) * config.integer("num_hidden_layers"), defaults
    )
    config.value("head_dim")  # transformers writes qk_rope_head_dim here
    config.value("pretraining_tp"), config.value("ep_size")  # how it was trained
    if shared.qkv_bias and latent.query_rank is None:
        raise refused(f"{config.where}: attention_bias without q_lora_rank is not supported by this engine")
    assert shared.rope is not None
    return dataclasses.replace(
        shared,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        attention_scale=latent.query_dim**-0.5 * _magnitude(shared.rope),
        latent=latent,
    )


def read_moe(config: ConfigReader, *, first_expert_layer: int, num_shared: int, size: int) -> MoeConfig:
    """Read the experts' sizes, and the layers that have them: those from `first_k_dense_replace` on whose number is a
    multiple of `moe_layer_freq`. The arguments are what a config without their keys means."""
    config.rename(EXPERTS)
    first = config.integer("first_k_dense_replace", first_expert_layer, least=0)
    every = config.integer("moe_layer_freq", 1)
    layers = range(config.integer("num_hidden_layers"))
    width = config.integer("moe_intermediate_size", size)
    config.skip_training_of_experts()
    for name in ("aux_loss_alpha", "seq_aux"):
        config.value(name)
    return MoeConfig(
        num_experts=config.integer("n_routed_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_size=width * config.integer("n_shared_experts", num_shared, least=0),
        dense_layers=tuple(layer for layer in layers if layer < first or layer % every),
    )


def read_groups(config: ConfigReader, moe: MoeConfig, default: tuple[int, int] = (1, 1)) -> tuple[int, int] | None:
    """Read (the number of groups of experts, how many of them a token chooses from); None: from all."""
    number, kept = config.integer("n_group", default[0]), config.integer("topk_group", default[1])
    if moe.num_experts % number or kept > number or kept * (moe.num_experts // number) < moe.num_chosen:
        raise refused(
            f"{config.where}: {moe.num_chosen} of {moe.num_experts} experts are not in {kept} of {number} equal groups"
        )
    return None if kept == number else (number, kept)


def _query_rank(config: ConfigReader) -> int | None:
    """Return the rank of queries. null: they are made of the hidden state at once."""
    if "q_lora_rank" in config.values and config.value("q_lora_rank") is None:
        return None
    return config.integer("q_lora_rank", 1536)


def _magnitude(rope: RopeConfig) -> float:
    """Return what YaRN multiplies the scores by, where it does not change the rotation's magnitude."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map()
    here, there = "model.layers.{}.self_attn", "layers.{}.attention"
    targets = {name: target for name, target in names.targets.items() if not name.startswith(here)}
    places = {"kv_a_proj_with_mqa": ("qkv", 1), "kv_b_proj": ("up", None), "o_proj": ("out", None)}
    assert config.latent is not None
    if config.latent.query_rank is None:
        places["q_proj"] = ("qkv", 0)
    else:
        places |= {"q_a_proj": ("qkv", 0), "q_b_proj": ("query_up", None)}
        targets[f"{here}.q_a_layernorm.weight"] = Target(f"{there}.query_norm.weight")
    targets[f"{here}.kv_a_layernorm.weight"] = Target(f"{there}.latent_norm.weight")
    for name, (place, part) in places.items():
        for kind in ("weight", "bias"):
            targets[f"{here}.{name}.{kind}"] = Target(f"{there}.{place}.{kind}", part)
    targets |= moe_targets("model.layers.{}.mlp", config.moe, shared="shared_experts")
    unused = [
        rf"model\.layers\.{layer}\..*" for layer in range(config.num_layers, config.num_layers + config.unused_layers)
    ]
    return names._replace(targets=targets, ignored=(*names.ignored, *unused))
