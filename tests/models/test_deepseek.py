"""DeepSeek-V2 and V3: what their configs say, what is refused, and what works with a cache of latents."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferengine.core.speculation import DraftModelProposer
from inferengine.errors import ConfigError, InferEngineError
from inferengine.executor.load import dry_run
from inferengine.executor.torch_executor import build_executor
from inferengine.kernels import cpu_latent
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.rotary import inverse_frequencies
from inferengine.models import registry
from inferengine.quantization.checkpoints import layout_of
from tests.executor.engine import Engine
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, model_of, save
from tests.models.families import CASES, compare, engine_of, error_of_logprobs
from tests.models.published import (
    PUBLISHED_K2,
    PUBLISHED_MOONLIGHT,
    PUBLISHED_V2_LITE,
    PUBLISHED_V3,
    PUBLISHED_V25,
)

V2, LITE, V3 = (CASES[name] for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3"))
PROMPT = list(range(20, 61))
OFTEN = {"first_k_dense_replace": 2, "moe_layer_freq": 3, "num_hidden_layers": 8}


def config_of(values: dict[str, Any]) -> DecoderConfig:
    return registry.config_of(values, registry.family(values))


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "heads", "layers"),
    [
        (PUBLISHED_V2_LITE, 16, 27),
        (PUBLISHED_V25, 128, 60),
        (PUBLISHED_V3, 128, 61),
        (PUBLISHED_K2, 64, 61),
        (PUBLISHED_MOONLIGHT, 16, 27),
    ],
    ids=["V2-Lite", "V2.5", "V3", "Kimi K2", "Moonlight"],
)
def test_the_cache_holds_576_numbers_of_a_token_in_each_layer(published, heads, layers):
    config = config_of(published)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.kv_planes) == (heads, 1, 576, 1)
    assert config.kv_bytes_per_token(0, 2) == layers * 576 * 2


def test_yarn_scales_the_scores():
    """The magnitude 0.1 * 0.707 * ln(40) + 1, squared: as published with DeepSeek-V2."""
    assert config_of(PUBLISHED_V2_LITE).attention_scale == pytest.approx(192**-0.5 * 1.260805**2, rel=1e-5)
    plain = PUBLISHED_V2_LITE | {"rope_scaling": None}
    assert config_of(plain).attention_scale == pytest.approx(192**-0.5)


def test_the_routing_of_v3_and_of_kimi_k2():
    v3, k2 = config_of(PUBLISHED_V3).moe, config_of(PUBLISHED_K2).moe
    assert v3 is not None
    assert k2 is not None
    assert (v3.sigmoid, v3.corrected, v3.renormalized, v3.factor, v3.groups) == (True, True, True, 2.5, (8, 4))
    assert k2.groups is None, "of one group all experts may be chosen"


def test_the_routing_of_v25_and_of_moonlight():
    v25, moonlight = config_of(PUBLISHED_V25).moe, config_of(PUBLISHED_MOONLIGHT).moe
    assert v25 is not None
    assert moonlight is not None
    assert (v25.sigmoid, v25.renormalized, v25.factor, v25.groups) == (False, False, 16.0, (8, 3))
    assert (moonlight.sigmoid, moonlight.factor, moonlight.groups) == (True, 2.446, None)
    assert (moonlight.shared_size, moonlight.dense_layers) == (2816, (0,))


def test_the_rotations_of_kimi_k2_and_moonlight_and_the_blocks_of_v3():
    """Kimi's two betas are equal: every frequency is either kept or divided, but for one."""
    k2, moonlight = config_of(PUBLISHED_K2), config_of(PUBLISHED_MOONLIGHT)
    assert k2.rope is not None
    assert inverse_frequencies(k2.rope, 4096)[0].isfinite().all()
    assert moonlight.attention_scale == pytest.approx(192**-0.5)
    assert moonlight.latent is not None
    assert moonlight.latent.query_rank is None
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    for stored in (blocks, blocks | {"scale_fmt": "ue8m0"}):  # V3, V3.1
        layout = layout_of(PUBLISHED_V3 | {"quantization_config": stored})
        assert layout is not None
        assert layout.name == "fp8 blocks"


