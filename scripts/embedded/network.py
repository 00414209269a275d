"""The network, in plain torch, with the tensor names of a Hugging Face Llama checkpoint. For training only: serving
loads the checkpoint through the engine's own model code, like any other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .vocabulary import CONTEXT_LENGTH, VOCABULARY_SIZE

ROPE_THETA = 10000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_size: int = 64

    def config(self) -> dict[str, Any]:
        """Return config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "dtype": "bfloat16",
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": CONTEXT_LENGTH,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCABULARY_SIZE,
        }


MODEL = Shape(hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1024)
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=512)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden.float(), (hidden.shape[-1],), self.weight, NORM_EPSILON).to(hidden.dtype)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate by RoPE (Su et al. 2021), the halves of a head paired as Hugging Face's Llama pairs them. [batch, head, T,
    size]"""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = hidden.shape

        def split(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, self.shape.head_size).transpose(1, 2)

        query = rotated(split(self.q_proj(hidden)), cosine, sine)
        key = rotated(split(self.k_proj(hidden)), cosine, sine)
        group = self.shape.heads // self.shape.kv_heads
        key = key.repeat_interleave(group, dim=1)
        value = split(self.v_proj(hidden)).repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)


class Network(nn.Module):
    """Token ids [batch, T] to logits [batch, T, vocabulary]; the head is the embedding."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):  # as GPT-2: the residual stream keeps its size
                    scale /= math.sqrt(2 * shape.layers)
                parameter.data.normal_(0.0, scale, generator=generator)
        frequencies = ROPE_THETA ** (-torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(CONTEXT_LENGTH).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.embed_tokens(ids)
        cosine, sine = self.cosine[: ids.shape[1]], self.sine[: ids.shape[1]]
        for layer in self.model.layers:
            hidden = layer(hidden, cosine, sine)
        return functional.linear(self.model.norm(hidden), self.model.embed_tokens.weight)
