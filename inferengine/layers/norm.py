"""Normalization layers: they hold the weights, the ops table computes."""

from __future__ import annotations

import torch
from torch import nn

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
        """[T, size] -> the same shape."""
        return self.ops.rms_norm(x, self.gain, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias (GPT-2)."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> the same shape."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)
