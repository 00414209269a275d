"""StarCoder 2 (Lozhkov et al. 2024): layer norms and a plain feed-forward with tanh GELU, biases everywhere, and a
sliding window where the config sets one."""

from __future__ import annotations

import dataclasses

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import WeightMap, mlp_targets
from inferengine.models.hf_config import ConfigReader, read_one_window

build = llama.build
GELUS = {**llama.GELU_TANH, **llama.GELUS}  # tanh GELU where the config does not say
IN_WORDS = {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}  # the code does it always
UNREAD = (  # published beside the keys that are read, and left out by transformers
    "activation_function",
    "attention_softmax_in_fp32",
    "layer_norm_epsilon",
    "rms_norm_eps",
    "scale_attention_softmax_in_fp32",
)


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    for name, only in IN_WORDS.items():
        config.expect(name, only)
    for name in UNREAD:
        config.value(name)
    windows = read_one_window(config)
    shared = llama.read_decoder(config, windows, llama.Defaults(eps="norm_epsilon", activations=GELUS, tied=True))
    bias = config.flag("use_bias", True)
    return dataclasses.replace(shared, qkv_bias=bias, out_bias=bias, mlp_bias=bias, gated_mlp=False, norm="layer")


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    names = llama.decoder_weight_map()
    return names._replace(targets=names.targets | mlp_targets("model.layers.{}.mlp", up="c_fc", down="c_proj"))
