"""Normalization layers: they hold the weights, the ops table computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops


class RMSNorm(nn.Module):
    """Root mean square norm. A Linear that follows may take `gain` and `eps` and compute the norm itself."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.gain: torch.Tensor | None = (
            None  # the weight as a plain attribute, which is looked up faster than a parameter
        )

    def finish(self) -> None:
        """Set `gain`, once the weight is loaded."""
        self.gain = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x [T, size]."""
        return self.ops.rms_norm(x, self.gain, self.eps)


class LayerNorm(nn.Module):
    """Layer norm, with a bias (GPT-2) or without (Cohere)."""

    def __init__(self, ops: Ops, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x [T, size]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """Layer norm without bias of each head by itself, with gains of its own. `parts`: a checkpoint stores each head's
    gains as a tensor; else all as one [heads, head_dim]."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, parts: bool) -> None:
        super().__init__()
        self.shape, self.eps = (num_heads, head_dim), eps
        self.parts = [head_dim] * num_heads if parts else [num_heads * head_dim]
        self.held: Any = None  # Span of the heads that these are (layers/parallel.py); None: all of them
        size = (num_heads * head_dim,) if parts else self.shape
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x [T, heads * head_dim]."""
        heads = x.view(-1, *self.shape)
        return (
            functional.layer_norm(heads, self.shape[1:], None, None, self.eps)
            .mul_(self.weight.view(self.shape))
            .view(x.shape)
        )


Norm = RMSNorm | LayerNorm


def make_norm(ops: Ops, kind: str, size: int, eps: float) -> Norm:
    """Make a norm of a kind that DecoderConfig.norm names."""
    return RMSNorm(ops, size, eps) if kind == "rms" else LayerNorm(ops, size, eps, bias=kind == "layer")
