"""Feed-forward blocks. Gate and up projections are one matrix product (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.layers.linear import Linear
from inferengine.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(activation(gate(norm(x))) * up(norm(x))). `activation` is silu or gelu_tanh."""

    def __init__(
        self, ops: Ops, hidden_size: int, intermediate_size: int, *, activation: str = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(ops, hidden_size, [intermediate_size, intermediate_size], bias=bias)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def hidden(self, x: torch.Tensor, norm: RMSNorm, normed: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] -> [T, I]: all but the last projection, which the layer fuses with what follows."""
        return self.gate_up.gated_of_norm(x, norm, self.activation, normed)


class MLP(nn.Module):
    """down(gelu_tanh(up(x))), with biases (GPT-2)."""

    def __init__(self, ops: Ops, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up = Linear(ops, hidden_size, intermediate_size, bias=True)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=True)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, I]: all but the last projection."""
        return functional.gelu(self.up(x), approximate="tanh")
