"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with q, k, v in one tensor, gate and up in another, longrope,
and in Phi-4-mini heads that turn in part."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import ConfigReader, read_one_window

build = llama.build
ORIGINAL_MAX_POSITION = 4096  # where the config does not say it


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    config.expect("full_attn_mod", 1)  # Phi-4-mini's, of code that is not transformers'
    config.expect("interpolate_factor", 1)
    if config.value("original_max_position_embeddings") is None:  # transformers reads no other place, even of longrope
        config.values = {**config.values, "original_max_position_embeddings": ORIGINAL_MAX_POSITION}
    windows = read_one_window(config)
    shared = llama.read_decoder(config, windows, llama.Defaults(partial=1.0))
    eps = config.number("rms_norm_eps", 1e-5, zero=True)
    return dataclasses.replace(shared, norm_eps=eps, qkv_bias=False, out_bias=False)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    return with_fused(llama.decoder_weight_map(), {"self_attn.qkv_proj": "attention.qkv", **GATE_UP})


GATE_UP = {"mlp.gate_up_proj": "mlp.gate_up"}


def with_fused(names: WeightMap, places: dict[str, str]) -> WeightMap:
    """Replace the parts of these layers by tensors that hold all of a layer's parts, by their names in a checkpoint."""
    fused = {
        f"model.layers.{{}}.{here}.{kind}": Target(f"layers.{{}}.{there}.{kind}")
        for here, there in places.items()
        for kind in ("weight", "bias")
    }
    taken = {target.parameter for target in fused.values()}
    kept = {name: target for name, target in names.targets.items() if target.parameter not in taken}
    return names._replace(targets=kept | fused)
