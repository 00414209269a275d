"""Presents a GGUF file as a transformers checkpoint: config.json from its metadata, and tensors by their usual names.

The names are those that the families of inferengine/models read. llama.cpp's converters reorder the rows of q and k for
architectures whose rotation works on neighbouring elements, add 1 to Gemma's norms, and store all experts of a layer as
one tensor. `Source` says how to undo this for each tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from inferengine.gguf.reader import GgufFile, TensorInfo, mapped, read_gguf, refused

FLOATS = ("F32", "F16", "BF16")
PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
EXPERTS_ALONE = "MXFP4"  # read for experts only: other products have no kernels for it
NEAREST_TYPE = {
    "Q2_K": "Q4_K_M", "Q3_K": "Q4_K_M", "IQ": "Q4_K_M", "TQ": "Q4_K_M", "MXFP4": "the model's own checkpoint in MXFP4",
    "Q8_1": "Q8_0", "Q8_K": "Q8_0",
}  # fmt: skip


class Source(NamedTuple):
    """Where a tensor of the checkpoint comes from.

    `number`: index of the matrix or row in `info`, if that holds several. `heads`: rows are reordered within so many
    heads; 0: they are not. `transpose`: the checkpoint stores the matrix as [in, out]. `values`: of latent attention
    the matrices of the heads' values [H, V, R], where `info` has those of their keys, transposed [H, R, N]; the
    checkpoint has both in one [H * (N + V), R], by head. `half`: the first (0) or second (1) half of the matrix's rows;
    None: all of them.
    """

    info: TensorInfo
    number: int | None = None
    heads: int = 0
    transpose: bool = False
    values: TensorInfo | None = None
    half: int | None = None

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensors of the file."""
        return (self.info,) if self.values is None else (self.info, self.values)

    @property
    def piece(self) -> tuple[int, int]:
        """Return into how many pieces of equal size the file's tensor is divided, and the index of this one."""
        count, index = (1, 0) if self.number is None else (self.info.shape[0], self.number)
        return (count, index) if self.half is None else (2 * count, 2 * index + self.half)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of this piece in the file."""
        shape = self.info.shape if self.number is None else self.info.shape[1:]
        return shape if self.half is None else (shape[0] // 2, *shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        if self.values is not None:
            heads, rank, plain = self.info.shape
            return heads * (plain + self.values.shape[1]), rank
        shape = self.stored_shape
        if self.info.name.endswith("ffn_gate_inp_shexp.weight"):  # one row, stored as a vector
            return (1, shape[-1])
        return shape[::-1] if self.transpose else shape


class Architecture(NamedTuple):
    """How a value of `general.architecture` maps to a family.

    `layer` replaces names of LAYER. `values(metadata)` returns further keys of config.json, `sizes(metadata)` all of a
    model whose sizes have other names or differ from layer to layer. `rotates_pairs`: the rows of q and k are stored
    reordered.
    """

    name: str  # of the family
    model_type: str
    rotates_pairs: bool = False
    layer: Mapping[str, str] = MappingProxyType({})
    values: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    eps: str = "rms_norm_eps"  # name of the norms' epsilon in config.json
    partial: bool = False  # rope.dimension_count may be less than the size of a head
    outside: Mapping[str, str] = MappingProxyType({})  # names of tensors outside of layers
    prefix: str = "model.layers."
    transposed: tuple[str, ...] = ()  # layers whose weights the checkpoint stores as [in, out]
    rope: Mapping[str, Any] = MappingProxyType({})  # settings of YaRN that llama.cpp's metadata lacks
    ends: tuple[str, ...] = ()  # tokens that end an answer, in addition to those that the metadata names
    latent: bool = False  # latent attention: what turns is rope.dimension_count, of which `rope` is all
    sizes: Callable[[Metadata], dict[str, Any]] | None = None
    scales: Mapping[str, str] = MappingProxyType({})  # names in a layer of the tensors `NAME.scale`


OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA4 = {
    **GEMMA_NORMS,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.{}",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
HALVES = {"ffn_gate_up_exps": ("gate_proj", "up_proj")}  # of the rows of each expert's matrix
OLMO_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
MOST_SOURCES = 1 << 20  # tensors of a checkpoint: a hostile file could announce one for each of its bytes
# Parameters that a checkpoint names without "weight" or "bias".
PLAIN = ("attn_sinks", "exp_probs_b", "layer_output_scale")
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
NUMBERS = ".kv_b_proj.weight"  # ends the name of what attention takes apart: it is held as numbers
SIGMOID = 2  # expert_gating_func
BUFFERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read for config.json


class Metadata:
    """The metadata of a file. Keys are given without the prefix of the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.value("general.architecture", str, ""))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a count. Some files have a list with one for each layer; all its items must be the same."""
        name = f"{self.architecture}.{key}"
        found = self.file.metadata.get(name)
        if isinstance(found, list) and found and all(item == found[0] for item in found) and type(found[0]) is int:
            return found[0]
        if isinstance(found, list):
            raise refused(self.file.path, f"{name} differs from layer to layer", "no family here has such layers")
        return self.file.integer(name, default)

    def integers(self, key: str) -> list[int]:
        """Return a count for each layer, of a list or of one for all. Raises ConfigError."""
        name, layers = f"{self.architecture}.{key}", self.integer("block_count")
        if isinstance(self.file.metadata.get(name), int):
            return [self.integer(key)] * layers
        found: list[int] = self.file.value(name, list, [])
        if len(found) != layers or any(type(item) is not int for item in found):
            raise refused(self.file.path, f"{name} is no list of {layers} whole numbers, one for each layer")
        return found

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number, the default where it is absent."""
        found = self.file.value(f"{self.architecture}.{key}", (int, float), default)
        return None if found is None else float(found)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return bool(self.file.value(f"{self.architecture}.{key}", bool, default))

    def text(self, key: str) -> str | None:
        """Return a text."""
        found: str | None = self.file.value(f"{self.architecture}.{key}", str)
        return found

    def has(self, tensor: str) -> bool:
        """Return whether the first layer, or the file, has this tensor."""
        return f"blk.0.{tensor}" in self.file.tensors or tensor in self.file.tensors

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        default = self.integer("embedding_length") // max(1, self.integer("attention.head_count"))
        return self.integer("attention.key_length", default)


