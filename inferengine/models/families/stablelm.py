"""StableLM 2 and StableLM 3B (Stability AI 2024): Llama with layer norms; a quarter of each head turns, and the
config may ask for blocks side by side and for a norm of each head."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import ConfigReader

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    windows = (None,) * config.integer("num_hidden_layers")
    return dataclasses.replace(
        llama.read_decoder(config, windows, llama.Defaults(eps="layer_norm_eps", partial=0.25)),
        qkv_bias=config.flag("use_qkv_bias", False),
        out_bias=False,
        norm="layer",
        parallel="shared" if config.flag("use_parallel_residual", False) else "",
        wide_qk_norm="each_head_by_itself" if config.flag("qk_layernorm", False) else "",
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map()
    heads = {
        f"model.layers.{{}}.self_attn.{name}_layernorm.norms.{head}.weight": Target(
            f"layers.{{}}.attention.{name}_wide.weight", head if count > 1 else None
        )
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads))
        for head in range(count)
    }
    return names._replace(targets=names.targets | heads)
