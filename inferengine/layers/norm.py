"""Normalisation weights; the arithmetic is the ops table's."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.ops import Ops


class RMSNorm(nn.Module):
    """Norm of x, or of residual + x with the sum kept: the two forms in which pre-norm decoders use it."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the new residual, new residual). Without a residual x becomes it."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias (GPT-2)."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
