"""Models in GGUF files, through the whole engine: their logits are transformers' of the dequantized weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers

from inferengine import LLM, SamplingParams
from inferengine.config import Config
from inferengine.errors import ConfigError
from inferengine.executor.load import load_model
from inferengine.executor.memory.plan import weight_bytes
from inferengine.executor.settings import executor_settings
from inferengine.executor.tools.compare_hf import Probe
from inferengine.executor.torch_executor import build_executor
from inferengine.gguf.checkpoint import ARCHITECTURES, eos_token_ids
from inferengine.gguf.reader import read_gguf
from inferengine.kernels.block_codes import numbers
from inferengine.kernels.experts import ExpertBlocks
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.parallel import Shard
from inferengine.models import registry
from inferengine.models.hf_config import read_json
from inferengine.models.parallel import divide
from inferengine.models.weights import finish, load_weights
from inferengine.quantization.apply import quantize
from tests.gguf.test_tokenizer import add_tokenizer, byte_level
from tests.gguf.test_tokenizer import finish as finish_writer
from tests.models.checkpoints import model_of
from tests.models.gguf_files import Kinds, mxfp4, q4_k_m, q8_0, write
from tests.quantization.test_experts import GPT_OSS, write_mxfp4

SHAPES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def older(name: str, shape: tuple[int, ...]) -> str:
    """Name the type of a tensor: formats of blocks of 32, with one of 16 bits among the parts of a layer."""
    return {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "Q4_1", "ffn_up": "Q5_0", "ffn_gate": "Q5_1"}.get(
        name.split(".")[-2], "Q8_0"
    )


def q4_k_m_of_latents(name: str, shape: tuple[int, ...]) -> str:
    """Name the type of a tensor; the keys' matrices have rows of fewer than 256."""
    return "Q8_0" if "attn_k_b" in name else q4_k_m(name, shape)


def gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(20.0)
    writer.add_final_logit_softcapping(10.0)
    writer.add_sliding_window(16)


def gemma4(*, kv_heads: int | list[int], **values: Any) -> Callable[[gguf.GGUFWriter], None]:
    """Write metadata as the converter writes Gemma 4's metadata: 5 layers, two of them with full attention and heads of
    128."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_key_length_swa(64)
        writer.add_value_length_swa(64)
        writer.add_rope_dimension_count(128)
        writer.add_head_count_kv(kv_heads)
        writer.add_sliding_window(12)
        writer.add_sliding_window_pattern([True, True, False, True, False])
        writer.add_rope_freq_base_swa(5e3)
        for name, value in {"shared_kv_layers": 0, "embedding_length_per_layer_input": 0, **values}.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 16 + [1e30] * 48, dtype=np.float32))

    return more


GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5, "head_dim": 64, "global_head_dim": 128, "sliding_window": 12, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
}  # fmt: skip


def granite(writer: gguf.GGUFWriter) -> None:
    writer.add_embedding_scale(2.0)
    writer.add_residual_scale(0.5)
    writer.add_attention_scale(0.1)
    writer.add_logit_scale(4.0)


def experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(256)
    writer.add_expert_shared_feed_forward_length(96)


def gpt_oss(writer: gguf.GGUFWriter) -> None:
    experts(writer)
    writer.add_sliding_window(12)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def deepseek(sigmoid: bool, latents: bool = True) -> Callable[[gguf.GGUFWriter], None]:
    """Write metadata as the converter writes DeepSeek's metadata; without `latents` as it did before 2025."""

    def more(writer: gguf.GGUFWriter) -> None:
        rank, plain, rotary, value = (LATENT[name] for name in LATENT_SIZES)
        writer.add_kv_lora_rank(rank)
        writer.add_rope_dimension_count(rotary)
        writer.add_key_length(rank + rotary if latents else plain + rotary)
        writer.add_value_length(rank if latents else value)
        if latents:
            writer.add_head_count_kv(1)
            writer.add_key_length_mla(plain + rotary)
            writer.add_value_length_mla(value)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(256)
        writer.add_expert_weights_scale(2.5)
        writer.add_expert_weights_norm(sigmoid)
        if sigmoid:
            writer.add_q_lora_rank(256)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_group_count(2)
            writer.add_expert_group_used_count(1)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_log_mul(0.0707)

    return more


LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT: dict[str, Any] = {
    **dict(zip(LATENT_SIZES, (256, 32, 16, 64), strict=True)), "num_key_value_heads": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V2 = {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
V3 = {**LATENT, "q_lora_rank": 256, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 96,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


class Case(NamedTuple):
    """One file: its architecture, transformers' class and values, the types of its tensors, and how it is written."""

    architecture: str
    model: str
    values: dict[str, Any]
    kinds: Kinds
    written: dict[str, Any] = {}  # noqa: RUF012


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
PAIRS = {"permutes": True}


def turning(count: int, **eps: float) -> Callable[[gguf.GGUFWriter], None]:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(count)
        if eps:
            writer.add_layer_norm_eps(eps["eps"])

    return more


CASES = {
    "llama": Case("llama", "Llama", {"tie_word_embeddings": False}, q4_k_m, PAIRS),
    "llama, tied, F16": Case("llama", "Llama", {"tie_word_embeddings": True}, lambda name, shape: "F16", PAIRS),
    "llama, BF16 and F32": Case("llama", "Llama", {}, lambda name, shape: "BF16" if "ffn" in name else "F32", PAIRS),
    "llama, older formats": Case("llama", "Llama", {}, older, PAIRS),
    "llama, narrow": Case("llama", "Llama", {"hidden_size": 96, "intermediate_size": 160}, older, PAIRS),
    "qwen2": Case("qwen2", "Qwen2", {"tie_word_embeddings": True}, q8_0),
    "qwen3": Case("qwen3", "Qwen3", {"tie_word_embeddings": True, "head_dim": 128}, q4_k_m),
    "gemma": Case("gemma", "Gemma", {"head_dim": 64}, q4_k_m, {"plus_one": True}),
    "gemma2": Case("gemma2", "Gemma2", {"head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 64,
                                        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
                   q8_0, {"plus_one": True, "more": gemma2}),
    "gemma3": Case("gemma3", "Gemma3", {"head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 64}, q4_k_m,
                   {"plus_one": True, "more": lambda writer: writer.add_sliding_window(16)}),
    "gemma4, E2B": Case("gemma4", "Gemma4", {
        **GEMMA4, "num_key_value_heads": 1, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 301, "final_logit_softcapping": 10.0,
        "tie_word_embeddings": True},
        q8_0, {"more": gemma4(kv_heads=1, shared_kv_layers=2, embedding_length_per_layer_input=32,
                              feed_forward_length=[512, 512, 512, 1024, 1024], final_logit_softcapping=10.0)}),
    "gemma4, 26B": Case("gemma4", "Gemma4", {
        **GEMMA4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 256, "tie_word_embeddings": True},
        q4_k_m, {"more": gemma4(kv_heads=[2, 2, 1, 2, 1], expert_count=4, expert_used_count=2,
                                expert_feed_forward_length=256)}),
    "phi3": Case("phi3", "Phi3", {"sliding_window": None}, q4_k_m),
    "olmo2": Case("olmo2", "Olmo2", {}, q8_0),
    "granite": Case("granite", "Granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                                           "attention_multiplier": 0.1, "logits_scaling": 4.0},
                    q8_0, {"permutes": True, "more": granite}),
    "smollm3": Case("smollm3", "SmolLM3", THETA, q8_0, PAIRS),
    "seed_oss": Case("seed_oss", "SeedOss", {"head_dim": 64, "attention_bias": True}, q8_0),
    "starcoder2": Case("starcoder2", "Starcoder2", {"sliding_window": None}, q8_0,
                       {"more": lambda writer: writer.add_layer_norm_eps(1e-5)}),
    "stablelm": Case("stablelm", "StableLm", HALF, q8_0, {"more": turning(32, eps=1e-5)}),
    "nemotron": Case("nemotron", "Nemotron", HALF, q8_0, {"plus_one": True, "more": turning(32, eps=1e-5)}),
    "glm4": Case("glm4", "Glm4", {**HALF, "head_dim": 64}, q4_k_m, {"more": turning(32)}),
    "cohere": Case("command-r", "Cohere", {"logit_scale": 0.5}, q8_0,
                   {"more": lambda writer: (writer.add_layer_norm_eps(1e-5), writer.add_logit_scale(0.5))}),
    "cohere2": Case("cohere2", "Cohere2", {"logit_scale": 0.5, "sliding_window": 16}, q8_0,
                    {"more": lambda writer: (writer.add_layer_norm_eps(1e-5), writer.add_logit_scale(0.5),
                                             writer.add_sliding_window(16))}),
    "mixtral": Case("llama", "Mixtral", {"num_local_experts": 4, "sliding_window": None}, q4_k_m,
                    {"permutes": True, "more": experts}),
    "qwen2moe": Case("qwen2moe", "Qwen2Moe", {**EXPERTS, "norm_topk_prob": False}, q8_0, {"more": experts}),
    "qwen3moe": Case("qwen3moe", "Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 64}, q4_k_m,
                     {"more": experts}),
    "gpt-oss": Case("gpt-oss", "GptOss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "head_dim": 64,
        "sliding_window": 12, "tie_word_embeddings": False, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        mxfp4, {"more": gpt_oss}),
    "deepseek-v2": Case("deepseek2", "DeepseekV2", V2, q8_0, {"more": deepseek(sigmoid=False)}),
    "deepseek-v2, an older file": Case("deepseek2", "DeepseekV2", V2, q8_0, {
        "more": deepseek(sigmoid=False, latents=False), "splits_latents": False}),
    "deepseek-v3": Case("deepseek2", "DeepseekV3", V3, q4_k_m_of_latents, {"more": deepseek(sigmoid=True)}),
    "gpt2": Case("gpt2", "GPT2", {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256}, q4_k_m,
                 {"more": lambda writer: writer.add_layer_norm_eps(1e-5)}),
}  # fmt: skip


def make(case: Case, path: Path) -> Any:
    """Write the file, and return transformers' model with its weights."""
    torch.manual_seed(0)
    head = {"GPT2": "GPT2LMHeadModel"}.get(case.model, f"{case.model}ForCausalLM")
    shapes = {"vocab_size": 301} if case.model == "GPT2" else SHAPES
    kind = f"{case.model}TextConfig" if case.model in ("Gemma3", "Gemma4") else f"{case.model}Config"
    config_class = getattr(transformers, kind)
    config = config_class(**{**shapes, **case.values})
    config._attn_implementation = "eager"
    model = getattr(transformers, head)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):  # norms and biases that are not what they begin as
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return write(model, case.architecture, path, case.kinds, **case.written)


def test_every_architecture_that_is_read_has_a_case() -> None:
    assert {name.split()[0] for name in ARCHITECTURES} == {case.architecture for case in CASES.values()}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make(CASES[name], path)
    config = Config().with_values(model={"path": str(path)}, engine={"device": "cpu"}, cache={"num_blocks": 16})
    executor = build_executor(config)
    executor.load(lambda phase, share: None)
    ids = torch.randint(0, 301, (60,)).tolist()
    ours = Probe(executor).logits(ids)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    executor.close()
    assert (ours - theirs).abs().max() < 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_how_deepseek_chooses_experts_is_what_the_file_says(tmp_path: Path) -> None:
    for name in ("deepseek-v2", "deepseek-v3"):
        make(CASES[name], tmp_path / f"{name}.gguf")
    v2, v3 = (registry.read_model_config(tmp_path / f"deepseek-{name}.gguf")[0].moe for name in ("v2", "v3"))
    assert v2 is not None
    assert v3 is not None
    assert (v2.sigmoid, v2.renormalized, v2.factor, v2.groups, v2.dense_layers) == (False, False, 2.5, None, (0,))
    assert (v3.sigmoid, v3.renormalized, v3.factor, v3.groups, v3.dense_layers) == (True, True, 2.5, (2, 1), (0,))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rope.scaling.yarn_log_multiplier", "has no rope.scaling.yarn_log_multiplier"),
        ("attention.kv_lora_rank", "deepseek2.attention.kv_lora_rank"),
        ("rope.dimension_count", "deepseek2.rope.dimension_count"),
    ],
)
def test_what_latent_attention_needs_is_named(key: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(CASES["deepseek-v2"], path)
    path.write_bytes(path.read_bytes().replace(f"deepseek2.{key}".encode(), f"deepseek2.{key[:-1]}X".encode()))
    with pytest.raises(ConfigError) as error:
        registry.read_model_config(path)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sliding_window_pattern": [True, False]}, "sliding_window_pattern does not say of each of 5 layers"),
        ({"head_count_kv": [2, 1, 1, 2, 1]}, "layers of one kind of attention differ in size"),
        ({"head_count_kv": [2, 2, 1, 2]}, "head_count_kv is no list of 5 whole numbers"),
        ({"feed_forward_length": [512, 512, 512, 600, 600]}, "layers of one kind of attention differ in size"),
    ],
)
def test_what_differs_between_layers_of_gemma_4_is_what_it_may(
    changed: dict[str, list[int]], message: str, tmp_path: Path
) -> None:
    path, (more, *_) = tmp_path / "model.gguf", CASES["gemma4, E2B"].written.values()
    writer = gguf.GGUFWriter(path, "gemma4")
    for name, value in {"block_count": 5, "embedding_length": 256, "head_count": 4}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((301, 256), dtype=np.float32))
    more(writer)
    for name, value in changed.items():
        getattr(writer, f"add_{name}")(value)
    finish_writer(writer)
    with pytest.raises(ConfigError) as error:
        registry.read_model_config(path)
    assert message in error.value.message


