"""Gemma 4, text (Gemma team 2026): Gemma 3's arrangement, without its 1 + w, and with

- layers with full attention that have wider heads, KV heads of their own number, a rotation of a share of their
  frequencies, and in some sizes no values but their keys, before norm and rotation; values are normed;
- last layers that read the keys and values of the last layer before them with the same kind of attention (E2B, E4B);
- a second embedding of each token for every layer (E2B, E4B), and a factor behind every layer;
- experts beside the ordinary block of each layer (26B-A4B).

What the layers with full attention have is the config's `per_layer_config`, as transformers writes it, or
`global_head_dim` and `num_global_key_value_heads`, as published.
"""

from __future__ import annotations

from typing import Any

from inferengine.layers.decoder_config import DecoderConfig, KVShape, LayerInputConfig, MoeConfig
from inferengine.models import llama
from inferengine.models.decoder import Target, WeightMap, moe_targets
from inferengine.models.families import gemma2
from inferengine.models.hf_config import ConfigReader, read_rope, read_windows, refused

build = llama.build
UNIFIED = "gemma4_unified_text"  # of the 12B, which has neither experts nor inputs of layers
PATTERN = 6  # layers, of which the last has full attention, where the config does not list them
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
KV_KEYS = {"head_dim", "num_key_value_heads"}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json; defaults are those of transformers' Gemma4TextConfig and Gemma4UnifiedTextConfig."""
    unified = config.text("model_type") == UNIFIED
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", "vision")  # of images alone
    windows = _windows(config, 1024 if unified else 512)
    num_layers, hidden_size = len(windows), config.integer("hidden_size", 2304)
    shape = KVShape(config.integer("num_key_value_heads", 4), config.integer("head_dim", 256))
    keys_as_values = config.flag("attention_k_eq_v", False)
    full = _full_shape(config, windows, shape, keys_as_values=keys_as_values)
    num_heads = config.integer("num_attention_heads", 8)
    if num_heads % full.num_heads:
        raise refused(f"{config.where}: {num_heads} heads do not divide among {full.num_heads} KV heads")
    max_position = config.integer("max_position_embeddings", 262_144 if unified else 131_072)
    sources = _sources(config, windows)
    width, wide = config.integer("intermediate_size", 9216), config.flag("use_double_wide_mlp", False)
    if config.value("rope_parameters") is None:
        config.values = {**config.values, "rope_parameters": ROPES}
    bias = config.flag("attention_bias", False)
    vocab_size = config.integer("vocab_size", 262_144)
    return DecoderConfig(
        model_type=config.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        windows=windows,
        attention_scale=1.0,
        rope=read_rope(config, full.head_dim, max_position, layer_type="full_attention"),
        local_rope=(
            None
            if set(windows) == {None}
            else read_rope(config, shape.head_dim, max_position, layer_type="sliding_attention")
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        activation="gelu_tanh",
        logits_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=hidden_size**0.5,
        rounds_embedding_scale=True,
        post_norms=True,
        full_kv=None if full == shape else full,
        full_keys_as_values=keys_as_values,
        value_norm=True,
        kv_sources=sources,
        intermediate_sizes=tuple(
            2 * width if wide and source != layer else width for layer, source in enumerate(sources)
        ),
        layer_inputs=None if unified else _layer_inputs(config, vocab_size),
        layer_scales=True,
        moe=None if unified else _experts(config),
        dtype=config.dtype(),
    )


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes. Layers that read the keys of others may be stored with projections
    that nothing computes with."""
    names, here, there = llama.decoder_weight_map(norms=gemma2.NORMS), "model.layers.{}", "layers.{}"
    targets = {f"{here}.layer_scalar": Target(f"{there}.output_scale")}
    if config.layer_inputs is not None:
        targets |= {
            "model.embed_tokens_per_layer.weight": Target("inputs.embed.weight"),
            "model.per_layer_model_projection.weight": Target("inputs.projection.weight"),
            "model.per_layer_projection_norm.weight": Target("inputs.norm.weight"),
            f"{here}.per_layer_input_gate.weight": Target(f"{there}.gate.gate.weight"),
            f"{here}.per_layer_projection.weight": Target(f"{there}.gate.projection.weight"),
            f"{here}.post_per_layer_input_norm.weight": Target(f"{there}.gate.norm.weight"),
        }
    if config.moe is not None:
        experts = moe_targets(here, config.moe, router="router.proj", there=f"{there}.beside.mixture")
        targets |= experts | {
            f"{here}.router.scale": Target(f"{there}.beside.router_norm.weight"),
            f"{here}.router.per_expert_scale": Target(f"{there}.beside.mixture.gains.weight"),
            f"{here}.pre_feedforward_layernorm_2.weight": Target(f"{there}.beside.norm.weight"),
            f"{here}.post_feedforward_layernorm_1.weight": Target(f"{there}.beside.dense_out_norm.weight"),
            f"{here}.post_feedforward_layernorm_2.weight": Target(f"{there}.beside.out_norm.weight"),
        }
    reading = "|".join(str(layer) for layer in range(config.num_layers) if config.kv_source(layer) != layer)
    unused = (rf"model\.(language_model\.)?layers\.({reading})\.self_attn\.[kv]_(proj|norm)(\..*)?",) if reading else ()
    return names._replace(targets=names.targets | targets, ignored=(*names.ignored, *unused))


def _windows(config: ConfigReader, default: int) -> tuple[int | None, ...]:
    num_layers, window = config.integer("num_hidden_layers", 30), config.integer("sliding_window", default)
    if config.value("layer_types") is None:
        windows = tuple(None if (layer + 1) % PATTERN == 0 else window for layer in range(num_layers))
    else:
        windows = read_windows(config, num_layers, window)
    return (*windows[:-1], None)  # as transformers has it, whatever the config says


def _full_shape(
    config: ConfigReader, windows: tuple[int | None, ...], shape: KVShape, *, keys_as_values: bool
) -> KVShape:
    """Return the shape of keys and values of the layers with full attention. Raises ConfigError where layers of one
    kind differ: a KV group has one shape."""
    published = {"head_dim": config.integer("global_head_dim", 512)}
    if config.value("num_global_key_value_heads") is not None and keys_as_values:
        published["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    by_layer = config.value("per_layer_config")
    if by_layer == {}:  # transformers writes it where no layer differs
        return shape
    if by_layer is not None:
        full = {layer for layer, window in enumerate(windows) if window is None}
        values = by_layer if isinstance(by_layer, dict) else {}
        first = next(iter(values.values()), None)
        alike = isinstance(first, dict) and set(first) <= KV_KEYS and all(each == first for each in values.values())
        if not alike or {int(layer) if str(layer).isdecimal() else -1 for layer in values} != full:
            raise refused(
                f"{config.where}: per_layer_config is only read where it gives head_dim and num_key_value_heads of all "
                "layers with full attention alike"
            )
        return _shape(config, first, shape)
    return _shape(config, published, shape)


def _shape(config: ConfigReader, values: Any, usual: KVShape) -> KVShape:
    reader = ConfigReader(values, f"{config.where}: layers with full attention")
    return KVShape(reader.integer("num_key_value_heads", usual.num_heads), reader.integer("head_dim", usual.head_dim))


def _sources(config: ConfigReader, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return, by layer, whose keys and values it reads: of the last layers that of the last one before them of their
    kind."""
    num_layers, num_reading = len(windows), config.integer("num_kv_shared_layers", 0, least=0)
    first = num_layers - num_reading
    last = {window: layer for layer, window in enumerate(windows[: max(0, first)])}
    if any(window not in last for window in windows):
        raise refused(f"{config.where}: num_kv_shared_layers = {num_reading} leaves no layer of some kind of attention")
    return tuple(layer if layer < first else last[window] for layer, window in enumerate(windows))


def _layer_inputs(config: ConfigReader, vocab_size: int) -> LayerInputConfig | None:
    size = config.integer("hidden_size_per_layer_input", 256, least=0)
    inputs = LayerInputConfig(config.integer("vocab_size_per_layer_input", 262_144), size)
    if size and inputs.vocab_size < vocab_size:
        raise refused(f"{config.where}: vocab_size_per_layer_input = {inputs.vocab_size} is less than vocab_size")
    return inputs if size else None


def _experts(config: ConfigReader) -> MoeConfig | None:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.flag("enable_moe_block", False):
        for name in names:
            config.value(name)
        return None
    number, chosen, width = (config.integer(name) for name in names)
    if chosen > number:
        raise refused(f"{config.where}: top_k_experts = {chosen} is more than num_experts = {number}")
    return MoeConfig(number, chosen, width, beside_dense=True, scaled=True)
