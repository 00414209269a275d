"""GGUF files of tiny models, written with the package `gguf` as llama.cpp's converters write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES

from inferengine.kernels.block_codes import FORMATS

SCALES = ("router.scale", "router.per_expert_scale")  # of Gemma 4
Kinds = Callable[[str, tuple[int, ...]], str]  # the type of a tensor by its name and shape


def random_blocks(name: str, rows: int, columns: int, *, seed: int) -> np.ndarray:
    """Return random bytes [rows, bytes of a row] of a format, with small scales."""
    form, random = FORMATS[name], np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, columns // form.block, form.num_bytes), dtype=np.uint8)
    for place in form.halves:
        scales = random.normal(size=(rows, columns // form.block, 1)) * 0.1 / form.largest
        raw[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def quantized(values: np.ndarray, kind: str, *, seed: int) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Return values as the bytes of a type; random blocks of the types that the package does not quantize to."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in FORMATS and kind.endswith("K"):
        rows = values.size // values.shape[-1]
        return random_blocks(kind, rows, values.shape[-1], seed=seed).reshape(*values.shape[:-1], -1), number
    return gguf.quants.quantize(values.astype(np.float32), number), number


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """Name the type of a tensor as llama.cpp mixes them: the value projection and the head in Q6_K, for a fifth bit the
    down projection; routers are numbers."""
    if "ffn_gate_inp" in name:
        return "F32"
    if "attn_v" in name or name == "output.weight":
        return "Q6_K"
    return "Q5_K" if "ffn_down" in name else "Q4_K"


def mxfp4(name: str, shape: tuple[int, ...]) -> str:
    """Name the type of a tensor as GPT-OSS is published: experts in MXFP4, the rest in Q8_0."""
    return "MXFP4" if "exps" in name else "F32" if "ffn_gate_inp" in name else "Q8_0"


def q8_0(name: str, shape: tuple[int, ...]) -> str:
    """Name the type of a tensor: Q8_0, and F16 where rows are no multiple of its blocks."""
    return "Q8_0" if shape[-1] % 32 == 0 else "F16"


def write(
    model: Any,
    architecture: str,
    path: Path,
    kinds: Kinds,
    *,
    permutes: bool = False,
    plus_one: bool = False,
    splits_latents: bool = True,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Any:
    """Write a model of transformers, its weights rounded to `kinds`, and return it with the weights of the file.
    `permutes`: rows of q and k are reordered; `plus_one`: norms are stored with 1 added; `splits_latents`: what makes
    keys and values of latents is stored as two tensors, as since 2025."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    known = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    sizes = config.to_dict()  # what differs from layer to layer is no attribute of the config
    head_dim = sizes.get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(sizes.get("num_key_value_heads", config.num_attention_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    more(writer)
    state, stored = model.state_dict(), {}
    for number, (name, tensor) in enumerate(state.items()):
        if (name == "lm_head.weight" and config.tie_word_embeddings) or not tensor.numel():
            continue
        if ".experts." in name:
            turns, joins = architecture == "gpt-oss", architecture == "gemma4"
            stored[name] = _add_experts(writer, name, tensor.float().numpy(), kinds, in_turn=turns, joined=joins)
            continue
        if name.endswith(SCALES):
            place = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{place}.scale", tensor.float().numpy())
            continue
        if name.endswith("kv_b_proj.weight") and splits_latents:
            stored[name] = _add_latent_halves(writer, name, tensor.float().numpy(), kinds, config)
            continue
        there = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        there += ".weight" if name.endswith(("sinks", "layer_scalar")) else ""
        values = tensor.float().numpy()
        transposes = architecture == "gpt2" and values.ndim == 2 and not name.startswith(("transformer.w", "lm_head"))
        values = values.T if transposes else values
        heads = writer_heads(name, config) if permutes else 0
        values = np.ascontiguousarray(_reordered(values, heads)) + (plus_one and name.endswith("norm.weight"))
        kind = "F32" if values.ndim == 1 else kinds(there, values.shape)
        raw, raw_type = quantized(values, kind, seed=number)
        writer.add_tensor(there, raw, raw_dtype=raw_type)
        read = gguf.quants.dequantize(raw, raw_type).reshape(values.shape)
        read = _put_back(read - (plus_one and name.endswith("norm.weight")), heads)
        stored[name] = torch.from_numpy(np.ascontiguousarray(read.T if transposes else read, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict({**state, **stored})
    model.tie_weights()
    return model


def _add_experts(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kinds: Kinds, *, in_turn: bool, joined: bool
) -> torch.Tensor:
    """Write the experts of a layer, and return what the file holds of them. `in_turn`: the model has gate and up in
    turn, and matrices as [in, out]; `joined`: the file has gate and up in one tensor."""
    layer, turned = name.split(".")[2], in_turn and values.ndim == 3
    rows = values.swapaxes(1, 2) if turned else values
    parts, read = {"down": rows}, []
    if "gate_up" in name and joined:
        parts = {"gate_up": rows}
    elif "gate_up" in name:
        both = (rows[:, ::2], rows[:, 1::2]) if in_turn else np.split(rows, 2, axis=1)
        parts = dict(zip(("gate", "up"), both, strict=True))
    for part, of_part in parts.items():
        there = f"blk.{layer}.ffn_{part}_exps.{'bias' if name.endswith('bias') else 'weight'}"
        kind_name = "F32" if values.ndim == 2 else kinds(there, of_part.shape)
        raw, kind = quantized(np.ascontiguousarray(of_part), kind_name, seed=crc32(there.encode()))
        writer.add_tensor(there, raw, raw_dtype=kind)
        read.append(gguf.quants.dequantize(raw, kind).reshape(of_part.shape))
    whole = np.stack(read, 2).reshape(rows.shape) if in_turn and len(read) == 2 else np.concatenate(read, 1)
    return torch.from_numpy(np.ascontiguousarray(whole.swapaxes(1, 2) if turned else whole, dtype=np.float32))


def _add_latent_halves(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kinds: Kinds, config: Any
) -> torch.Tensor:
    """Write the matrices of the heads' keys, transposed, and values, and return what the file holds of both."""
    by_head = values.reshape(config.num_attention_heads, -1, values.shape[1])
    keys, rest = np.split(by_head, [config.qk_nope_head_dim], axis=1)
    read = []
    for part, of_part in (("k", keys.swapaxes(1, 2)), ("v", rest)):
        there = f"blk.{name.split('.')[2]}.attn_{part}_b.weight"
        raw, kind = quantized(np.ascontiguousarray(of_part), kinds(there, of_part.shape), seed=crc32(there.encode()))
        writer.add_tensor(there, raw, raw_dtype=kind)
        read.append(gguf.quants.dequantize(raw, kind).reshape(of_part.shape))
    joined = np.concatenate((read[0].swapaxes(1, 2), read[1]), 1).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.float32))


def writer_heads(name: str, config: Any) -> int:
    """Return the heads within which a converter reorders the rows of a tensor."""
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.rpartition(".")[0].rpartition(".")[2], 0
    )


def _reordered(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the first and the second half of a head's rows, in turn."""
    if not heads:
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _put_back(rows: np.ndarray, heads: int) -> np.ndarray:
    if not heads:
        return rows
    return rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
