"""Checkpoints that also see or hear: their text model against transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferengine.errors import ConfigError
from inferengine.models import registry
from tests.models.checkpoints import GEMMA3, SHAPES, save
from tests.models.families import DELTA, GEMMA4, QWEN_EXPERTS, Case, compare

EVEN = {name: value for name, value in SHAPES.items() if name != "head_dim"} | {"hidden_size": 60}
SEEN = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_SEES = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 14,
             "out_hidden_size": 60, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
             "num_position_embeddings": 16}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 1]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("Gemma3Config", {"text_config": {**GEMMA3, "model_type": "gemma3_text"}, "vision_config": SEEN,
                                "mm_tokens_per_image": 4}),
    "Mistral3": ("Mistral3Config", {"text_config": {**SHAPES, "model_type": "mistral", "sliding_window": None},
                                    "vision_config": {**SEEN, "model_type": "pixtral", "head_dim": 8}}),
    "Ministral 3": ("Mistral3Config", {"text_config": {**SHAPES, "model_type": "ministral3"},
                                       "vision_config": {**SEEN, "model_type": "pixtral", "head_dim": 8}}),
    "Llava": ("LlavaConfig", {"text_config": {**SHAPES, "model_type": "llama"},
                              "vision_config": {**SEEN, "model_type": "clip_vision_model"}}),
    "Qwen2.5-VL": ("Qwen2_5_VLConfig", {"text_config": {**EVEN, **MROPE}, "vision_config": QWEN_SEES}),
    "Qwen3-VL": ("Qwen3VLConfig", {"text_config": {**SHAPES, "hidden_size": 60, **MROPE}, "vision_config": QWEN_SEES}),
    "Qwen3-VL-MoE": ("Qwen3VLMoeConfig", {"text_config": {**SHAPES, **QWEN_EXPERTS, "hidden_size": 60, **MROPE},
                                          "vision_config": QWEN_SEES}),
    "GLM-4.1V": ("Glm4vConfig", {
        "text_config": {**EVEN, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0,
                                                    "partial_rotary_factor": 0.4, "mrope_section": [1, 1, 0]}},
        "vision_config": QWEN_SEES}),
    "Aya Vision": ("AyaVisionConfig", {
        "text_config": {**EVEN, "model_type": "cohere2", "sliding_window": 12, "logit_scale": 1.0},
        "vision_config": {**SEEN, "model_type": "siglip_vision_model"}}),
    "Cohere2Vision": ("Cohere2VisionConfig", {
        "text_config": {**EVEN, "model_type": "cohere2", "sliding_window": 12, "logit_scale": 1.0},
        "vision_config": {**SEEN, "model_type": "siglip_vision_model"}}),
    "Qwen2-Audio": ("Qwen2AudioConfig", {
        "text_config": {**EVEN, "model_type": "qwen2"},
        "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1, "num_mel_bins": 8,
                         "encoder_attention_heads": 2, "encoder_ffn_dim": 24}}),
    "Gemma4": ("Gemma4Config", {"text_config": {**GEMMA4, "pad_token_id": 0, "hidden_size_per_layer_input": 0},
                                "vision_config": {**SEEN, "head_dim": 8, "position_embedding_size": 16},
                                "audio_config": None}),
    "Gemma4Unified": ("Gemma4UnifiedConfig", {
        "text_config": {**GEMMA4, "pad_token_id": 0, "num_attention_heads": 8, "num_key_value_heads": 4,
                        "num_global_key_value_heads": 1}, "vision_config": {}, "audio_config": None}),
    "GLM-4.5V": ("Glm4vMoeConfig", {
        "text_config": {**EVEN, "num_experts_per_tok": 2, "n_routed_experts": 6, "moe_intermediate_size": 24,
                        "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_parameters": {
                            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4,
                            "mrope_section": [1, 1, 0]}},
        "vision_config": QWEN_SEES}),
    "EXAONE 4.5": ("Exaone4_5_Config", {
        "text_config": {**EVEN, "model_type": "exaone4", "sliding_window": 12, "num_hidden_layers": 2,
                        "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**QWEN_SEES, "num_key_value_heads": 2}}),
    "Qwen3.5": ("Qwen3_5Config", {"text_config": {**DELTA, "tie_word_embeddings": False}, "vision_config": QWEN_SEES}),
    "Qwen3.5-MoE": ("Qwen3_5MoeConfig", {
        "text_config": {**DELTA, **QWEN_EXPERTS, "num_hidden_layers": 3, "shared_expert_intermediate_size": 24,
                        "tie_word_embeddings": False}, "vision_config": QWEN_SEES}),
    "LFM2-VL": ("Lfm2VlConfig", {
        "text_config": {**EVEN, "model_type": "lfm2", "num_hidden_layers": 3,
                        "layer_types": ["conv", "full_attention", "conv"]},
        "vision_config": {**SEEN, "model_type": "siglip2_vision_model"}}),
    "LlavaNextVideo": ("LlavaNextVideoConfig", {"text_config": {**SHAPES, "model_type": "llama"},
                                                "vision_config": {**SEEN, "model_type": "clip_vision_model"}}),
    "SmolVLM": ("SmolVLMConfig", {"text_config": {**SHAPES, "model_type": "llama"}, "vision_config": SEEN,
                                  "pad_token_id": None}),
}  # fmt: skip


def model_of(name: str) -> Any:
    """Return transformers' model of a case."""
    return make_model(*CASES[name])


