"""Keys that published checkpoints have beside those that say what is computed. Each row is a family of repositories,
with its own keys around shapes that are made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferengine.errors import ConfigError
from inferengine.models import registry
from inferengine.quantization.checkpoints import layout_of
from tests.executor.engine import Engine
from tests.models.checkpoints import greedy_reference, make_model, save

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "vocab_size": 100, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "max_position_embeddings": 2048,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2,
    "n_positions": 128, "n_ctx": 128, "vocab_size": 100, "activation_function": "gelu_new",
}  # fmt: skip
EVERYTHING = {  # `to_dict` of transformers 4, which some tools write in place of what differs from the defaults
    "return_dict": True, "chunk_size_feed_forward": 0, "add_cross_attention": False, "tie_encoder_decoder": False,
    "max_length": 20, "min_length": 0, "do_sample": True, "num_beams": 1, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1,
    "pruned_heads": {}, "id2label": {"0": "LABEL_0"}, "decoder_start_token_id": None,
}  # fmt: skip
SMALL = {name: value for name, value in LLAMA.items() if name not in ("rms_norm_eps", "hidden_act")}
STARCODER2 = SMALL | {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
    "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm", "sliding_window": 4096, "use_bias": True,
}  # fmt: skip
BERT = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"} | {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "position_embedding_type": "absolute",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2": LLAMA | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    "Falcon3": LLAMA | {"activation": "swiglu", "head_dim": 16},
    "Vicuna": LLAMA | {"max_sequence_length": 2048, "pretraining_tp": 1},
    "Llama, everything": LLAMA | EVERYTHING,
    "starcoder2-3b": STARCODER2 | {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    },
    "starcoder2-15b": STARCODER2 | {"rms_norm_eps": 1e-5},
    "Phi-4-mini": LLAMA | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False,
    },
    "Qwen3-Coder": LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "qkv_bias": False, "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    "opt-13b": {name: value for name, value in BERT.items() if name in SMALL} | {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64,
        "output_projection": True,
    },
    "bge-base-zh": BERT | {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
    },
    "ms-marco-MiniLM": BERT | {
        "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    },
    "gpt2-medium": GPT2 | {"n_special": 0, "predict_special_tokens": True},
    "gpt2-xl": GPT2 | {"output_past": True},
    "distilgpt2": GPT2 | {"_num_labels": 1},
    "GPT-2, everything": GPT2 | EVERYTHING,
}  # fmt: skip

CALIBRATED = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None}
PACKED = {**CALIBRATED, "group_size": 128, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}
GROUP = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
EIGHT = {**PACKED, "group_size": None, "num_bits": 8, "strategy": "channel"}
QUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQModel 5": (
        {
            "quant_method": "gptq", "method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "bits": 4,
            "group_size": 128, "desc_act": False, "sym": True, "pack_dtype": "int32", "meta": {"act_group_aware": True},
        },
        "gptq",
    ),
    "AutoRound": (
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "data_type": "int", "lr": 0.005,
            "iters": 200, "autoround_version": "0.3", "enable_quanted_input": True, "desc_act": False,
        },
        "gptq",
    ),
    "w4a16, calibrated in the order of activations": (
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {**GROUP, "weights": {**PACKED, "actorder": "weight"}}},
        },
        "compressed-tensors int4",
    ),
    "w8a16, packed": (
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {**GROUP, "weights": EIGHT}},
        },
        "compressed-tensors int8",
    ),
    "FP8, dense": (
        {
            "quant_method": "compressed-tensors", "format": "naive-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {**GROUP, "weights": {**EIGHT, "type": "float", "strategy": "tensor"}}},
            "sparsity_config": {"format": "dense", "global_sparsity": 0.12, "sparsity_structure": "unstructured"},
        },
        "compressed-tensors fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_without_effect_are_known(name):
    values = CONFIGS[name]
    assert registry.config_of(values, registry.family(values)).num_layers == 2


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantization_configs_are_read(name):
    values, layout = QUANTIZED[name]
    found = layout_of({"quantization_config": values})
    assert found is not None
    assert found.name == layout


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": "relu"}, 'activation = "relu"'),
        ({"rope_interleaved": True}, "rope_interleaved = true"),
        ({"add_cross_attention": True}, "add_cross_attention = true"),
    ],
)
def test_the_same_keys_are_refused_where_they_have_an_effect(changes, named):
    values = LLAMA | changes
    with pytest.raises(ConfigError) as caught:
        registry.config_of(values, registry.family(values))
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"actorder": "column"}, "actorder = 'column'"),
        ({"strategy": "block", "type": "float", "num_bits": 8}, "block_structure = None"),
    ],
)
def test_a_quantization_that_needs_more_is_refused_by_name(section, named):
    values = {**QUANTIZED["w8a16, packed"][0]}
    values["config_groups"] = {"group_0": {**GROUP, "weights": {**PACKED, **section}}}
    with pytest.raises(ConfigError) as caught:
        layout_of({"quantization_config": values})
    assert named in caught.value.message


def test_names_without_their_root_as_embedding_models_are_stored(tmp_path):
    model = make_model("qwen3")
    path = save(model, tmp_path) / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    (output,) = Engine(tmp_path).generate([[5, 9, 200]], 8)
    assert output == greedy_reference(model, [5, 9, 200], output)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2", "gemma3", "gpt2"])
def test_an_embedding_model_that_is_stored_without_a_head(name, tmp_path):
    model = make_model(name)
    base = model.base_model
    base.save_pretrained(tmp_path)
    engine = Engine(tmp_path, budget=8)
    assert engine.executor.implementation == ""
    prompt = list(range(20, 41))
    uid = engine.embed(prompt)
    engine.run()
    with torch.inference_mode():
        state = base(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert torch.allclose(torch.tensor(engine.embeddings[uid]), state / state.norm(), atol=1e-4)


def test_the_same_weights_under_mistrals_own_names_are_left_alone(tmp_path):
    path = save(make_model("mistral-window"), tmp_path) / "model.safetensors"
    save_file(
        {"tok_embeddings.weight": load_file(path)["model.embed_tokens.weight"]}, tmp_path / "consolidated.safetensors"
    )
    assert len(Engine(tmp_path).generate([[5, 9]], 2)[0]) == 2
