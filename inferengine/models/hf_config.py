"""Reads a checkpoint's config.json strictly: every key is understood, known to be without effect, noted or refused.

An unsupported value is an error that names it. A key that no reader knows is refused where its name speaks of what a
model computes (MATHEMATICAL): with it ignored, the model would compute something else than its authors meant. Any other
is a note of some program (`training_run`): a warning names it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

from inferengine.errors import ConfigError
from inferengine.gguf.checkpoint import config_values
from inferengine.gguf.reader import SUFFIX
from inferengine.layers.rotary import RopeConfig

logger = logging.getLogger(__name__)

KEY = "model.path"  # the configuration key that a user must change when a checkpoint cannot be used
_REQUIRED: Any = object()

# Keys without effect on a decoder's result: metadata, training, generation defaults (which older checkpoints and full
# dumps keep here), heads of other tasks, notes of other programs.
# fmt: off
HARMLESS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_name_or_path", "_num_labels",
    "activation_dropout", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout", "dtype", "early_stopping", "embd_pdrop",
    "embedding_dropout", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout",
    "id2label", "init_std", "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "layerdrop", "length_penalty", "max_length", "max_sequence_length",
    "max_window_layers", "min_length", "model_max_length", "model_type", "n_ctx", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_past", "output_scores", "pad_token_id", "predict_special_tokens", "prefix", "pretraining_tp",
    "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict",
    "return_dict_in_generate", "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache", "use_return_dict",
))
# Words of keys that say what a model computes. A word of a key counts where it begins with one of these.
MATHEMATICAL = (
    "act", "alibi", "alpha", "attend", "attention", "attn", "bias", "block", "causal", "chunk", "clip", "conv",
    "cross", "decay", "depth", "dim", "embed", "emb", "eps", "expan", "expert", "factor", "ffn", "ffw", "fused",
    "gate", "group", "head", "hidden", "inner", "inputs", "inter", "key", "kernel", "kv", "lambda", "latent",
    "layer", "limit", "local", "logit", "lora", "low", "mamba", "mask", "max", "mem", "min", "mixture", "mlp",
    "moe", "mtp", "multi", "norm", "num", "order", "parallel", "partial", "pattern", "position", "pre", "proj",
    "post", "qk", "qkv", "quant", "query", "rank", "residual", "rms", "rope", "rotary", "rout", "scal", "score",
    "share", "sink", "size", "skip", "slid", "soft", "sparse", "ssm", "state", "swiglu", "temper", "theta", "tie",
    "top", "untie", "use", "value", "vocab", "weight", "width", "window", "yarn",
)
# fmt: on
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST = 2**40  # of any count or size; torch counts elements up to 2^63
MOST_LAYERS = 512  # each is built, by transformers in milliseconds, before the first tensor shows whether it exists
DTYPES = ("float32", "float16", "bfloat16")


def refused(message: str) -> ConfigError:
    """Make the error for a checkpoint that cannot be used."""
    return ConfigError(KEY, message)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a checkpoint folder, or config.json of the GGUF file in place of the folder. Raises
    ConfigError naming the file."""
    if path.parent.suffix == SUFFIX:
        return config_values(path.parent)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refused(f"{path.name} is missing: this is no whole checkpoint folder") from None
    except OSError as error:
        raise refused(f"{path.name} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists nested for ever
        raise refused(f"{path.name} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(document, dict):
        raise refused(f"{path.name} is not a JSON object: fetch it again")
    return document


class ConfigReader:
    """Typed access to config.json that remembers what was read. `finish` refuses the rest. All methods raise
    ConfigError."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self._seen: set[str] = set()

    def rename(self, names: dict[str, str]) -> None:
        """Give keys that a family has under names of its own those that others have. One that is null counts as
        absent."""
        optional = {*names, *names.values()}
        kept = {name: value for name, value in self.values.items() if value is not None or name not in optional}
        self.values = {names.get(name, name): value for name, value in kept.items()}

    def default_rope(self, rope: dict[str, Any]) -> None:
        """Set the rotation of a config that says none, of a family where that is not the plain one."""
        if self.values.get("rope_parameters") is None and not self.values.get("rope_scaling"):
            self.values = {**self.values, "rope_parameters": rope}

    def without(self, *names: str) -> ConfigReader:
        """Return a reader of the other keys, which counts as this one's."""
        reader = ConfigReader({name: value for name, value in self.values.items() if name not in names}, self.where)
        reader._seen = self._seen
        return reader

    def integer(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """Read a count or a size; 3.0 is 3."""
        value = self.value(name)
        if not (isinstance(value, float) and value.is_integer()):
            value = self._typed(name, int, default, "a whole number")
        value = int(value)
        if value < least:
            raise refused(f"{self.where}: {name} must be at least {least}; got {value}")
        most = MOST_LAYERS if name in LAYER_COUNTS else MOST
        if value > most:
            raise refused(f"{self.where}: {name} must be at most {most}; got {_shown(value)}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, zero: bool = False) -> float:
        """Read a finite number above 0; with `zero`, 0 itself too."""
        value = float(self._typed(name, (int, float), default, "a number"))
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise refused(f"{self.where}: {name} must be a finite number above 0; got {_shown(self.values.get(name))}")
        return value

    def optional_number(self, name: str, *, zero: bool = False) -> float | None:
        """Read a number as `number` does; None where there is none."""
        return None if self.value(name) is None else self.number(name, zero=zero)

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        return bool(self._typed(name, bool, default, "true or false"))

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """Read a text."""
        return str(self._typed(name, str, default, "text"))

    def value(self, name: str) -> Any:
        """Read the raw value; None where there is none."""
        self._seen.add(name)
        return self.values.get(name)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; an absent key and null are fine."""
        value = self.value(name)
        if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
            choices = " or ".join(json.dumps(item) for item in (*allowed, None))
            raise refused(f"{self.where}: {name} = {_shown(value)} is not supported; only {choices} is")

    def finish(self) -> None:
        """Refuse keys that were not read and may change what the model computes, and warn of others.

        Keys that are null, false or empty, or known to have no effect, are fine."""
        for name, value in self.values.items():
            if name in self._seen or name in HARMLESS or value in (None, False, {}, []):
                continue
            if _is_mathematical(name):
                raise refused(f"{self.where}: {name} = {_shown(value)} is not supported by this engine")
            logger.warning("%s: the key %s is not known here and left out", self.where, name[:80])

    def skip_training_of_experts(self) -> None:
        """Pass over keys of mixtures of experts that matter in training alone."""
        for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
            self.value(name)

    def dtype(self) -> str:
        """Read the checkpoint's number format under either of its names; float32 where there is none."""
        values = (self.values.get("dtype"), self.values.get("torch_dtype"), "float32")
        name = str(next(value for value in values if value is not None)).removeprefix("torch.")
        if name not in DTYPES:
            raise refused(f"{self.where}: dtype = {name!r} is not supported; only {', '.join(DTYPES)} are")
        return name

    def _typed(self, name: str, kind: Any, default: Any, wanted: str) -> Any:
        value = self.value(name)
        if value is None:
            if default is _REQUIRED:
                raise refused(f"{self.where}: {name} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise refused(f"{self.where}: {name} must be {wanted}; got {_shown(value)}")
        return value


def _is_mathematical(name: str) -> bool:
    return any(word.startswith(MATHEMATICAL) for word in re.split(r"[^a-z]+", name.lower()) if word)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 10_000.0,
    partial: float | None = None,
    interleaved: bool = False,
    own_keys: tuple[str, ...] = (),
) -> RopeConfig:
    """Read the rotation, from `rope_parameters` (transformers 5; by layer type for some models) or from `rope_theta`
    with `rope_scaling` (before). `partial` is the default share of a head that turns, which a config of the family may
    set; None: all of it, always. `interleaved`: neighbours turn together. `own_keys` are read by the family."""
    rope = _rope_reader(config, layer_type, default_theta)
    if layer_type is not None:
        rope.expect("truncate", True)  # transformers looks for it in another place
    kind = str(rope.value("rope_type") or rope.value("type") or "default")
    rope.value("type")
    for key in own_keys:
        rope.value(key)
    if kind == "proportional":  # its share is of the frequencies, not of the head
        turning = int(rope.number("partial_rotary_factor", 1.0, zero=True) * head_dim // 2)
        if turning > head_dim // 2:
            raise refused(f"{rope.where}: partial_rotary_factor must be at most 1")
        rotary_dim = head_dim
    else:
        turning, rotary_dim = 0, _rotary_dim(config, rope, head_dim, partial)
    theta = rope.number("rope_theta", default_theta)
    if kind in ("longrope", "su"):
        beside = config if layer_type is None else config.without("original_max_position_embeddings")
        result = _longrope(beside, rope, theta, head_dim, max_position, rotary_dim)
    else:
        result = _rope_of_kind(rope, kind, theta, head_dim, max_position)
    rope.finish()
    if head_dim % 2:
        raise refused(f"{config.where}: head_dim = {head_dim} must be even for rotary embeddings")
    return dataclasses.replace(
        result,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        interleaved=interleaved,
        num_turning=turning,
    )


def _rope_reader(config: ConfigReader, layer_type: str | None, default_theta: float) -> ConfigReader:
    """Read the object that describes the rotation, of one layer type where it has several. `rope_theta` may stand
    beside it under either of its names."""
    scaling, parameters = _rope_object(config, "rope_scaling"), _rope_object(config, "rope_parameters")
    name, values = ("rope_parameters", parameters) if parameters else ("rope_scaling", scaling)
    if layer_type is not None:
        values = _of_layer_type(config, layer_type, scaling, parameters)
    values = dict(values)
    if parameters and layer_type != "sliding_attention" and not _renamed(scaling).items() <= _renamed(values).items():
        raise refused(f"{config.where}: rope_scaling and rope_parameters differ: keep one of them")
    values.setdefault("rope_theta", config.number("rope_theta", default_theta))
    return ConfigReader(values, f"{config.where}: {name}")


def _of_layer_type(
    config: ConfigReader, layer_type: str, scaling: dict[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    """Return the rotation of one layer type: of `rope_parameters` its own, of `rope_scaling` that of all. Refuses what
    transformers leaves out in silence."""
    if not parameters:
        if scaling.get("type") not in (None, "default", scaling.get("rope_type")):
            raise refused(f"{config.where}: rope_scaling: name the kind in rope_type: of such a model type is not read")
        return scaling
    if not parameters.keys() & {"full_attention", "sliding_attention"}:
        raise refused(
            f"{config.where}: rope_parameters must hold a rotation each for full_attention, sliding_attention"
        )
    values = parameters.get(layer_type)
    if values is not None and not isinstance(values, dict):
        raise refused(f"{config.where}: rope_parameters: {layer_type} must be an object; got {_shown(values)}")
    return values or {}


def _renamed(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rotation's keys with the newer name of its kind."""
    return {"rope_type" if key == "type" else key: value for key, value in rope.items()}


def _rope_object(config: ConfigReader, name: str) -> dict[str, Any]:
    values = config.value(name)
    if values is not None and not isinstance(values, dict):
        raise refused(f"{config.where}: {name} must be an object; got {_shown(values)}")
    return values or {}


def _rope_of_kind(rope: ConfigReader, kind: str, theta: float, head_dim: int, max_position: int) -> RopeConfig:
    """Read the fields of one kind of rotation. Raises for a kind that is not supported."""
    if kind == "default":
        rope.value("factor"), rope.value("original_max_position_embeddings")
        return RopeConfig(theta, head_dim)
    if kind == "linear":
        return RopeConfig(theta, head_dim, kind, factor=rope.number("factor"))
    if kind == "proportional":
        return RopeConfig(theta, head_dim, kind, factor=rope.number("factor", 1.0))
    if kind == "dynamic":
        rope.value("original_max_position_embeddings")
        return RopeConfig(theta, head_dim, kind, factor=rope.number("factor"), original_max_position=max_position)
    if kind == "llama3":
        result = RopeConfig(
            theta,
            head_dim,
            kind,
            factor=rope.number("factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
        if result.high_freq_factor <= result.low_freq_factor:
            raise refused(f"{rope.where}: high_freq_factor must be above low_freq_factor")
        return result
    if kind == "yarn":
        factor = rope.number("factor")
        if theta <= 1:
            raise refused(f"{rope.where}: rope_theta must be above 1 for yarn; got {theta:g}")
        if factor * max_position > MOST:
            raise refused(f"{rope.where}: factor = {factor:g} extends the context beyond {MOST} tokens")
        return RopeConfig(
            theta,
            head_dim,
            kind,
            factor=factor,
            original_max_position=rope.integer("original_max_position_embeddings", max_position),
            attention_factor=rope.optional_number("attention_factor"),
            beta_fast=rope.optional_number("beta_fast") or 32.0,
            beta_slow=rope.optional_number("beta_slow") or 1.0,
            mscale=rope.optional_number("mscale", zero=True),
            mscale_all_dim=rope.optional_number("mscale_all_dim", zero=True),
            truncate=rope.flag("truncate", True),
        )
    raise refused(
        f"{rope.where}: rope_type = {kind!r} is not supported; default, linear, dynamic, llama3, yarn, longrope and "
        "proportional are"
    )


def _rotary_dim(config: ConfigReader, rope: ConfigReader, head_dim: int, partial: float | None) -> int:
    """Return the number of a head's elements that rotate."""
    if partial is None:
        rope.expect("partial_rotary_factor", 1.0)
        return head_dim
    beside = config.number("partial_rotary_factor", partial)
    place = rope if "partial_rotary_factor" in rope.values else config
    if place.values.get("partial_rotary_factor", partial) is None:  # to transformers 1 or an error, by the family
        raise refused(f"{place.where}: partial_rotary_factor is null: leave it out, or say which share of a head turns")
    share = rope.number("partial_rotary_factor", beside)
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise refused(
            f"{config.where}: {rotary_dim} of {head_dim} elements of a head would turn; it must be an even number"
        )
    return rotary_dim


def _longrope(
    config: ConfigReader, rope: ConfigReader, theta: float, head_dim: int, max_position: int, rotary_dim: int
) -> RopeConfig:
    original = rope.integer("original_max_position_embeddings", max_position)
    if config.value("original_max_position_embeddings") is not None:  # Phi's place for it
        original = config.integer("original_max_position_embeddings")
    if original < 2:
        raise refused(f"{rope.where}: original_max_position_embeddings must be at least 2 for longrope")
    factors: list[tuple[float, ...]] = []
    for name in ("short_factor", "long_factor"):
        values = rope.value(name)
        numbers = isinstance(values, list) and all(isinstance(value, (int, float)) and value > 0 for value in values)
        if not numbers or len(values) != rotary_dim // 2:
            raise refused(f"{rope.where}: {name} must be a list of {rotary_dim // 2} numbers above 0")
        factors.append(tuple(float(value) for value in values))
    factor = rope.optional_number("factor")
    if factor is None:
        factor = config.integer("max_position_embeddings") / original
    return RopeConfig(
        theta,
        head_dim,
        "longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.optional_number("attention_factor"),
        short_factor=factors[0],
        long_factor=factors[1],
    )


def read_windows(config: ConfigReader, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Read each layer's window from `layer_types`; without that list every layer has `window`."""
    layer_types = config.value("layer_types")
    if layer_types is None:
        return (window,) * num_layers
    if not isinstance(layer_types, list) or not all(isinstance(name, str) for name in layer_types):
        raise refused(f"{config.where}: layer_types must be a list of names; got {_shown(layer_types)}")
    known = {"full_attention": None, "sliding_attention": window}
    for name in layer_types:
        if name not in known:
            raise refused(f"{config.where}: layer_types has {name!r}; only full_attention and sliding_attention are")
        if name == "sliding_attention" and window is None:
            raise refused(f"{config.where}: layer_types has sliding_attention, but sliding_window is not set")
    if len(layer_types) != num_layers:
        raise refused(f"{config.where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(known[name] for name in layer_types)


def read_one_window(config: ConfigReader) -> tuple[int | None, ...]:
    """Read each layer's window of a family to all of whose layers transformers gives `sliding_window`, whatever
    `layer_types` says: a list that says something else is refused."""
    window = config.integer("sliding_window") if config.value("sliding_window") is not None else None
    windows = read_windows(config, config.integer("num_hidden_layers"), window)
    if set(windows) != {window}:
        raise refused(f"{config.where}: layer_types is not read for this model type: every layer has sliding_window")
    return windows


def read_eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Read the token ids that end a generation: generation_config.json's, else config.json's; one or several."""
    path = folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise refused("generation_config.json: eos_token_id must be a token id or a list of them")
    return tuple(ids)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
