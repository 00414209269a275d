"""Models without a family here, with transformers' modules: against transformers in fp32, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferengine.config import Config
from inferengine.errors import ConfigError
from inferengine.executor.load import dry_run
from inferengine.executor.tools import compare_hf
from inferengine.layers.parallel import Shard
from inferengine.models import registry
from inferengine.models.table import FAMILIES
from tests.executor.engine import Engine
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, logits_reference, model_of, save
from tests.models.families import BARE, EVEN, HALF, LATENT, MIXTURE, Case, compare

MULTI_QUERY = {
    "vocab_size": 301, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES = {
    "exaone4, windows": Case("Exaone4Config", {**EVEN, "num_hidden_layers": 4, "sliding_window": 12,
                                               "sliding_window_pattern": 2}),
    "ernie4_5, interleaved": Case("Ernie4_5Config", {**BARE}),
    "arcee, tied": Case("ArceeConfig", {**BARE, "tie_word_embeddings": True}),
    "helium": Case("HeliumConfig", {**EVEN, "head_dim": 10}),
    "hunyuan": Case("HunYuanDenseV1Config", {**BARE}),
    "olmo, clipped": Case("OlmoConfig", {**EVEN, "clip_qkv": 2.0}),
    "phi": Case("PhiConfig", {**EVEN, **HALF}),
    "persimmon": Case("PersimmonConfig", {**EVEN, **HALF}),
    "starcoder, one kv head": Case("GPTBigCodeConfig", MULTI_QUERY),
    "vaultgemma, caps": Case("VaultGemmaConfig", {**BARE, "sliding_window": 12, "attn_logit_softcapping": 3.0}),
    "glm4-moe": Case("Glm4MoeConfig", {**BARE, **MIXTURE, "n_routed_experts": 6, "use_qk_norm": True}),
    "phi3.5-moe": Case("PhimoeConfig", {**EVEN, "num_local_experts": 4, "router_jitter_noise": 0.0}),
    "ernie4_5-moe": Case("Ernie4_5_MoeConfig", {**EVEN, "moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 1,
                                                "moe_intermediate_size": 40, "moe_layer_start_index": 1}),
    "granite-moe-shared": Case("GraniteMoeSharedConfig", {**EVEN, "num_local_experts": 6, "num_experts_per_tok": 3,
                                                          "shared_intermediate_size": 56}),
    "youtu, latent": Case("YoutuConfig", {**EVEN, **LATENT}),
    "granite-swa, sinks": Case("GraniteSWAConfig", {**EVEN, "sliding_window": 12, "num_hidden_layers": 4},
                               within=1e-3),  # one last digit in its weights moves the reference by 2e-4
    "granite-4-micro, attention alone": Case("GraniteMoeHybridConfig", {
        **EVEN, "num_local_experts": 0, "shared_intermediate_size": 64, "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope", "mamba_n_heads": 12, "mamba_d_head": 10}),
    "afmoe, a mask by its name": Case("AfmoeConfig", {
        **BARE, "num_hidden_layers": 4, "sliding_window": 12, "num_dense_layers": 1, "num_experts": 6,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 24}),
    "hunyuan-moe, a router that reads its weight": Case("HunYuanMoEV1Config", {**BARE, "num_experts": 6,
                                                                               "moe_topk": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_transformers(name, tmp_path):
    case = CASES[name]
    model = model_of(case.config, case.values)
    assert type(model).__name__ not in {family.architecture for family in FAMILIES}
    engine = compare(save(model, tmp_path), model, case)
    assert engine.executor.implementation == "transformers"
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert engine.core.scheduler.stats.num_cached_tokens > 0


@pytest.fixture(scope="module")
def arcee(tmp_path_factory) -> tuple[Any, Any]:
    """Return (transformers' model, the folder of its checkpoint)."""
    model = model_of("ArceeConfig", EVEN)
    return model, save(model, tmp_path_factory.mktemp("arcee"))


def test_a_prompts_logprobs_and_its_embedding_are_transformers(arcee):
    model, folder = arcee
    engine = Engine(folder, budget=8)
    prompt = list(range(20, 41))
    uid = engine.submit(prompt, 1, prompt_logprobs=0)
    engine.run()
    expected = logits_reference(model, prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([item.logprob for item in engine.prompt_logprobs[uid] if item is not None])
    assert torch.allclose(found, expected, atol=1e-4)
    uid = engine.embed(prompt)
    engine.run()
    with torch.inference_mode():
        state = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert torch.allclose(torch.tensor(engine.embeddings[uid]), state / state.norm(), atol=1e-4)


def test_weights_may_be_quantized_at_load(arcee):
    model, folder = arcee
    engine = Engine(folder, model={"quantization": "int8"})
    uid = engine.submit(list(range(20, 41)), 1, logprobs=20)
    engine.run()
    expected = logits_reference(model, list(range(20, 41)))[-1].log_softmax(-1).topk(20).values
    difference = (torch.tensor(engine.logprobs[uid][0].top_logprobs) - expected).abs().max()
    assert 1e-4 < float(difference) < 0.5


def test_adapters_change_its_linear_layers(arcee, tmp_path):
    model, folder = arcee
    merged = write_adapter(tmp_path / "pirate", model, targets=("q_proj", "o_proj", "up_proj"), dora=True)
    engine = Engine(folder, model={"adapters": str(tmp_path)})
    prompt = list(range(20, 41))
    (output,) = engine.generate([prompt], 12, adapter=1)
    assert output == greedy_reference(merged, prompt, output)


def test_experts_may_be_quantized_at_load(tmp_path):
    case = CASES["glm4-moe"]
    model = model_of(case.config, case.values)
    engine = Engine(save(model, tmp_path), model={"quantization": "fp8"})
    prompt = list(range(20, 41))
    uid = engine.submit(prompt, 1, logprobs=20)
    engine.run()
    expected = logits_reference(model, prompt)[-1].log_softmax(-1).topk(20).values
    difference = (torch.tensor(engine.logprobs[uid][0].top_logprobs) - expected).abs().max()
    assert 1e-4 < float(difference) < 0.5


def test_a_missing_expert_is_named(tmp_path):
    case = CASES["phi3.5-moe"]
    path = save(model_of(case.config, case.values), tmp_path) / "model.safetensors"
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path)
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        Engine(tmp_path)


def test_there_is_nothing_to_compare_layer_by_layer(arcee):
    config = Config().with_values(model={"path": str(arcee[1])}, engine={"device": "cpu"})
    with pytest.raises(ConfigError, match="are those of transformers already"):
        compare_hf.compare(config, 8)


def test_a_model_of_transformers_is_not_divided_among_devices(arcee):
    config, _ = registry.read_model_config(arcee[1])
    with pytest.raises(ConfigError, match="the modules of transformers are not divided"):
        Shard(0, 2).divide(config)


def test_a_checkpoint_is_checked_without_its_weights(arcee):
    model, folder = arcee
    assert dry_run(folder) == sum(parameter.numel() for parameter in model.parameters())


def test_tokens_that_meet_outside_the_attention_are_refused(arcee):
    _, folder = arcee
    model = Engine(folder).executor.model
    block = model.base.layers[0].mlp
    plain = block.forward
    block.forward = lambda x: plain(x) + 0.1 * x.cumsum(1)
    with pytest.raises(ConfigError, match="its tokens reach each other"):
        model.verify()


def test_a_model_that_counts_positions_itself_is_refused(arcee):
    _, folder = arcee
    model = Engine(folder).executor.model
    rotary = model.base.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ConfigError, match="have positions, outside"):
        model.verify()


