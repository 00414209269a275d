"""Feed-forward blocks. Gate and up projections are one matrix product (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). `activation` is silu or gelu_tanh."""

    def __init__(
        self, ops: Ops, hidden_size: int, intermediate_size: int, *, activation: str = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(ops, hidden_size, [intermediate_size, intermediate_size], bias=bias)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=bias)
        self.activate = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.gate_up(x)))


class MLP(nn.Module):
    """down(gelu_tanh(up(x))), with biases (GPT-2)."""

    def __init__(self, ops: Ops, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up = Linear(ops, hidden_size, intermediate_size, bias=True)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))
