"""Unusual configurations of the dense families beside Llama's own, and one comparison with transformers for all."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inferengine.config import Config
from inferengine.executor.torch_executor import build_executor
from tests.executor.engine import Engine, Foreknowledge
from tests.models.checkpoints import SHAPES, logits_reference, model_of, save

BARE: dict[str, Any] = {**SHAPES, "num_hidden_layers": 2, "intermediate_size": 72}  # head_dim is not hidden / heads
EVEN: dict[str, Any] = {name: value for name, value in BARE.items() if name != "head_dim"} | {"hidden_size": 60}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4}}
WHOLE = {"rope_parameters": HALF["rope_parameters"] | {"partial_rotary_factor": 1.0}}
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
NEOX = {
    "vocab_size": 301, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 72,
    "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": 301, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_dim": 72,
    "max_position_embeddings": 256, "init_std": 0.25, "word_embed_proj_dim": 60,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def longrope(partial: float = 1.0) -> dict[str, Any]:
    count = int(10 * partial) // 2
    factors = {"short_factor": [1.0 + 0.05 * i for i in range(count)], "long_factor": [1.5 + i for i in range(count)]}
    values = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": partial, **factors}
    return {"rope_parameters": values, "original_max_position_embeddings": 32}


class Case(NamedTuple):
    """One configuration: transformers' config class, its values, what the engine's section `model` needs, and how far
    log-probabilities may be from transformers'."""

    config: str
    values: dict[str, Any]
    lengths: tuple[int, ...] = (3, 37, 17, 29)
    model: dict[str, Any] | None = None
    num_tokens: int = 16
    within: float = 1e-4


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "num_hidden_layers": 2}
QWEN_EXPERTS: dict[str, Any] = {**EXPERTS, "num_experts": 7, "moe_intermediate_size": 40}
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 12, "v_head_dim": 10}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 0}
GEMMA4 = {
    **BARE, "tie_word_embeddings": False, "num_hidden_layers": 4, "sliding_window": 12, "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
DELTA: dict[str, Any] = {  # of gated delta nets: heads of values two for each of keys, and narrower
    **BARE, "num_hidden_layers": 3, "initializer_range": 0.1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
TIE = 1e-5  # logits nearer than this are equal: an H100 and a CPU ordered two 4e-6 apart differently
LONG = (34, 33, 35)  # of prompts beyond longrope's original context
CASES: dict[str, Case] = {
    "phi3": Case("Phi3Config", {**EVEN, "sliding_window": 12}),
    "phi4-mini, long": Case("Phi3Config", {**EVEN, **longrope(0.8), "tie_word_embeddings": True}, LONG),
    "gemma": Case("GemmaConfig", {**BARE, "attention_bias": True}),
    "gemma2": Case("Gemma2Config", {**BARE, "sliding_window": 12, "query_pre_attn_scalar": 30,
                                    "tie_word_embeddings": False,
                                    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma4-e2b, layers that share keys": Case("Gemma4TextConfig", {
        **GEMMA4, "num_hidden_layers": 6, "num_key_value_heads": 1, "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 301, "final_logit_softcapping": 5.0}),
    "gemma4-26b, experts beside a block": Case("Gemma4TextConfig", {
        **GEMMA4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 7,
        "top_k_experts": 3, "moe_intermediate_size": 24}),
    "gemma4-12b": Case("Gemma4UnifiedTextConfig", {
        **GEMMA4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "attention_bias": True}),
    "olmo2": Case("Olmo2Config", {**EVEN}),
    "olmo3": Case("Olmo3Config", {**EVEN, "num_hidden_layers": 4, "sliding_window": 12, "rope_parameters": {
        "full_attention": {key: YARN[key] for key in list(YARN)[:4]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}),
    "granite": Case("GraniteConfig", {**EVEN, "embedding_multiplier": 3.0, "logits_scaling": 1.7,
                                      "residual_multiplier": 0.6, "attention_multiplier": 0.2, "mlp_bias": True}),
    "smollm3": Case("SmolLM3Config", {**EVEN, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "glm": Case("GlmConfig", {**BARE}),
    "glm4": Case("Glm4Config", {**BARE, **HALF}),
    "starcoder2": Case("Starcoder2Config", {**EVEN, "sliding_window": 12}),
    "stablelm": Case("StableLmConfig", {**EVEN, "qk_layernorm": True, "use_qkv_bias": True, **HALF}),
    "stablelm, parallel": Case("StableLmConfig", {**EVEN, "use_parallel_residual": True, **HALF}),
    "pythia": Case("GPTNeoXConfig", {**NEOX, **HALF}),
    "opt": Case("OPTConfig", OPT),
    "cohere": Case("CohereConfig", {**EVEN, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": Case("Cohere2Config", {**EVEN, "num_hidden_layers": 3, "sliding_window": 12, "logit_scale": 2.0,
                                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "seed-oss": Case("SeedOssConfig", {**BARE, "attention_out_bias": True}),
    "nemotron": Case("NemotronConfig", {**BARE, **HALF}),
    "mixtral": Case("MixtralConfig", {**BARE, **EXPERTS, "num_local_experts": 5, "sliding_window": 12}),
    "qwen3-moe": Case("Qwen3MoeConfig", {**BARE, **QWEN_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2,
                                         "mlp_only_layers": [3], "norm_topk_prob": True}),
    "qwen2-moe": Case("Qwen2MoeConfig", {**EVEN, **QWEN_EXPERTS, "shared_expert_intermediate_size": 56}),
    "olmoe": Case("OlmoeConfig", {**EVEN, **EXPERTS, "num_experts": 6, "num_key_value_heads": 3}),
    "granite-moe": Case("GraniteMoeConfig", {**EVEN, **EXPERTS, "num_local_experts": 6, "embedding_multiplier": 3.0,
                                             "logits_scaling": 1.7, "residual_multiplier": 0.6,
                                             "attention_multiplier": 0.2}),
    "gpt-oss": Case("GptOssConfig", {**BARE, **EXPERTS, "num_local_experts": 5, "sliding_window": 12,
                                     "swiglu_limit": 1.5, "swiglu_alpha": 1.3, "rope_parameters": {
                                         "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
                                         "original_max_position_embeddings": 16, "truncate": False}}),
    "deepseek-v2": Case("DeepseekV2Config", {**EVEN, **LATENT, **MIXTURE, "n_routed_experts": 6, "n_shared_experts": 2,
                                             "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
                                             "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": Case("DeepseekV2Config", {**EVEN, **LATENT, **MIXTURE, "q_lora_rank": None,
                                                  "n_routed_experts": 5, "rope_parameters": {
                                                      key: YARN[key] for key in YARN if "llama" not in key}}),
    "deepseek-v3": Case("DeepseekV3Config", {**EVEN, **LATENT, **MIXTURE, "n_routed_experts": 8, "n_group": 4,
                                             "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": {
                                                 **{key: YARN[key] for key in YARN if "llama" not in key},
                                                 "mscale_all_dim": 0.7}}),
    "ministral": Case("MinistralConfig", {**BARE, "sliding_window": 12,
                                          "layer_types": ["full_attention", "sliding_attention"]}),
    "ministral3": Case("Ministral3Config", {**BARE, "rope_parameters": YARN}),
}  # fmt: skip
MORE: dict[str, Case] = {  # for scripts/compare_families
    "deepseek-v2, biases": Case("DeepseekV2Config", {**EVEN, **LATENT, **MIXTURE, "n_routed_experts": 7,
                                                     "attention_bias": True, "mlp_bias": False}),
    "deepseek-v3, like kimi-k2": Case("DeepseekV3Config", {**EVEN, **LATENT, **MIXTURE, "n_routed_experts": 6,
                                                           "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-v3, halves, no query rank": Case("DeepseekV3Config", {**EVEN, **LATENT, **MIXTURE, "q_lora_rank": None,
                                                                    "n_routed_experts": 6, "n_group": 3,
                                                                    "topk_group": 2, "rope_interleave": False}),
    "phi3, plain": Case("Phi3Config", {**EVEN}),
    "phi3, short": Case("Phi3Config", {**EVEN, **longrope()}, (3, 9), {"max_model_len": 32}, 20),
    "phi3, long": Case("Phi3Config", {**EVEN, **longrope()}, LONG),
    "gemma, one kv head": Case("GemmaConfig", {**BARE, "num_key_value_heads": 1}),
    "gemma2, no caps": Case("Gemma2Config", {**BARE, "tie_word_embeddings": False, "sliding_window": 7,
                                             "attn_logit_softcapping": None,
                                             "final_logit_softcapping": None, "attention_bias": True}),
    "olmo2, biases": Case("Olmo2Config", {**EVEN, "attention_bias": True, "num_key_value_heads": 6}),
    "olmo3, windows alone": Case("Olmo3Config", {**EVEN, "sliding_window": 9, "tie_word_embeddings": True}),
    "granite, biases": Case("GraniteConfig", {**EVEN, "attention_bias": True, "tie_word_embeddings": True,
                                              "residual_multiplier": 0.22, "attention_multiplier": 0.5}),
    "smollm3, windows": Case("SmolLM3Config", {**EVEN, "num_hidden_layers": 4, "use_sliding_window": True,
                                               "sliding_window": 10, "no_rope_layer_interval": 2}),
    "glm, whole heads": Case("GlmConfig", {**BARE, **WHOLE, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4, no biases": Case("Glm4Config", {**BARE, "attention_bias": False, "num_key_value_heads": 3}),
    "starcoder2, no biases": Case("Starcoder2Config", {**EVEN, "use_bias": False, "tie_word_embeddings": False}),
    "stablelm, both": Case("StableLmConfig", {**EVEN, "qk_layernorm": True, "use_parallel_residual": True,
                                              "num_key_value_heads": 1, **HALF}),
    "pythia, serial": Case("GPTNeoXConfig", {**NEOX, "use_parallel_residual": False, "attention_bias": False,
                                             "hidden_act": "gelu_new", "tie_word_embeddings": True}),
    "opt, no biases": Case("OPTConfig", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "cohere, plain": Case("CohereConfig", {**EVEN, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2, published pattern": Case("Cohere2Config", {**EVEN, "num_hidden_layers": 5, "sliding_window": 6,
                                                         "attention_bias": True}),
    "seed-oss, no biases": Case("SeedOssConfig", {**BARE, "attention_bias": False, "mlp_bias": True}),
    "nemotron, biases": Case("NemotronConfig", {**EVEN, **WHOLE, "attention_bias": True, "mlp_bias": True}),
    "ministral, windows": Case("MinistralConfig", {**BARE, "sliding_window": 9}),
    "qwen3-moe, plain": Case("Qwen3MoeConfig", {**BARE, **QWEN_EXPERTS, "use_sliding_window": True,
                                                "sliding_window": 9, "attention_bias": True}),
    "qwen2-moe, windows": Case("Qwen2MoeConfig", {**EVEN, **QWEN_EXPERTS, "shared_expert_intermediate_size": 56,
                                                  "num_hidden_layers": 4, "use_sliding_window": True,
                                                  "sliding_window": 9, "max_window_layers": 3,
                                                  "norm_topk_prob": True, "qkv_bias": False}),
    "olmoe, renormalized": Case("OlmoeConfig", {**EVEN, **EXPERTS, "num_experts": 6, "norm_topk_prob": True,
                                                "tie_word_embeddings": True}),
    "gemma4-31b, heads of 512": Case("Gemma4TextConfig", {
        **GEMMA4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        within=1e-3),  # scores of 512 products at scale 1: a last digit of the angles moves the reference by 2e-4
    "gemma4-e4b, published pattern": Case("Gemma4TextConfig", {
        **{key: value for key, value in GEMMA4.items() if key != "layer_types"}, "num_hidden_layers": 12,
        "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 301}),
    "falcon3": Case("LlamaConfig", {**BARE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}),
}  # fmt: skip


def prompts_of(case: Case, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(301) for _ in range(length)] for length in case.lengths]


def compare(
    folder: Path,
    model: Any,
    case: Case,
    *,
    seed: int = 1,
    device: str = "cpu",
    budget: int = 16,
    build: Callable[[Config], Any] = build_executor,
) -> Engine:
    """Generate in chunks, from a pool so small that requests are preempted; then again with prefixes cached and draft
    tokens, some of them wrong. Assert that every token and the 20 best log-probabilities of each are transformers'; of
    two tokens whose logits a last digit of fp32 orders, either one. On a card steps are CUDA graphs. `build` makes the
    executor."""
    prompts, proposer = prompts_of(case, seed), Foreknowledge()
    options: dict[str, Any] = {"proposer": proposer, "max_drafts": 3, "build": build}
    engine = Engine(folder, budget=budget, num_blocks=16, model=case.model, device=device, **options)
    if device != "cpu":
        engine.executor.warm_up(lambda phase, share: None)
    try:
        first = engine.generate(prompts, case.num_tokens)
        proposer.texts += [[*prompt, *output] for prompt, output in zip(prompts, first, strict=True)]
        again = [engine.submit(prompt, case.num_tokens, logprobs=20) for prompt in reversed(prompts)][::-1]
        engine.run()
        assert max(len(set(tokens)) for tokens in first) >= 6, "the model repeats itself: parity would prove little"
        for prompt, output, uid in zip(prompts, first, again, strict=True):
            logits = logits_reference(model, prompt + output[:-1])[len(prompt) - 1 :]
            behind = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
            assert float(behind.max()) < TIE, f"{output} where {logits.argmax(-1).tolist()} is due"
            assert engine.outputs[uid] == output, f"{engine.outputs[uid]} the second time, {output} the first"
            best = logits.log_softmax(-1).topk(20).values
            found = torch.tensor([item.top_logprobs for item in engine.logprobs[uid]])
            difference = float((found - best).abs().max())
            assert difference < case.within, f"log-probabilities differ by {difference}"
            engine.largest_difference = max(engine.largest_difference, difference)
        assert (engine.core.scheduler.snapshot().num_drafts_accepted > 0) is not engine.capacity.has_states
    except BaseException:
        engine.executor.close()
        raise
    return engine


def engine_of(case: Case, folder: Path, **values: Any) -> tuple[Any, Engine]:
    """Return transformers' model of a case with random weights, and an engine with it; `values`: of its
    configuration."""
    model = model_of(case.config, case.values)
    return model, Engine(save(model, folder), **values)


def error_of_logprobs(prompt: list[int], model: Any, engine: Engine) -> float:
    """Return the largest difference of the 20 best log-probabilities after a prompt from transformers'."""
    uid = engine.submit(prompt, 1, logprobs=20)
    engine.run()
    expected = logits_reference(model, prompt)[-1].log_softmax(-1).topk(20).values
    return float((torch.tensor(engine.logprobs[uid][0].top_logprobs) - expected).abs().max())