SMALL = {"vocab_size": 301, "hidden_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "values", "reason"),
    [
        ("RwkvConfig", SMALL, "it keeps a state between tokens that is not in transformers' cache"),
        ("BloomConfig", SMALL, "it takes no positions"),
        ("GPTJConfig", MULTI_QUERY, "does not use transformers' attention interface"),
        ("XGLMConfig", {"vocab_size": 301, "d_model": 48}, "does not use transformers' attention interface"),
        ("FuyuConfig", {}, "transformers joins or divides tensors"),
        ("GptOssConfig", BARE, "its experts are not gated blocks that this engine computes"),
    ],
)
def test_what_the_paged_attention_cannot_compute_is_refused(config, values, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MODULES", {})  # though a family may come
    document = getattr(transformers, config)(**values).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**document, "architectures": None}), encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        registry.read_model_config(tmp_path)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_block_without_width_adds_nothing(tmp_path):
    """AFMoE without shared experts still has their modules."""
    values = {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    case = Case("AfmoeConfig", {**BARE, **values, "sliding_window": 12, "num_shared_experts": 0})
    model = model_of(case.config, case.values)
    compare(save(model, tmp_path), model, case)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_layers"])
def test_more_layers_than_any_model_has_are_refused_before_one_is_built(name):
    values = transformers.HeliumConfig().to_dict() | {"architectures": ["HeliumForCausalLM"], name: 1_000_000_000}
    with pytest.raises(ConfigError, match=f"{name} must be at most 512; got 1000000000"):
        registry.config_of(values, registry.family(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"},
         "known neither here nor to transformers .* the nearest that has: Qwen"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
         "'t5' is an encoder with a decoder; no family of the list is like it"),
        ({"architectures": ["MiniMaxM9ForCausalLM"], "model_type": "minimax_m9"},
         "no family of the list is like it"),
        ({"architectures": ["GraniteNewForCausalLM"], "model_type": "granite_new"},
         "the nearest that has: GraniteForCausalLM"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "vit"}, "'vit' is no causal language model"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
         "'llama' is served as LlamaForCausalLM; the nearest that has: LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_a_refusal_says_why_and_what_is_nearest(values, words):
    with pytest.raises(ConfigError, match=words):
        registry.family(values)


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
    values = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["Own"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="code of a checkpoint is never run"):
        registry.read_model_config(tmp_path)
