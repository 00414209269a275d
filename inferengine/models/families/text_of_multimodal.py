"""The text model of a checkpoint that also sees or hears, where it is a family of this engine, or one that modules of
transformers compute (Gemma 4). The other parts are not loaded: messages hold text, and parts of another type are
refused when a request is read.

transformers reads the configuration, whose text part may be a `text_config` that leaves defaults out, or stand among
the other keys. Multi-dimensional rotary positions (Qwen-VL) are, of text, three times the same number: the plain
rotation.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import transformers_fallback
from inferengine.models.decoder import DecoderModel, ModelFamily, WeightMap
from inferengine.models.hf_config import ConfigReader, refused
from inferengine.models.table import FAMILIES

SAME_TEXT = {  # but for its rotation
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe",
}  # fmt: skip
ALWAYS = {  # what a text model does and its config does not say
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True},
}
MROPE = ("mrope_section", "mrope_interleaved")
UNREAD = ("audio_config", "auto_map", "quantization_config", "vision_config")
PLACES = ("model.language_model.", "model.text_model.")  # of the text model's `model.`, in memory and as published
OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|connector|image_newline|"
    r"embed_vision|embed_audio|vision_embedder|audio_embedder)(\..*)?"
)


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read the text model's configuration, with the number format and the tying of the whole model."""
    text = _text_values(config)
    name = f"{config.where}: text_config"
    inner = ConfigReader(text, name)
    result = _family(str(text["model_type"]), name).read_config(inner)
    inner.finish()
    _refuse_what_is_left_out(str(config.values.get("model_type")), result, name)
    for key in config.values:
        config.value(key)
    return result


def _refuse_what_is_left_out(model_type: str, text: DecoderConfig, where: str) -> None:
    """Refuse what the text model alone computes, and transformers leaves out in a model that also sees. No published
    model has it. Raises ConfigError."""
    if model_type in ("qwen3_vl", "qwen3_vl_moe") and any(text.windows):
        raise refused(f"{where}: use_sliding_window is not read for {model_type}: set it to false")
    if model_type == "gemma3" and text.logits_softcap is not None:
        raise refused(f"{where}: final_logit_softcapping is not read for {model_type}: set it to null")
    if text.model_type == "mistral" and len(set(text.windows)) > 1:
        raise refused(f"{where}: layer_types is not read for {model_type}: every layer has sliding_window")


def _text_values(config: ConfigReader) -> dict[str, Any]:
    """Return the keys of the text model that transformers reads, as a config of the family that its layers belong
    to."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values, given = config.values, config.value("text_config")
    if given is not None and not isinstance(given, dict):
        raise refused(f"{config.where}: text_config must be an object")
    given = given or values
    try:
        read = {name: value for name, value in values.items() if name not in UNREAD}
        whole = CONFIG_MAPPING[values["model_type"]].from_dict(read)
        text: dict[str, Any] = whole.get_text_config().to_dict()
    except Exception as error:  # its checks raise errors of many kinds
        raise refused(f"{config.where}: transformers cannot read it ({str(error).strip()[:200]})") from None
    tied = values.get("tie_word_embeddings", given.get("tie_word_embeddings"))
    if tied is None:
        tied = getattr(whole, "tie_word_embeddings", text.get("tie_word_embeddings"))
    dtype = values.get("dtype") or values.get("torch_dtype") or given.get("dtype") or given.get("torch_dtype")
    text |= {"tie_word_embeddings": tied, "dtype": ConfigReader({"dtype": dtype}).dtype()}
    kind = str(text.get("model_type"))
    text |= {"model_type": SAME_TEXT.get(kind, kind), "architectures": None, **ALWAYS.get(kind, {})}
    if kind == "glm4v_text":
        text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        text["rope_parameters"] = {key: value for key, value in rope.items() if key not in MROPE}
    return text


def _family(model_type: str, where: str) -> ModelFamily:
    module = next(
        (each.module for each in FAMILIES if each.model_type == model_type and each.module not in __name__), ""
    )
    if not module and transformers_fallback.knows({"model_type": model_type}):
        return cast(ModelFamily, transformers_fallback)
    if not module:
        known = ", ".join(sorted({each.model_type for each in FAMILIES}))
        raise refused(f"{where}: model_type = {model_type!r} is no family of this engine; {known} are")
    return cast(ModelFamily, importlib.import_module(f"inferengine.models.{module}"))


def build(ops: Ops, config: DecoderConfig) -> DecoderModel:
    """Build the text model on torch's default device, without weights."""
    return _family(config.model_type, "config.json").build(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor goes: the text model's own names, or those under PLACES or `language_model.`."""
    names = _family(config.model_type, "config.json").weight_map(config)
    renamed = {
        name.replace("model.", place, 1): target
        for place in PLACES
        for name, target in names.targets.items()
        if name.startswith("model.")
    }
    return names._replace(
        targets=names.targets | renamed, prefixes=("language_model.",), ignored=(*names.ignored, OTHER_PARTS)
    )