def _some(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    whole = metadata.integer("block_count") == 46  # the 27B scales scores by hidden size / heads, not by head size
    heads = metadata.integer("attention.head_count")
    return _some(
        query_pre_attn_scalar=metadata.integer("embedding_length") // heads if whole else metadata.head_dim,
        attn_logit_softcapping=metadata.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=metadata.number("final_logit_softcapping", 30.0),
        sliding_window=metadata.integer("attention.sliding_window", 4096),
        hidden_act="gelu_pytorch_tanh",
    )


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    whole = metadata.integer("block_count") == 62  # as above
    heads = metadata.integer("attention.head_count")
    return _some(
        query_pre_attn_scalar=metadata.integer("embedding_length") // heads if whole else metadata.head_dim,
        final_logit_softcapping=metadata.number("final_logit_softcapping"),
        sliding_window=metadata.integer("attention.sliding_window", 1024),
        sliding_window_pattern=metadata.integer("attention.sliding_window_pattern", 6),
        rope_local_base_freq=metadata.number("rope.freq_base_swa", 10_000.0),
    )


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    """Return Gemma 4's sizes, of which layers with a sliding window and those with full attention have their own."""
    layers, file = metadata.integer("block_count"), metadata.file
    pattern = file.value(f"{metadata.architecture}.attention.sliding_window_pattern", list)
    if not pattern or len(pattern) != layers or any(type(each) is not bool for each in pattern):
        raise refused(file.path, f"attention.sliding_window_pattern does not say of each of {layers} layers what it is")
    full = [layer for layer, is_sliding in enumerate(pattern) if not is_sliding]
    sliding = [layer for layer, is_sliding in enumerate(pattern) if is_sliding] or full
    widths, kv_heads = metadata.integers("feed_forward_length"), metadata.integers("attention.head_count_kv")
    alike = all(len({kv_heads[layer] for layer in group}) == 1 for group in (full, sliding))
    if not full or not alike or set(widths) - {widths[0], 2 * widths[0]}:
        raise refused(file.path, "its layers of one kind of attention differ in size", "no published Gemma 4 has such")
    turns = _floats(file, "rope_freqs.weight")  # divisors of frequencies: 1, and 1e30 of elements that do not turn
    per_layer = file.tensors.get("per_layer_token_embd.weight")
    experts = metadata.integer("expert_count", 0)
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_key_value_heads": kv_heads[sliding[0]],
        "num_global_key_value_heads": kv_heads[full[0]],
        "head_dim": metadata.integer("attention.key_length_swa", metadata.head_dim),
        "global_head_dim": metadata.head_dim,
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": sum(turn < LEAST_STILL for turn in turns) / len(turns) if turns else 1.0,
            },
        },
        **_some(
            final_logit_softcapping=metadata.number("final_logit_softcapping"),
            vocab_size_per_layer_input=per_layer.shape[0] if per_layer is not None else None,
        ),
        **(
            {
                "enable_moe_block": True,
                "num_experts": experts,
                "top_k_experts": metadata.integer("expert_used_count"),
                "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            }
            if experts
            else {}
        ),
    }  # fmt: skip