def test_gpt_oss_computes_what_its_safetensors_compute(tmp_path: Path) -> None:
    """The same codes in MXFP4 and the same numbers, as the file has them and as they are published."""
    config = GPT_OSS.config, {**GPT_OSS.values, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    model = write_mxfp4(model_of(*config), tmp_path)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(model.config.num_local_experts)
        writer.add_expert_used_count(model.config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(model.config.intermediate_size)
        writer.add_sliding_window(model.config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def kinds(name: str, shape: tuple[int, ...]) -> str:
        return "MXFP4" if "exps" in name else "F32"

    write(model, "gpt-oss", tmp_path / "model.gguf", kinds, more=more)
    ids, found = torch.randint(0, model.config.vocab_size, (50,)).tolist(), []
    for path in (tmp_path, tmp_path / "model.gguf"):
        values = Config().with_values(model={"path": str(path)}, engine={"device": "cpu"}, cache={"num_blocks": 16})
        executor = build_executor(values)
        executor.load(lambda phase, share: None)
        found.append(Probe(executor).logits(ids))
        executor.close()
    assert (found[0] - found[1]).abs().max() < 1e-6


def test_an_answer_of_gpt_oss_ends_at_a_call_too(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        gpt_oss(writer)
        names = {290: "<|return|>", 291: "<|call|>", 292: "<|end|>"}
        writer.add_token_list([names.get(number, f"t{number}") for number in range(301)])
        writer.add_eos_token_id(290)

    path = tmp_path / "model.gguf"
    make(CASES["gpt-oss"]._replace(written={"more": more}), path)
    assert eos_token_ids(read_gguf(path)) == [290, 291]


def test_each_rank_takes_its_part_of_the_blocks(tmp_path: Path) -> None:
    case, path = CASES["llama"], tmp_path / "model.gguf"
    model = make(case._replace(values={**case.values, "hidden_size": 512, "intermediate_size": 1024}), path)
    values, (whole, family) = read_json(path / "config.json"), registry.read_model_config(path)
    names = family.weight_map(whole)
    state, attention = model.state_dict(), "model.layers.0.self_attn."
    for rank in range(2):
        shard = Shard(rank, 2)
        with torch.device("meta"):
            ours = family.build(REFERENCE, shard.divide(whole))
            divide(ours, whole, shard)
        quantize(ours, REFERENCE, values, names.targets, scheme="none", device=torch.device("cpu"))
        load_weights(ours, names, path, dtype=torch.float32, device=torch.device("cpu"))
        finish(ours)
        projections = [state[f"{attention}{name}_proj.weight"].chunk(2)[rank] for name in "qkv"]
        qkv, down = ours.layers[0].attention.qkv.packed, ours.layers[0].mlp.down.packed
        assert torch.equal(torch.cat([numbers(part, 0, part.shape[0]) for part in qkv.parts]), torch.cat(projections))
        expected = state["model.layers.0.mlp.down_proj.weight"].chunk(2, 1)[rank]
        assert torch.equal(numbers(down.parts[0], 0, 512), expected)


def test_each_rank_holds_its_experts_packed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    case = CASES["qwen3moe"]
    model = make(case._replace(values={**case.values, "head_dim": 128}), path)
    (whole, family), state = registry.read_model_config(path), model.state_dict()
    names, values = family.weight_map(whole), read_json(path / "config.json")
    for rank in range(2):
        shard = Shard(rank, 2)
        with torch.device("meta"):
            ours = family.build(REFERENCE, shard.divide(whole))
            divide(ours, whole, shard)
        quantize(ours, REFERENCE, values, names.targets, scheme="none", device=torch.device("cpu"))
        load_weights(ours, names, path, dtype=torch.float32, device=torch.device("cpu"))
        finish(ours)
        for projection, stored in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            packed = getattr(ours.layers[0].mlp.packed, projection)
            assert all(isinstance(expert, ExpertBlocks) for expert in packed)
            found = torch.stack([torch.cat([numbers(part, 0, 256) for part in expert.parts]) for expert in packed])
            assert torch.equal(found, state[f"model.layers.0.mlp.experts.{stored}"].chunk(2)[rank])


def test_a_block_that_ranks_would_cut_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(CASES["llama"], path)
    config = Config().with_values(model={"path": str(path)}, engine={"device": "cpu", "tensor_parallel": 2})
    with pytest.raises(ConfigError) as error:
        load_model(executor_settings(config), REFERENCE, lambda phase, share: None)
    assert "the blocks of 256 weights of model.layers.0.self_attn.o_proj.weight do not divide" in error.value.message


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt-oss"])
def test_the_plan_counts_what_the_file_holds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(CASES[name], path)
    stored = sum(info.num_bytes for info in read_gguf(path).tensors.values())
    config, _ = registry.read_model_config(path)
    assert weight_bytes(config, read_json(path / "config.json"), torch.float32) == pytest.approx(stored, rel=1e-3)


@pytest.mark.parametrize(("name", "head"), [("llama", "output.weight"), ("qwen3", "token_embd.weight")])
def test_the_roofline_counts_a_packed_head_once(name: str, head: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(CASES[name], path)
    config = Config().with_values(
        model={"path": str(path)},
        engine={"device": "cpu", "peak_gb_per_s": 20.0, "peak_tflops": 0.2},
        cache={"num_blocks": 16},
    )
    executor = build_executor(config)
    executor.load(lambda phase, share: None)
    roofline = executor.roofline()
    executor.close()
    assert roofline is not None
    tensors = read_gguf(path).tensors
    others = sum(info.num_bytes for key, info in tensors.items() if key not in ("output.weight", "token_embd.weight"))
    assert roofline.work.head_bytes == pytest.approx(tensors[head].num_bytes, rel=0.03), "scales take more when packed"
    assert roofline.work.layer_bytes == pytest.approx(others, rel=0.03)


def test_a_conversation_with_nothing_but_the_file(tmp_path: Path) -> None:
    tokenizer, path = byte_level(""), tmp_path / "model.gguf"
    case = CASES["llama"]
    values = {**case.values, "vocab_size": tokenizer.get_vocab_size()}
    make(case._replace(values=values, written={**PAIRS, "more": lambda writer: add_tokenizer(writer, tokenizer)}), path)
    with LLM(str(path), cache={"num_blocks": 16}) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=4, ignore_eos=True))
    assert list(answer.prompt_ids) == tokenizer.encode("<|begin|>user: hello").ids
    assert len(answer.choices[0].token_ids) == 4


def test_random_weights_take_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(CASES["llama, older formats"], path)
    config = Config().with_values(
        model={"path": str(path), "load_format": "dummy"}, engine={"device": "cpu"}, cache={"num_blocks": 16}
    )
    executor = build_executor(config)
    executor.load(lambda phase, share: None)
    logits = Probe(executor).logits([1, 2, 3])
    executor.close()
    assert logits.isfinite().all()
