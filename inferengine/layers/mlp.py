"""Feed-forward blocks. Gate and up projections are one matrix product (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.layers.linear import Linear
from inferengine.layers.norm import Norm


class GatedMLP(nn.Module):
    """down(activation(gate(norm(x))) * up(norm(x))). `activation` is silu or gelu_tanh."""

    def __init__(
        self, ops: Ops, hidden_size: int, intermediate_size: int, *, activation: str = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(ops, hidden_size, [intermediate_size, intermediate_size], bias=bias)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def hidden(self, x: torch.Tensor, norm: Norm | None, normed: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] -> [T, I]: all but the last projection, which the layer fuses with what follows."""
        return self.gate_up.gated_of_norm(x, norm, self.activation, normed)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square_(),
    "silu": functional.silu,
}


class MLP(nn.Module):
    """down(activation(up(norm(x)))). `activation` is one of ACTIVATIONS."""

    def __init__(
        self, ops: Ops, hidden_size: int, intermediate_size: int, *, activation: str = "gelu_tanh", bias: bool = True
    ) -> None:
        super().__init__()
        self.up = Linear(ops, hidden_size, intermediate_size, bias=bias)
        self.down = Linear(ops, intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def hidden(self, x: torch.Tensor, norm: Norm | None, normed: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] -> [T, I]: all but the last projection, which the layer fuses with what follows."""
        return ACTIVATIONS[self.activation](self.up.of_norm(x, norm, normed))
