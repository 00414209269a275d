"""GPT-2 (Radford et al. 2019): learned positions, layer norms with biases, a plain feed-forward with tanh GELU.
Checkpoints store linear weights as [in, out]."""

from __future__ import annotations

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap
from inferengine.models.hf_config import ConfigReader, refused

build = llama.build


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json."""
    hidden_size, num_heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    num_layers = config.integer("n_layer", 12)
    if hidden_size % num_heads:
        raise refused(f"{config.where}: n_embd = {hidden_size} does not divide among n_head = {num_heads}")
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("reorder_and_upcast_attn", False)
    config.expect("add_cross_attention", False)
    return DecoderConfig(
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size", 50_257),
        hidden_size=hidden_size,
        intermediate_size=config.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=config.integer("n_positions", 1024),
        norm_eps=config.number("layer_norm_epsilon", 1e-5, zero=True),
        windows=(None,) * num_layers,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        activation="gelu_tanh",
        norm="layer",
        gated_mlp=False,
        learned_positions=0,
        dtype=config.dtype(),
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes."""
    linears = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    }
    norms = {"h.{}.ln_1": "layers.{}.attention_norm", "h.{}.ln_2": "layers.{}.mlp_norm", "ln_f": "norm"}
    return WeightMap(
        {
            "wte.weight": Target("embed.weight"),
            "wpe.weight": Target("positions.weight"),
            **{
                f"h.{{}}.{here}.weight": Target(f"layers.{{}}.{there}.weight", transpose=True)
                for here, there in linears.items()
            },
            **{f"h.{{}}.{here}.bias": Target(f"layers.{{}}.{there}.bias") for here, there in linears.items()},
            **{
                f"{here}.{kind}": Target(f"{there}.{kind}")
                for here, there in norms.items()
                for kind in ("weight", "bias")
            },
            "lm_head.weight": Target("head.weight"),
        },
        prefixes=("transformer.",),
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
        embedding="wte.weight",
    )
