"""The text model of a Gemma 3 with vision (4B and larger are published so). The vision tower is not loaded: messages
hold text, and parts of another type are refused when a request is read."""

from __future__ import annotations

from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.decoder import WeightMap
from inferengine.models.families import gemma3
from inferengine.models.hf_config import ConfigReader, refused

build = gemma3.build
OF_IMAGES = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read `text_config`, with the number format and the tying of the whole model."""
    text = config.value("text_config")
    if not isinstance(text, dict):
        raise refused(f"{config.where}: text_config must be an object")
    for name in OF_IMAGES:
        config.value(name)
    shared = {"dtype": config.dtype(), "tie_word_embeddings": config.flag("tie_word_embeddings", True)}
    inner = ConfigReader({"model_type": "gemma3_text", **text, **shared}, f"{config.where}: text_config")
    result = gemma3.read_config(inner)
    inner.finish()
    return result


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor goes: `language_model.model.…` as published, `model.language_model.…` as transformers names
    it in memory since 4.52."""
    names = gemma3.weight_map(config)
    renamed = {name.replace("model.", "model.language_model.", 1): target for name, target in names.targets.items()}
    return names._replace(
        targets=names.targets | renamed,
        prefixes=("language_model.",),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    )
