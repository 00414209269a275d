"""A second embedding of each token with a part for each layer, which the layer adds through a gate (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import LayerInputConfig
from inferengine.layers.embedding import TokenEmbedding
from inferengine.layers.linear import Linear
from inferengine.layers.norm import RMSNorm


class LayerInputs(nn.Module):
    """[T] ids and their embeddings [T, E] -> [T, size] for each layer: the mean of what the table has for the token and
    of a normed projection of its embedding, times the root of 2."""

    def __init__(self, ops: Ops, config: LayerInputConfig, hidden_size: int, num_layers: int, eps: float) -> None:
        super().__init__()
        self.shape, self.scale = (num_layers, config.size), hidden_size**-0.5
        self.embed = TokenEmbedding(config.vocab_size, num_layers * config.size, scale=config.size**0.5)
        self.projection = Linear(ops, hidden_size, num_layers * config.size)
        self.norm = RMSNorm(ops, config.size, eps)

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the input [T, size] of each layer for ids [T] and embeddings [T, E]."""
        projected = self.projection(embedded).mul_(self.scale)
        normed: torch.Tensor = self.norm(projected.view(-1, self.shape[1])).view_as(projected)
        return normed.add_(self.embed(ids)).mul_(2.0**-0.5).view(-1, *self.shape).unbind(1)


class LayerInputGate(nn.Module):
    """Adds a layer's input to the residual stream: of each number as much as a gate of the stream lets through."""

    def __init__(self, ops: Ops, config: LayerInputConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.gate = Linear(ops, hidden_size, config.size)
        self.projection = Linear(ops, config.size, hidden_size)
        self.norm = RMSNorm(ops, hidden_size, eps)

    def add_to(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Add this layer's input [T, size] to the residual stream [T, E], in place."""
        gated = functional.gelu(self.gate(x), approximate="tanh").mul_(own)
        return x.add_(self.norm(self.projection(gated)))
