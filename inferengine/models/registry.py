"""Maps an architecture to its family module (a ModelFamily of models/decoder.py), imported on first use; one without a
family to transformers_fallback, where transformers knows it.

A new family is a new file and a line in models/table.py.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, cast

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import transformers_fallback
from inferengine.models.decoder import ModelFamily
from inferengine.models.hf_config import ConfigReader, read_eos, read_json, refused
from inferengine.models.table import FAMILIES, nearest

MODULES = {family.architecture: family.module for family in FAMILIES}
BY_MODEL_TYPE = {family.model_type: family.architecture for family in FAMILIES}


def family(values: dict[str, Any]) -> ModelFamily:
    """Return the module for the architecture that config.json names. Raises ConfigError where there is none."""
    listed = values.get("architectures") or []
    if not all(isinstance(name, str) for name in (listed if isinstance(listed, list) else [listed])):
        raise refused(f"config.json: architectures must be a list of names; got {str(listed)[:80]}")
    names = listed or [BY_MODEL_TYPE.get(str(values.get("model_type")), values.get("model_type"))]
    name = names[0] if isinstance(names, list) and names else names
    if is_headless(values):
        name = BY_MODEL_TYPE[str(values["model_type"])]
    if name not in MODULES:
        if transformers_fallback.knows(values):
            return cast(ModelFamily, transformers_fallback)
        reason = transformers_fallback.why_not(values)
        raise refused(f"config.json: the architecture {name} is not supported: {reason}; {nearest(str(name))}")
    return cast(ModelFamily, importlib.import_module(f"inferengine.models.{MODULES[name]}"))


def is_headless(values: dict[str, Any]) -> bool:
    """Return whether config.json names a family's model without its output head (`MistralModel`), as embedding models
    are stored."""
    names, causal = values.get("architectures"), BY_MODEL_TYPE.get(str(values.get("model_type")), "")
    name = names[0] if isinstance(names, list) and names else None
    stem = causal.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    return bool(stem) and stem != causal and name in (f"{stem}Model", f"{stem}TextModel")


def read_model_config(folder: Path) -> tuple[DecoderConfig, ModelFamily]:
    """Read a checkpoint's configuration and find its family. Raises ConfigError naming what is not supported."""
    values = read_json(folder / "config.json")
    module = family(values)
    config = config_of(values, module)
    return dataclasses.replace(config, eos_token_ids=read_eos(folder, values)), module


def _require_both_ways(config: DecoderConfig) -> None:
    """Refuse what the attention of models whose tokens see later ones does not compute. Raises ConfigError."""
    plain = config.full_kv is None and not config.kv_sources and not config.value_norm
    if config.implementation != "native" or config.latent is not None or not plain:
        raise refused(f"config.json: {config.model_type} whose tokens see later ones (is_causal = false) is not served")
    if config.attention_softcap or config.sinks:
        raise refused("config.json: is_causal = false is not served with caps of attention's scores, or with sinks")


def config_of(values: dict[str, Any], module: ModelFamily) -> DecoderConfig:
    """Turn a decoded config.json into a DecoderConfig. Raises ConfigError naming a key that is not supported."""
    reader = ConfigReader(values)
    is_causal = reader.flag("is_causal", True)  # embedding models made of decoders may look at later tokens
    config = module.read_config(reader)
    if not is_causal:
        config = dataclasses.replace(config, is_causal=False)
    if not config.is_causal:
        _require_both_ways(config)
    reader.value("quantization_config"), reader.value("compression_config")  # read by quantization/checkpoints
    reader.finish()
    if is_headless(values) and config.implementation == "native":  # a head that nothing asks for takes no memory so
        config = dataclasses.replace(config, tied_embeddings=True)
    if config.num_heads % config.num_kv_heads:
        raise refused(f"config.json: {config.num_heads} heads do not divide among {config.num_kv_heads} KV heads")
    moe = config.moe
    if moe is not None and moe.num_chosen > moe.num_experts:
        raise refused(f"config.json: num_experts_per_tok = {moe.num_chosen} is more than its {moe.num_experts} experts")
    return config