def make_model(class_name: str, values: dict[str, Any]) -> Any:
    """Make transformers' whole model with seeded random weights, eager attention, fp32."""
    config = getattr(transformers, class_name)(**values, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, class_name.replace("Config", "ForConditionalGeneration"))(config).eval()
    spread = 0.06 if class_name.startswith("Qwen3_5") else 0.2  # gated delta nets amplify rounding
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, spread)
    return model


@pytest.mark.parametrize("name", CASES)
def test_text_is_answered_as_transformers_does(name, tmp_path):
    model = model_of(name)
    compare(save(model, tmp_path), model, Case("", {}))


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        (
            "Qwen3-VL",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            "use_sliding_window is",
        ),
        ("Qwen3-VL-MoE", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window is not read for qwen3"),
        ("Gemma3", {"final_logit_softcapping": 5.0}, "final_logit_softcapping is not read for gemma3"),
        ("Mistral3", {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, "layer_ty"),
    ],
)
def test_what_transformers_leaves_out_of_such_a_model_is_refused(name, values, named):
    class_name, parts = CASES[name]
    config = getattr(transformers, class_name)(**parts).to_dict()
    config |= {"text_config": config["text_config"] | values}
    config["architectures"] = [class_name.replace("Config", "ForConditionalGeneration")]
    if "max_window_layers" in values:
        config["text_config"]["layer_types"] = ["sliding_attention"] * 3
    with pytest.raises(ConfigError, match=named):
        registry.config_of(config, registry.family(config))


def test_tensors_may_have_the_names_of_transformers_memory(tmp_path):
    model = model_of("Llava")
    path = save(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    assert any(name.startswith("language_model.model.") for name in tensors)
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, path)
    compare(tmp_path, model, Case("", {}, (3,)))


QWEN2_VL_7B = {  # as published: the text model's keys stand among the others
    "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                      "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
                      "temporal_patch_size": 2},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip
LLAVA_7B = {  # as published: what is not said is what LlamaConfig says
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
    "text_config": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
                    "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064},
    "tie_word_embeddings": False, "torch_dtype": "float16", "vision_feature_layer": -2,
    "vision_config": {"hidden_size": 1024, "image_size": 336, "model_type": "clip_vision_model"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        (QWEN2_VL_7B, ("qwen2", 3584, 28, 4, 1_000_000.0, "default", 32_768, "bfloat16")),
        (LLAVA_7B, ("llama", 4096, 32, 32, 10_000.0, "default", 4096, "float16")),
    ],
)
def test_published_configurations_are_read(values, facts):
    config = registry.config_of(values, registry.family(values))
    assert config.rope is not None
    found = (config.model_type, config.hidden_size, config.num_heads, config.num_kv_heads, config.rope.theta)
    assert (*found, config.rope.kind, config.max_position, config.dtype) == facts


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_tensor_may_be_turned(turned, tmp_path):
    """transformers saves them as its modules hold them; Qwen published them as [expert, in, out]."""
    model = model_of("Qwen3-VL-MoE")
    path = save(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if ".experts." in name]
    size = next(tensors[name].shape[1] for name in names if name.endswith("down_proj"))
    if (size == 60) == turned:  # the other way than they were saved
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in names}
    save_file(tensors, path)
    compare(tmp_path, model, Case("", {}, (3,)))


def test_layers_that_share_keys_may_be_stored_with_their_own(tmp_path):
    """Gemma 4 E2B was published with projections that nothing computes with, beside what it hears with."""
    text = CASES["Gemma4"][1]["text_config"] | {
        "num_key_value_heads": 1, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 301,
    }  # fmt: skip
    model = make_model("Gemma4Config", CASES["Gemma4"][1] | {"text_config": text})
    path = save(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".layers.1.self_attn.k_" in name or ".layers.1.self_attn.v_" in name]:
        tensors[name.replace(".1.", ".3.")] = torch.randn(tensors[name].shape)
    tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(4, 4)
    save_file(tensors, path)
    compare(tmp_path, model, Case("", {}, (3,)))


def test_a_text_model_of_transformers_modules_says_so(tmp_path):
    config, _ = registry.read_model_config(save(model_of("EXAONE 4.5"), tmp_path))
    assert config.implementation == "transformers"


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("albert", "text_config: model_type = 'albert' is no family"), ("rwkv", "it keeps a state between tokens")],
)
def test_a_text_model_that_nobody_computes_is_refused(model_type, words):
    values = LLAVA_7B | {"text_config": {"model_type": model_type}}
    with pytest.raises(ConfigError, match=words):
        registry.config_of(values, registry.family(values))
