"""Gemma 4's text models: what their configs say, what is refused, and a cache whose layers differ or are shared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferengine.config import Config
from inferengine.errors import ConfigError, InferEngineError
from inferengine.executor.load import dry_run
from inferengine.executor.memory.plan import make_plan
from inferengine.executor.onnx.export import require_supported
from inferengine.executor.settings import executor_settings
from inferengine.executor.tools.roofline import model_work
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig, KVShape
from inferengine.layers.rotary import inverse_frequencies
from inferengine.models import registry
from tests.executor.engine import Engine
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, model_of, save
from tests.models.families import CASES, compare, engine_of, error_of_logprobs

E2B, EXPERTS, UNIFIED = (CASES[name] for name in (
    "gemma4-e2b, layers that share keys", "gemma4-26b, experts beside a block", "gemma4-12b"))  # fmt: skip
PROMPT = list(range(20, 61))
PUBLISHED: dict[str, Any] = {  # keys as published, around small shapes
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "audio_config": None, "vision_config": None, "image_token_id": 258_880, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0, "vocab_size": 1000, "vocab_size_per_layer_input": 1000,
        "max_position_embeddings": 4096, "sliding_window": 64, "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 6, "use_double_wide_mlp": True, "use_bidirectional_attention": "vision",
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    },
}  # fmt: skip


def config_of(**text: Any) -> DecoderConfig:
    values = {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], **text}}
    return registry.config_of(values, registry.family(values))


# -- config.json -------------------------------------------------------------------------------------------------------


def test_the_published_keys_are_read():
    config = config_of()
    assert config.windows == (*[64] * 5, None) * 2
    assert (config.kv_shape(64), config.kv_shape(None)) == (KVShape(4, 16), KVShape(2, 32))
    assert config.qkv_parts(0) == [8 * 16, 4 * 16, 4 * 16]
    assert config.qkv_parts(5) == [8 * 32, 2 * 32], "keys are values"
    assert config.qkv_parts(11) == [8 * 32], "another layer's keys"
    assert config.kv_sources == (0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5)
    assert config.intermediate_sizes == (96,) * 6 + (192,) * 6
    assert (config.dtype, config.tied_embeddings, config.logits_softcap) == ("bfloat16", True, 30.0)


def test_without_keys_as_values_all_layers_have_as_many_kv_heads():
    assert config_of(attention_k_eq_v=False).kv_shape(None) == KVShape(4, 32)


def test_a_share_of_the_frequencies_turns():
    rope = config_of().rope
    assert rope is not None
    frequencies, magnitude = inverse_frequencies(rope)
    expected = [1e6 ** -(2 * pair / 32) for pair in range(4)] + [0.0] * 12
    assert frequencies.tolist() == pytest.approx(expected)
    assert magnitude == 1.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all" is not supported'),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers = 8 leaves no layer of some kind of attention"),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "per_layer_config is only read where"),
        ({"per_layer_config": {"5": {"head_dim": 32}, "11": {"head_dim": 64}}}, "per_layer_config is only read where"),
        ({"per_layer_config": {"5": {"sliding_window": 3}, "11": {"sliding_window": 3}}}, "per_layer_config is only"),
        ({"num_global_key_value_heads": 3}, "8 heads do not divide among 3 KV heads"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 999}, "= 999 is less than vocab_size"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
         "top_k_experts = 5 is more than num_experts = 4"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size is missing"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(values, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**values)


def test_onnx_says_that_it_cannot_compute_it():
    with pytest.raises(ConfigError, match="onnx cannot compute the layers of Gemma 4"):
        require_supported(config_of())


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoints_tensors_are_accounted_for(tmp_path):
    model = model_of(E2B.config, E2B.values)
    scalars = len(model.model.layers)
    assert dry_run(save(model, tmp_path)) == sum(each.numel() for each in model.parameters()) + scalars


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (E2B, "model.layers.4.layer_scalar"), (E2B, "model.layers.0.self_attn.k_norm.weight"),
        (E2B, "model.embed_tokens_per_layer.weight"), (EXPERTS, "model.layers.2.router.per_expert_scale"),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named(case, name, tmp_path):
    path = save(model_of(case.config, case.values), tmp_path) / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path)
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        dry_run(tmp_path)


def test_values_of_a_layer_whose_keys_are_values_are_unexpected(tmp_path):
    path = save(model_of(UNIFIED.config, UNIFIED.values), tmp_path) / "model.safetensors"
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file({**load_file(path), name: torch.zeros(16, 48)}, path)
    with pytest.raises(ConfigError, match=f"the tensor {name} is unexpected"):
        dry_run(tmp_path)


@pytest.mark.parametrize(("case", "scheme"), [(E2B, "int8"), (EXPERTS, "fp8")], ids=["int8", "experts in fp8"])
def test_weights_may_be_quantized_at_load(case, scheme, tmp_path):
    model, engine = engine_of(case, tmp_path, model={"quantization": scheme})
    assert 1e-4 < error_of_logprobs(PROMPT, model, engine) < 0.5


@pytest.mark.parametrize("case", [E2B, UNIFIED], ids=["E2B", "12B"])
def test_adapters_change_its_linear_layers(case, tmp_path):
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate",
             "per_layer_projection", "per_layer_model_projection")  # fmt: skip
    model = model_of(case.config, case.values)
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=names)
    engine = Engine(save(model, tmp_path), model={"adapters": str(tmp_path / "adapters")})
    (output,) = engine.generate([PROMPT], 12, adapter=1)
    assert output == greedy_reference(merged, PROMPT, output)
    assert output != greedy_reference(model, PROMPT, output)


def test_an_adapter_of_values_that_a_layer_does_not_have_is_refused(tmp_path):
    model = model_of(UNIFIED.config, UNIFIED.values)
    write_adapter(tmp_path / "adapters" / "pirate", model, targets=("q_proj",))
    path = tmp_path / "adapters" / "pirate" / "adapter_model.safetensors"
    renamed = {key.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"): tensor
               for key, tensor in load_file(path).items()}  # fmt: skip
    save_file(renamed, path)
    with pytest.raises(InferEngineError, match="adapts a projection that this layer does not have"):
        Engine(save(model, tmp_path), model={"adapters": str(tmp_path / "adapters")})


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_the_plan_says(tmp_path):
    """Layers 3 to 5 read what layers 1 and 2 wrote; those with full attention have another shape."""
    _, engine = engine_of(E2B, tmp_path, num_blocks=10, block_size=8)
    config, kv = engine.executor.config, engine.executor.kv
    assert [tuple(layer.shape) for layer in kv.layers] == [(11, 2, 1, 8, 20)] * 2 + [(11, 2, 1, 8, 16)]
    assert kv.num_bytes == 11 * 8 * sum(config.kv_bytes_per_token(group, 4) for group in range(2))
    bound = [layer.kv for layer in engine.executor.model.modules() if isinstance(layer, Attention)]
    assert all(found is kv.layers[source] for found, source in zip(bound, (0, 1, 2, 1, 1, 2), strict=True))


def test_plan_memory_counts_layers_that_share_keys_once(tmp_path):
    folder = save(model_of(E2B.config, E2B.values), tmp_path)
    config = Config().with_values(model={"path": str(folder)}, cache={"block_size": 8})
    plan = make_plan(executor_settings(config, torch.device("cpu")), 1 << 26)
    assert plan.kv_bytes_per_token == 2 * 1 * 16 * 4
    assert plan.window_bytes_per_sequence == 2 * (2 * 1 * 20 * 4) * 3 * 8, "a window of 12 in blocks of 8, and one more"


def test_what_is_read_of_a_shared_cache_counts_for_every_layer_that_reads_it():
    config = config_of()
    work = model_work(config, weight_bytes=0, num_layer_weights=0, item_bytes=2, head_item_bytes=2, kv_item_bytes=2)
    assert [(group.window, group.readings) for group in work.groups] == [(None, 2.0), (64, 2.0)]
    assert work.groups[0].kv_bytes_per_token == 2 * 2 * 32 * 2


@pytest.mark.parametrize("case", [E2B, EXPERTS], ids=["E2B", "26B"])
def test_whole_prompts_with_preemption_cached_prefixes_and_draft_tokens(case, tmp_path):
    model = model_of(case.config, case.values)
    engine = compare(save(model, tmp_path), model, case, budget=64)
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert engine.core.scheduler.stats.num_cached_tokens > 0


def test_preempted_sequences_are_swapped_and_come_back(tmp_path):
    model, engine = engine_of(
        E2B, tmp_path, budget=16, num_blocks=12, preemption="swap", swap_is_cheap=True, cache={"swap_gib": 0.01}
    )
    prompts = [[7 * i + j for j in range(29)] for i in range(3)]
    outputs = engine.generate(prompts, 16)
    assert engine.core.scheduler.snapshot().num_blocks_swapped_in > 0
    assert outputs == [greedy_reference(model, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def test_an_fp8_cache_is_scaled_alike_by_all_layers_that_share_it(tmp_path):
    case = E2B._replace(values={**E2B.values, "initializer_range": 0.05})
    model, engine = engine_of(case, tmp_path, cache={"dtype": "fp8"})
    scales = [layer.kv_scales for layer in engine.executor.model.modules() if isinstance(layer, Attention)]
    assert scales[3:] == [scales[1], scales[1], scales[2]]
    assert 1e-5 < error_of_logprobs(PROMPT, model, engine) < 0.3


def test_one_conversation_goes_on_for_long(tmp_path):
    """Its keys are copied side by side, once for all layers that read them."""
    model, engine = engine_of(E2B, tmp_path, budget=64)
    (output,) = engine.generate([PROMPT], 60)
    assert output == greedy_reference(model, PROMPT, output)
    copies = engine.executor.decode_kv_cache.copies
    assert [len(copy._layers) for copy in copies.values()] == [1]


def test_the_config_that_transformers_writes_says_the_same(tmp_path):
    folder = save(model_of(UNIFIED.config, UNIFIED.values), tmp_path)
    assert "per_layer_config" in json.loads((folder / "config.json").read_text())
    config, _ = registry.read_model_config(folder)
    assert (config.kv_shape(None), config.kv_shape(12)) == (KVShape(1, 16), KVShape(4, 20))
