"""Small random checkpoints of every family, saved by transformers in the ordinary layout, at awkward shapes."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TIED = {"tie_word_embeddings": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
GEMMA3 = {
    **SHAPES,
    "num_hidden_layers": 5,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": False,
}

# name -> (transformers' config class, its values)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPES),
    "llama-tied-biases": ("LlamaConfig", {**SHAPES, **TIED, "attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("LlamaConfig", {**SHAPES, **_rope("linear", factor=2.5)}),
    "llama-dynamic-rope": ("LlamaConfig", {**SHAPES, **_rope("dynamic", factor=2.0)}),
    "llama3-rope": ("LlamaConfig", {**SHAPES, **LLAMA3}),
    "llama-yarn-rope": ("LlamaConfig", {**SHAPES, **YARN}),
    "mistral-window": ("MistralConfig", {**SHAPES, "sliding_window": 12}),
    "qwen2": ("Qwen2Config", {**SHAPES, "hidden_size": 60, "head_dim": 10, **TIED}),
    "qwen2-mixed-window": ("Qwen2Config", {**SHAPES, "hidden_size": 60, "head_dim": 10, **SLIDING}),
    "qwen3": ("Qwen3Config", {**SHAPES, **TIED}),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gemma3-softcap": ("Gemma3TextConfig", {**GEMMA3, "final_logit_softcapping": 15.0}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 301, "n_embd": 54, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.25,
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
}  # fmt: skip


def make_model(name: str, **changes: Any) -> Any:
    """Make transformers' model with seeded random weights, eager attention, fp32."""
    class_name, values = FAMILIES[name]
    return model_of(class_name, {**values, **changes})


def model_of(class_name: str, values: dict[str, Any]) -> Any:
    """Make a model as `make_model` does, of a config class of transformers and its values."""
    config = getattr(transformers, class_name)(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        # Norms and biases start as ones and zeros: too easy. With routers of zeros a device chooses among ties.
        if parameter.dim() == 1 or not parameter.any():
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros too
            buffer.copy_(torch.randn(buffer.shape) * 0.2)
        if name.endswith("layer_scalar"):  # ones
            buffer.uniform_(0.6, 1.4)
    for module in model.modules():
        if hasattr(module, "alpha") and "swiglu_alpha" in values:  # transformers 5.17 has constants here
            module.alpha, module.limit = values["swiglu_alpha"], values["swiglu_limit"]
    return model


def save(model: Any, folder: Path, *, shard_size: str = "5GB") -> Path:
    """Write a checkpoint as transformers does."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load(folder: Path) -> Any:
    """Load a checkpoint by transformers, in fp32."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy_reference(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return what transformers draws greedily after each prefix of prompt + output, everything recomputed without a
    cache.

    Equal to `output` only if `output` is transformers' own greedy output, by induction over its tokens.
    """
    logits = logits_reference(model, prompt + output[:-1])
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def logits_reference(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the logits [T, V] of every position."""
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0]
