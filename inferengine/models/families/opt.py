"""OPT (Zhang et al. 2022): learned positions that begin at row 2, layer norms, a plain feed-forward with ReLU."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import ConfigReader

build = llama.build
KEYS = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}  # its names of what others have
ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}
LINEARS = {"fc1": "mlp.up", "fc2": "mlp.down", "self_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm"}
ATTENTION = {"q_proj": ("qkv", 0), "k_proj": ("qkv", 1), "v_proj": ("qkv", 2), "out_proj": ("out", None)}
KINDS = ("weight", "bias")


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json. OPT-350M, alone with norms after its blocks and narrower embeddings, is refused."""
    config.rename(KEYS)
    config.expect("do_layer_norm_before", True)
    config.expect("_remove_final_layer_norm", False)
    config.expect("output_projection", True)
    config.expect("layer_norm_elementwise_affine", True)
    config.expect("word_embed_proj_dim", config.integer("hidden_size"))
    bias = config.flag("enable_bias", True)
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(
        config, windows, llama.Defaults(eps="layer_norm_eps", activations=ACTIVATIONS, tied=True)
    )
    return dataclasses.replace(
        shared,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm="layer",
        gated_mlp=False,
        learned_positions=2,
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    layer = "model.decoder.layers.{}"
    places: dict[str, tuple[str, int | None]] = {
        **{f"{layer}.{here}": (f"layers.{{}}.{there}", None) for here, there in LINEARS.items()},
        **{
            f"{layer}.self_attn.{here}": (f"layers.{{}}.attention.{there}", part)
            for here, (there, part) in ATTENTION.items()
        },
        "model.decoder.final_layer_norm": ("norm", None),
    }
    return WeightMap(
        {
            "model.decoder.embed_tokens.weight": Target("embed.weight"),
            "model.decoder.embed_positions.weight": Target("positions.weight"),
            **{
                f"{here}.{kind}": Target(f"{there}.{kind}", part)
                for here, (there, part) in places.items()
                for kind in KINDS
            },
            "lm_head.weight": Target("head.weight"),
        },
        embedding="model.decoder.embed_tokens.weight",
    )