LEAST_STILL = 1e20  # of the divisors of frequencies, from which on nothing turns


def _granite(metadata: Metadata) -> dict[str, Any]:
    return _some(
        embedding_multiplier=metadata.number("embedding_scale", 1.0),
        residual_multiplier=metadata.number("residual_scale", 1.0),
        attention_multiplier=metadata.number("attention.scale", metadata.head_dim**-0.5),
        logits_scaling=metadata.number("logit_scale", 1.0),
    )


def _cohere(metadata: Metadata) -> dict[str, Any]:
    return _some(logit_scale=metadata.number("logit_scale"), use_qk_norm=metadata.has("attn_q_norm.weight"))


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    pattern = metadata.integer("attention.sliding_window_pattern", 4)
    window = metadata.integer("attention.sliding_window", 4096)
    return _some(logit_scale=metadata.number("logit_scale"), sliding_window=window, sliding_window_pattern=pattern)


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    return {
        "use_qkv_bias": metadata.has("attn_q.bias"),
        "use_parallel_residual": metadata.flag("use_parallel_residual", not metadata.has("ffn_norm.weight")),
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
    }


def _moe(metadata: Metadata, size: str = "expert_feed_forward_length") -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer(size, metadata.integer("feed_forward_length", 1)),
        "norm_topk_prob": True,
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length")
    return {**_moe(metadata), "shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window", 128),
        "interleaved_experts": False,
    }


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    """Return DeepSeek's sizes. In files since 2025 key_length is what the cache holds, and key_length_mla the heads'
    own."""
    turning = metadata.integer("rope.dimension_count")
    key = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length", 0))
    value = metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length", 0))
    rank = metadata.integer("attention.q_lora_rank", 0)
    groups, is_sigmoid = metadata.integer("expert_group_count", 1), _has_sigmoids(metadata)
    if metadata.number("attention.temperature_scale") is not None:
        raise refused(metadata.file.path, "attention.temperature_scale is not supported with latent attention")
    return {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": rank or None,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": round(metadata.number("expert_weights_scale", 1.0) or 1.0, 6),  # from fp32
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "topk_method": "noaux_tc" if is_sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count", groups),
        **({"num_nextn_predict_layers": 0} if is_sigmoid else {}),
    }


def _has_sigmoids(metadata: Metadata) -> bool:
    """Return whether experts are chosen by sigmoids. Files of DeepSeek-V2 do not say how."""
    return metadata.integer("expert_gating_func", 1) == SIGMOID


def _window(metadata: Metadata) -> dict[str, Any]:
    """Return Phi-3's and StarCoder's window, where a file names one that is shorter than the context."""
    window = metadata.integer("attention.sliding_window", 0)
    return {"sliding_window": window if 0 < window < metadata.integer("context_length") else None}


