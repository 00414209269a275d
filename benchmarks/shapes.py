"""config.json of the models that the benchmarks name, so that speed can be measured without their weights.

python -m benchmarks.shapes FOLDER NAME ...     writes FOLDER/NAME with config.json and a tokenizer for each; with
                                                --weights random weights too, under the names of the published files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferengine.config.model_path import EMBEDDED

if TYPE_CHECKING:  # torch, which some processes of benchmarks must lack
    import torch

EMBEDDED_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_1_70B = {
    **LLAMA_3_1_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_32B = {
    **QWEN3_14B, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600,
}  # fmt: skip

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
QWEN2_5_0_5B = {
    **QWEN2_5_7B, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3_2_1B = {
    **LLAMA_3_1_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
}  # fmt: skip
QWEN2_5_1_5B = {
    **QWEN2_5_0_5B, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
}  # fmt: skip
QWEN2_5_3B = {
    **QWEN2_5_0_5B, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
}  # fmt: skip
LLAMA_3_2_3B = {
    **LLAMA_3_2_1B, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128,
}  # fmt: skip
QWEN3_4B = {
    **QWEN3_0_6B, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
SMOLLM2_1_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 130000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
PHI_3_MINI = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 2047, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
STABLELM_3B = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": 50304, "hidden_size": 2560,
    "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "rope_theta": 10000,
    "use_qkv_bias": False, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584,
    "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "bos_token_id": 2, "eos_token_id": [1, 106],
    "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 100257,
    "pad_token_id": 100277, "torch_dtype": "bfloat16",
}  # fmt: skip
GLM_4_9B = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096,
    "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE_3_3_8B = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": 49159, "hidden_size": 4096,
    "intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "rope_scaling": None,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22,
    "logits_scaling": 16.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "embedded": EMBEDDED_SHAPE,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-3.1-70b": LLAMA_3_1_70B,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "gpt-oss-20b": GPT_OSS_20B,
    "qwen2.5-7b": QWEN2_5_7B,
    "qwen3-14b": QWEN3_14B,
    "qwen3-32b": QWEN3_32B,
    "qwen2.5-0.5b": QWEN2_5_0_5B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "phi-3-mini": PHI_3_MINI,
    "stablelm-3b": STABLELM_3B,
    "gemma-2-9b": GEMMA_2_9B,
    "gemma-3-1b": GEMMA_3_1B,
    "qwen2.5-1.5b": QWEN2_5_1_5B,
    "qwen2.5-3b": QWEN2_5_3B,
    "llama-3.2-3b": LLAMA_3_2_3B,
    "qwen3-4b": QWEN3_4B,
    "smollm2-1.7b": SMOLLM2_1_7B,
    "olmo-2-7b": OLMO_2_7B,
    "glm-4-9b": GLM_4_9B,
    "granite-3.3-8b": GRANITE_3_3_8B,
}


def write_model(folder: Path, name: str) -> None:
    """Write config.json of a shape, and a tokenizer with a token for every id, to an existing folder.

    A shape that names no token that ends a text gets its last one: without it no grammar could end.
    """
    size = SHAPES[name]["vocab_size"]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": size - 1, **SHAPES[name]}))
    write_tokenizer(folder, size)


def servable_model(shape: str, scratch: Path) -> tuple[str, dict[str, str]]:
    """Return a model for `inferengine up` and the flags that load it: the embedded one, or random weights of a shape.

    A shape gets a folder in `scratch`.
    """
    if shape == "embedded":
        return str(EMBEDDED), {}
    folder = scratch / shape
    folder.mkdir()
    return str(write_dummy_model(shape, folder)), {"model.load_format": "dummy"}


def write_dummy_model(shape: str, folder: Path) -> Path:
    """Write what an engine with dummy weights reads: config.json, and a tokenizer of 256 bytes. Returns the folder."""
    from inferengine.bench.compare import with_tokenizer  # and torch, which some processes of benchmarks must lack

    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return with_tokenizer(folder, folder)


def write_weights(folder: Path, name: str, *, seed: int = 0) -> None:
    """Write random weights of a shape as safetensors, a file for each layer: normal with a deviation of 0.02, gains 1.

    So engines that are compared read the same numbers: with dummy weights each makes its own, and the routers of a
    mixture then send a step's tokens to many experts on one side and to few on the other. Matrices are made on a GPU
    where there is one.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(SHAPES[name])
    scheme = values.pop("quantization_config", None)
    if scheme not in (None, {"quant_method": "mxfp4"}):
        raise ValueError(f"{name}: weights in {scheme} are not written")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    tied = {"lm_head.weight"} if values.get("tie_word_embeddings") else set()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for place, parameter in model.state_dict().items():
        if place not in tied:
            parts = place.split(".")
            file = f"layer-{int(parts[2]):03}" if parts[1] == "layers" else "rest"
            files.setdefault(f"{file}.safetensors", {})[place] = parameter
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    weight_map: dict[str, str] = {}
    for file, shapes in sorted(files.items()):
        tensors = {
            published: tensor.cpu()
            for place, shape in shapes.items()
            for published, tensor in _published(place, shape, generator, is_mxfp4=scheme is not None)
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(place: str, shape: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make a random parameter in bfloat16: 1 where it is the gain of a norm."""
    import torch

    if place.endswith("norm.weight"):
        return torch.ones(shape.shape, dtype=torch.bfloat16)
    options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    return torch.randn(shape.shape, **options).mul_(0.02)


def _published(
    place: str, shape: torch.Tensor, generator: torch.Generator, *, is_mxfp4: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a random parameter of transformers' module under its names in published files. There each expert of a
    mixture has matrices of its own; those of GPT-OSS are MXFP4, 32 codes and a scale for each block of a row."""
    import torch

    stem, _, last = place.rpartition(".")
    if not stem.endswith("experts") or (is_mxfp4 and last.endswith("_bias")):
        yield place, _random(place, shape, generator)
    elif is_mxfp4:  # transformers has [expert, in, out], the files [expert, out, in]
        experts, columns, rows = shape.shape
        blocks = (experts, rows, columns // 32)
        options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.uint8}
        yield f"{place}_blocks", torch.randint(0, 256, (*blocks, 16), **options)
        yield f"{place}_scales", torch.full(blocks, 127 - 7, dtype=torch.uint8)  # 2^-7: codes are 0.5 to 6
    else:
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert, matrix in enumerate(_random(place, shape, generator)):
            for name, part in zip(names, matrix.chunk(len(names)), strict=True):
                yield f"{stem}.{expert}.{name}.weight", part.contiguous()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of bytes and fillers: a token for every id, so that grammars have a vocabulary."""
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    vocab = {letter: index for index, letter in enumerate(letters)}
    vocab |= {f"Ġx{index}": index for index in range(len(letters), vocab_size)}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text("{}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(SHAPES), metavar="NAME")
    parser.add_argument("--weights", action="store_true", help="random weights too")
    options = parser.parse_args()
    for name in options.names:
        (options.folder / name).mkdir(parents=True, exist_ok=True)
        write_model(options.folder / name, name)
        if options.weights:
            write_weights(options.folder / name, name)


if __name__ == "__main__":
    main()