def test_layers_with_experts_come_at_the_published_distance():
    moe = config_of(PUBLISHED_V2_LITE | OFTEN).moe
    assert moe is not None
    assert moe.dense_layers == (0, 1, 2, 4, 5, 7)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (PUBLISHED_V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob = true is not supported"),
        (PUBLISHED_V2_LITE | {"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid" is not supported'),
        (PUBLISHED_V2_LITE | {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        (PUBLISHED_V2_LITE | {"num_key_value_heads": 4}, "num_key_value_heads = 4 is not supported"),
        (PUBLISHED_V2_LITE | {"attention_bias": True}, "attention_bias without q_lora_rank"),
        (PUBLISHED_V2_LITE | {"mlp_bias": True}, "mlp_bias = true is not supported"),
        (PUBLISHED_V2_LITE | {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        (PUBLISHED_V3 | {"n_group": 7}, "8 of 256 experts are not in 4 of 7 equal groups"),
        (PUBLISHED_V3 | {"scoring_func": "softmax"}, 'scoring_func = "softmax" is not supported'),
        (PUBLISHED_V3 | {"topk_method": "greedy"}, 'topk_method = "greedy" is not supported'),
        (PUBLISHED_V3 | {"index_topk": 2048}, "index_topk = 2048 is not supported"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(values, words):
    with pytest.raises(ConfigError, match=words):
        config_of(values)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_the_layer_that_predicts_a_second_token_is_left_out(tmp_path):
    model = model_of(V3.config, V3.values)
    path = save(model, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.zeros(4, 8)}, path, metadata={"format": "pt"})
    assert dry_run(tmp_path) == sum(parameter.numel() for parameter in model.parameters()) + 8  # corrections of experts


def test_a_layer_beyond_it_is_unexpected(tmp_path):
    path = save(model_of(V3.config, V3.values), tmp_path) / "model.safetensors"
    save_file({**load_file(path), "model.layers.3.eh_proj.weight": torch.zeros(4, 8)}, path)
    with pytest.raises(ConfigError, match=r"the tensor model\.layers\.3\.eh_proj\.weight is unexpected"):
        dry_run(tmp_path)


@pytest.mark.parametrize("name", ["kv_a_layernorm.weight", "kv_b_proj.weight", "q_b_proj.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    path = save(model_of(V2.config, V2.values), tmp_path) / "model.safetensors"
    name = f"model.layers.1.self_attn.{name}"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path)
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        Engine(tmp_path)


# -- a cache of latents ------------------------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_the_plan_says(tmp_path):
    _, engine = engine_of(LITE, tmp_path, num_blocks=10, block_size=8)
    layers = engine.executor.kv.layers
    assert [tuple(layer.shape) for layer in layers] == [(11, 1, 1, 8, 24)] * 2
    assert engine.executor.kv.num_bytes == 11 * 8 * engine.executor.config.kv_bytes_per_token(0, 4)


@pytest.mark.parametrize("case", [V2, LITE, V3], ids=["V2", "V2-Lite", "V3"])
def test_whole_prompts_with_preemption_cached_prefixes_and_draft_tokens(case, tmp_path):
    """tests/models/test_families.py cuts prompts into chunks that are computed as decodes are."""
    model = model_of(case.config, case.values)
    engine = compare(save(model, tmp_path), model, case, budget=64)
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert engine.core.scheduler.stats.num_cached_tokens > 0


@pytest.mark.parametrize("case", [LITE, V3], ids=["V2-Lite", "V3"])
def test_prompts_are_computed_whole_in_chunks_and_behind_cached_ones(case, tmp_path, monkeypatch):
    """Some with keys and values of every head, some on latents."""
    forms = set()
    plan_parts = cpu_latent._plan_parts

    def planned(*args: Any) -> list[Any]:
        parts = plan_parts(*args)
        forms.update(type(part).__name__ for part in parts if not getattr(part, "decodes", ()))
        return parts

    monkeypatch.setattr(cpu_latent, "_plan_parts", planned)
    model, engine = engine_of(case, tmp_path, budget=80)
    prompts = [[(5 * i + 3 * j * j) % 300 for j in range(length)] for i, length in enumerate((170, 30, 60, 100))]
    longer = [[*prompt, *range(100, 118)] for prompt in prompts]
    for some in (prompts, longer[:1], longer[1:]):
        outputs = engine.generate(some, 8)
        assert outputs == [
            greedy_reference(model, prompt, output) for prompt, output in zip(some, outputs, strict=True)
        ]
    assert engine.core.scheduler.stats.num_cached_tokens >= 300
    assert forms == {"Absorbed", "UpProjected"}


def test_preempted_sequences_are_swapped_and_come_back(tmp_path):
    model, engine = engine_of(
        LITE, tmp_path, budget=16, num_blocks=12, preemption="swap", swap_is_cheap=True, cache={"swap_gib": 0.01}
    )
    prompts = [[7 * i + j for j in range(29)] for i in range(3)]
    outputs = engine.generate(prompts, 16)
    assert engine.core.scheduler.snapshot().num_blocks_swapped_in > 0
    assert outputs == [greedy_reference(model, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def test_a_model_with_latent_attention_may_be_the_draft_model(tmp_path):
    """The draft model is the model itself, with a cache of latents of its own."""
    folder = save(model_of(V2.config, V2.values), tmp_path)
    draft = {"method": "draft", "draft_model": str(folder)}
    engine = Engine(
        folder,
        proposer=DraftModelProposer(),
        max_drafts=3,
        build=lambda config: build_executor(config.with_values(speculation=draft)),
    )
    assert engine.generate([PROMPT], 16) == Engine(folder).generate([PROMPT], 16)
    assert engine.core.scheduler.snapshot().num_drafts_accepted >= 10


def test_an_fp8_cache_is_near(tmp_path):
    model, engine = engine_of(V3, tmp_path, cache={"dtype": "fp8"})
    assert 1e-4 < error_of_logprobs(PROMPT, model, engine) < 0.3


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_weights_may_be_quantized_at_load(scheme, tmp_path):
    model, engine = engine_of(V2, tmp_path, model={"quantization": scheme})
    assert 1e-4 < error_of_logprobs(PROMPT, model, engine) < 0.5


def test_what_attention_takes_apart_is_not_rounded(tmp_path):
    model, engine = engine_of(V2, tmp_path, model={"quantization": "int8"})
    attention = engine.executor.model.layers[0].attention
    weight = model.model.layers[0].self_attn.kv_b_proj.weight.view(6, 22, 16)
    assert torch.equal(attention.up.key_up, weight[:, :12])
    assert torch.equal(attention.up.value_up, weight[:, 12:].transpose(1, 2))


def test_adapters_change_the_other_projections(tmp_path):
    model = model_of(V2.config, V2.values)
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=targets)
    engine = Engine(save(model, tmp_path / "model"), model={"adapters": str(tmp_path / "adapters")})
    (output,) = engine.generate([PROMPT], 12, adapter=1)
    assert output == greedy_reference(merged, PROMPT, output)
    assert output != greedy_reference(model, PROMPT, output)


def test_an_adapter_of_what_attention_takes_apart_is_refused_by_name(tmp_path):
    model = model_of(V2.config, V2.values)
    write_adapter(tmp_path / "adapters" / "pirate", model, targets=("kv_b_proj",))
    with pytest.raises(InferEngineError, match=r"kv_b_proj\.lora_.* adapts a matrix that attention takes apart"):
        Engine(save(model, tmp_path / "model"), model={"adapters": str(tmp_path / "adapters")})


def test_a_model_of_random_weights_runs(tmp_path):
    values = PUBLISHED_V2_LITE | {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
        "n_routed_experts": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 301,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    engine = Engine(tmp_path, model={"load_format": "dummy", "max_model_len": 256})
    assert len(engine.generate([PROMPT], 4)[0]) == 4