def _gpt2_sizes(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of a model under GPT-2's own names."""
    return {
        "n_embd": metadata.integer("embedding_length"),
        "n_head": metadata.integer("attention.head_count"),
        "n_layer": metadata.integer("block_count"),
        "n_positions": metadata.integer("context_length"),
        "n_inner": metadata.integer("feed_forward_length"),
        "activation_function": "gelu_new",
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", rotates_pairs=True),
    "llama with experts": Architecture(
        "MixtralForCausalLM", "mixtral", rotates_pairs=True, layer=MIXTRAL,
        values=lambda m: {
            "num_local_experts": m.integer("expert_count"), "num_experts_per_tok": m.integer("expert_used_count")
        },
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", values=_qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", values=_moe),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", layer={"ffn_up": "mlp.gate_up_proj"}, values=_window, partial=True
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", values=lambda m: {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", layer=GEMMA_NORMS, values=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", layer=GEMMA_NORMS, values=_gemma3),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "gemma4_text", layer=GEMMA4, sizes=_gemma4,
        outside={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        scales={"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", layer=OLMO_NORMS),
    "granite": Architecture("GraniteForCausalLM", "granite", rotates_pairs=True, values=_granite),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", rotates_pairs=True),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", layer={**GLM_NORMS, "ffn_up": "mlp.gate_up_proj"}, partial=True,
        values=lambda m: {"attention_bias": m.has("attn_q.bias")},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", layer={"post_attention_norm": "post_attention_layernorm"},
        values=lambda m: {
            "attention_bias": m.has("attn_q.bias"), "attention_out_bias": m.has("attn_output.bias")
        },
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", eps="layer_norm_eps", values=_cohere
    ),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", eps="layer_norm_eps", values=_cohere2),
    "nemotron": Architecture(
        "NemotronForCausalLM", "nemotron", eps="norm_eps", partial=True, values=lambda m: {"hidden_act": "relu2"}
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", eps="norm_epsilon",
        layer={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        values=lambda m: {"use_bias": m.has("attn_q.bias"), "hidden_act": "gelu_pytorch_tanh"},
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", "stablelm", eps="layer_norm_eps", partial=True, values=_stablelm,
        layer={
            "attn_q_norm": "self_attn.q_layernorm.norms.{}", "attn_k_norm": "self_attn.k_layernorm.norms.{}"
        },
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "gpt_oss", values=_gpt_oss, rope={"truncate": False},
        layer={
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", "deepseek_v2", layer=LATENT, values=_deepseek, latent=True
    ),
    "deepseek2 with sigmoids": Architecture(
        "DeepseekV3ForCausalLM", "deepseek_v3", layer=LATENT, values=_deepseek, latent=True
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "gpt2", eps="layer_norm_epsilon", prefix="h.", sizes=_gpt2_sizes,
        outside={"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"},
        layer={
            "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        },
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}  # fmt: skip
LIKE = 0.5  # share of letters that two names have in common at least, to be called near


def architecture_of(file: GgufFile) -> Architecture:
    """Return how a file's architecture is read. Raises ConfigError naming one that is not."""
    metadata = Metadata(file)
    name = metadata.architecture
    if not name:
        raise refused(file.path, "its metadata has no general.architecture: it holds no language model")
    if name == "llama" and metadata.integer("expert_count", 0):
        name = "llama with experts"
    if name == "deepseek2" and _has_sigmoids(metadata):
        name = "deepseek2 with sigmoids"
    if name not in ARCHITECTURES:
        near = get_close_matches(name, ARCHITECTURES, 1, LIKE)
        hint = f"the nearest that is: {near[0]}" if near else f"{', '.join(ARCHITECTURES)} are"
        raise refused(file.path, f"the architecture {name[:80]} is not read from GGUF files", hint)
    return ARCHITECTURES[name]


def config_values(path: Path) -> dict[str, Any]:
    """Return the content of config.json for a file. `quantization_config` lists the types of tensors that stay packed.

    Raises ConfigError naming what is missing or not supported.
    """
    file = read_gguf(path)
    architecture, metadata = architecture_of(file), Metadata(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise refused(path, "the tensor token_embd.weight is missing: it holds no whole language model")
    eps = metadata.number("attention.layer_norm_rms_epsilon", metadata.number("attention.layer_norm_epsilon"))
    head_dim, heads = metadata.head_dim, metadata.integer("attention.head_count")
    if not (head_dim and heads):
        raise refused(path, f"{heads} attention heads of {head_dim} elements compute nothing")
    values: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _float_type(file),
        **_some(
            eos_token_id=eos_token_ids(file) or None,
            bos_token_id=metadata.file.value("tokenizer.ggml.bos_token_id", int),
        ),
    }
    if eps is not None:
        values[architecture.eps] = eps
    values |= architecture.sizes(metadata) if architecture.sizes else _sizes(metadata, architecture)
    values |= architecture.values(metadata)
    if packed := _packed_types(path):
        values["quantization_config"] = {"quant_method": "gguf", "tensors": packed}
    return values


def _sizes(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes of a model and its rotary embedding."""
    heads = metadata.integer("attention.head_count")
    turning = metadata.integer("rope.dimension_count") if architecture.latent else metadata.head_dim
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "intermediate_size": metadata.integer("feed_forward_length", 1),
        "max_position_embeddings": metadata.integer("context_length"),
        "head_dim": metadata.head_dim,
        **_rope(metadata, architecture, turning),
    }


def _packed_types(path: Path) -> dict[str, str]:
    """Return the block format of each tensor that stays packed. Raises ConfigError for a format that is not read."""
    kinds = [(name, info.type) for name, source in tensor_sources(path).items() for info in source.infos]
    packed = {name: kind for name, kind in kinds if kind not in FLOATS and not name.endswith(NUMBERS)}
    for name, kind in kinds:
        if kind not in (*FLOATS, *PACKED) and not (kind == EXPERTS_ALONE and ".experts." in name):
            near = next((other for start, other in NEAREST_TYPE.items() if kind.startswith(start)), "Q8_0")
            raise refused(
                path, f"the tensor {name} is stored as {kind}, which is not read", f"the nearest that is: {near}"
            )
    return packed


def _rope(metadata: Metadata, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return the keys of the rotary embedding: its base, the rotated share of a head, and its scaling."""
    theta = metadata.number("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    turning = metadata.integer("rope.dimension_count", head_dim)
    if turning != head_dim:
        if not architecture.partial:
            raise refused(
                metadata.file.path, f"{turning} of {head_dim} elements of a head turn, which no such model has"
            )
        rope["partial_rotary_factor"] = turning / head_dim
    rope |= _rope_scaling(metadata, architecture)
    if architecture.model_type == "gemma3_text":  # its sliding-window layers have a rotation of their own
        return _some(
            rope_theta=theta, rope_scaling=rope if rope.pop("rope_theta") and rope["rope_type"] != "default" else None
        )
    return {"rope_parameters": rope}


def _rope_scaling(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    """Return the keys that scale a rotary embedding; none where it is not scaled. Raises ConfigError."""
    kind, factor = metadata.text("rope.scaling.type"), metadata.number("rope.scaling.factor", 1.0)
    original = metadata.integer("rope.scaling.original_context_length", 0)
    frequencies, long, short = (_floats(metadata.file, name) for name in BUFFERS)
    if long and short:  # Phi-3's
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            **_some(original_max_position_embeddings=original or None),
            **_some(attention_factor=metadata.number("rope.scaling.attn_factor")),
        }
    if frequencies:  # Llama 3.1's, computed by the converter
        return {
            "rope_type": "longrope",
            "long_factor": frequencies,
            "short_factor": frequencies,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original or metadata.integer("context_length"),
        }
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            **architecture.rope,
            **(_magnitudes(metadata) if architecture.latent else {}),
            **_some(
                original_max_position_embeddings=original or None,
                beta_fast=metadata.number("rope.scaling.yarn_beta_fast"),
                beta_slow=metadata.number("rope.scaling.yarn_beta_slow"),
            ),
        }
    if kind not in (None, "none"):
        raise refused(metadata.file.path, f"rope.scaling.type = {kind} is not supported; none, linear and yarn are")
    return {}


def _magnitudes(metadata: Metadata) -> dict[str, float]:
    """Return what YaRN multiplies scores by, of which converters write a tenth. It does not change the rotation."""
    tenth = metadata.number("rope.scaling.yarn_log_multiplier")
    if tenth is None:
        raise refused(metadata.file.path, "its metadata has no rope.scaling.yarn_log_multiplier")
    magnitude = round(10.0 * tenth, 6)  # from fp32
    return {"mscale": magnitude, "mscale_all_dim": magnitude}


def _floats(file: GgufFile, name: str) -> list[float]:
    """Return the values of a short fp32 tensor; an empty list if it is absent."""
    info = file.tensors.get(name)
    if info is None:
        return []
    if info.type != "F32" or info.num_bytes > 1 << 16:
        raise refused(file.path, f"the tensor {name} is not a short list of fp32 numbers")
    with mapped(info.file) as data:
        return list(struct.unpack(f"<{info.num_bytes // 4}f", data[info.begin : info.begin + info.num_bytes]))


def eos_token_ids(file: GgufFile) -> list[int]:
    """Return the ids of tokens that end an answer: end of text, turn and message, and those of the architecture."""
    found = [file.value(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    ends = architecture_of(file).ends
    if ends and (tokens := file.value("tokenizer.ggml.tokens", list)):
        found += [tokens.index(token) for token in ends if token in tokens]
    return list(dict.fromkeys(each for each in found if each is not None))


def _float_type(file: GgufFile) -> str:
    """Return the number format for computing: that of most matrices, or bf16 if most are quantized."""
    sizes = dict.fromkeys(("F32", "F16", "BF16", "other"), 0)
    for info in file.tensors.values():
        if len(info.shape) > 1:
            sizes[info.type if info.type in sizes else "other"] += info.num_bytes
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def tensor_sources(path: Path) -> dict[str, Source]:
    """Return the checkpoint's tensors by name. Raises ConfigError naming a tensor of the file that has no place."""
    sources: dict[str, Source] = {}
    for name, source in _sources(read_gguf(path)):
        sources[name] = source
        if len(sources) > MOST_SOURCES:
            raise refused(path, f"the tensor {source.info.name[:80]} makes more than {MOST_SOURCES} of one model")
    return sources


def _sources(file: GgufFile) -> Iterator[tuple[str, Source]]:
    architecture, metadata = architecture_of(file), Metadata(file)
    outside, layer = {**OUTSIDE, **architecture.outside}, {**LAYER, **architecture.layer}
    reordered: dict[str, int] = {}
    if architecture.rotates_pairs:
        heads = metadata.integer("attention.head_count")
        reordered = {"attn_q": heads, "attn_k": metadata.integer("attention.head_count_kv", heads)}
    for name, info in file.tensors.items():
        if name in BUFFERS:
            continue
        stem, _, kind = name.rpartition(".")
        number = ""
        if stem.startswith("blk.") and stem.count(".") > 1:
            _, number, stem = stem.split(".", 2)
        if architecture.latent and stem in ("attn_k_b", "attn_v_b") and kind == "weight":
            if stem == "attn_k_b" and f"blk.{number}.attn_kv_b.weight" not in file.tensors:
                yield f"{architecture.prefix}{number}.self_attn{NUMBERS}", _of_both(file, info, number)
            continue
        if number and kind == "scale" and stem in architecture.scales:
            yield f"{architecture.prefix}{number}.{architecture.scales[stem]}", Source(info)
            continue
        place = (layer if number else outside).get(stem)
        if place is None or kind not in ("weight", "bias"):
            raise refused(
                file.path, f"the tensor {name[:80]} is unexpected in the architecture {metadata.architecture}"
            )
        place = f"{architecture.prefix}{number}.{place}" if number else place
        if "{}" in place:
            if stem in HALVES and (len(info.shape) != 3 or info.shape[1] % 2):
                raise refused(file.path, f"the tensor {name[:80]} does not hold two matrices for each expert")
            for index in range(info.shape[0]):
                if stem not in HALVES:
                    yield f"{place.format(index)}.{kind}", Source(info, index)
                for half, part in enumerate(HALVES.get(stem, ())):
                    yield f"{place.format(index)}.{part}.{kind}", Source(info, index, half=half)
            continue
        if stem in PLAIN:
            yield f"{architecture.prefix}{number}.{layer[stem]}", Source(info)
            continue
        transpose = stem in architecture.transposed and kind == "weight"
        yield f"{place}.{kind}", Source(info, None, reordered.get(stem, 0), transpose)


def _of_both(file: GgufFile, keys: TensorInfo, number: str) -> Source:
    """Return the matrices of keys and values as the one of the checkpoint. Raises ConfigError."""
    values = file.tensors.get(f"blk.{number}.attn_v_b.weight")
    if values is None:
        raise refused(file.path, f"the tensor blk.{number[:20]}.attn_v_b.weight is missing")
    fits = len(keys.shape) == len(values.shape) == 3 and (keys.shape[0], keys.shape[1]) == values.shape[::2]
    if not fits:
        raise refused(file.path, f"the shapes of {keys.name} and {values.name} do not fit each other")
    return Source(keys, values=values)
