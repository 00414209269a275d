"""GPT-NeoX (Black et al. 2022), and Pythia: layer norms, a plain feed-forward with GELU beside the attention, q, k
and v stored head by head; a quarter of each head turns."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import ConfigReader, refused

build = llama.build
KEYS = {  # its names of what others have, and what it is where the config does not say it
    "rotary_pct": ("partial_rotary_factor", 0.25),
    "rotary_emb_base": ("rope_theta", 10_000),
}
LINEARS = {
    "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    for name, (other, default) in KEYS.items():
        own = config.values.get(name)
        if config.value(other) not in (None, default if own is None else own):
            raise refused(f"{config.where}: {other} is not read for this model type: say it as {name}")
    config.rename({name: other for name, (other, _) in KEYS.items()})
    windows = (None,) * config.integer("num_hidden_layers")
    shared = llama.read_decoder(
        config,
        windows,
        llama.Defaults(eps="layer_norm_eps", activations=llama.GELUS, partial=0.25, attention_bias=True),
    )
    return dataclasses.replace(
        shared,
        mlp_bias=True,
        norm="layer",
        parallel="separate" if config.flag("use_parallel_residual", True) else "",
        gated_mlp=False,
        qkv_interleaved=True,
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    places = {f"gpt_neox.layers.{{}}.{here}": f"layers.{{}}.{there}" for here, there in LINEARS.items()}
    places["gpt_neox.final_layer_norm"] = "norm"
    return WeightMap(
        {
            "gpt_neox.embed_in.weight": Target("embed.weight"),
            **{f"{here}.{kind}": Target(f"{there}.{kind}") for here, there in places.items() for kind in KINDS},
            "embed_out.weight": Target("head.weight"),
        },
        root="gpt_neox.",
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        head="embed_out.weight",
        embedding="gpt_neox.embed_in.weight",
    )


KINDS = ("weight", "bias")
