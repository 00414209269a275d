"""Linear layers, and the feed-forward blocks made of them.

Several projections of one input share one weight; `parts` are the numbers of its rows. So gate and up projections of a
block are one matrix product (Shazeer 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.layers.norm import Norm, RMSNorm
from inferengine.layers.parallel import LinearPart


class Linear(nn.Module):
    """y = x W^T + b, alone or fused with the operations around it in a pre-norm decoder.

    `parts` are the output sizes of the projections in W; the loader fills each by itself. After loading, `finish` turns
    the weight into `packed`, the layout that the device's kernels read fastest.
    """

    takes_adapters = True  # a LoRA adapter may change it

    def __init__(self, ops: Ops, in_features: int, parts: list[int] | int, *, bias: bool = False) -> None:
        super().__init__()
        self.ops = ops
        self.parts = [parts] if isinstance(parts, int) else parts
        self.in_features = in_features
        weight = nn.Parameter(torch.empty(sum(self.parts), in_features), requires_grad=False)
        self.weight: nn.Parameter | None = weight  # None once it is packed
        self.bias = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if bias else None
        self.order: torch.Tensor | None = None  # [out] row of the weight that gives each output; None: in their order
        self.held: LinearPart | None = None  # which part of the weight it is; None: all of it
        self.is_reordered = False  # the weight's rows have been put in that order
        self.source: Any = None  # what a quantized checkpoint stores instead of `weight` (quantization/stored.py)
        self.packed: Any = None
        self.offset: torch.Tensor | None = (
            None  # the bias as a plain attribute, which is looked up faster than a parameter
        )

    def finish(self) -> None:
        """Pack the weight for the device, once it is loaded. Does nothing where that was done while loading."""
        if self.packed is not None:
            return
        stored = self.source
        if stored is None:
            assert self.weight is not None
            stored = self.weight.data
            if self.order is not None:
                self.order, self.is_reordered = self.order.to(stored.device), True
                stored = stored[self.order]
        elif self.order is not None:  # rows of a quantized weight share scales: they stay, and `_ordered` moves outputs
            self.order = self.order.to(stored.device)
        self.packed = self.ops.pack_linear(stored)
        self.offset = None if self.bias is None else self.bias.data
        if self.offset is not None and self.is_reordered:
            self.offset = self.offset[self.order]
        self.weight = self.source = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs [T, in] to outputs [T, out]."""
        return self._ordered(self.ops.linear(self._readable(x), self.packed, self.offset))

    def of_norm(self, x: torch.Tensor, norm: Norm | None, normed: torch.Tensor | None = None) -> torch.Tensor:
        """Compute linear(norm(x)), of x itself without a norm; `normed` is norm(x) where that is known."""
        if isinstance(norm, RMSNorm) and normed is None:
            return self._ordered(self.ops.norm_linear(x, norm.gain, norm.eps, self.packed, self.offset))
        return self.forward(_normed(x, norm, normed))

    def gated_of_norm(
        self, x: torch.Tensor, norm: Norm | None, activation: str, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute activation(gate) * up, where linear(norm(x)) = [gate, up]; `normed` as in `of_norm`."""
        if not isinstance(norm, RMSNorm) or normed is not None:
            normed = self._readable(_normed(x, norm, normed))
            return self.ops.norm_gated_linear(normed, None, 0.0, self.packed, self.offset, activation)
        return self.ops.norm_gated_linear(x, norm.gain, norm.eps, self.packed, self.offset, activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + linear(x), computed in place where the device can."""
        return self.ops.linear_add(self._readable(x), self.packed, self.offset, residual)

    def add_to_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do `add_to`; return the sum, and its norm for the next product where the device computes it on the way."""
        if not isinstance(norm, RMSNorm) or self.ops.linear_add_norm is None:
            return self.add_to(residual, x), None
        return self.ops.linear_add_norm(self._readable(x), self.packed, self.offset, residual, norm.gain, norm.eps)

    def _ordered(self, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs in `order`, where the weight's rows are not."""
        return y if self.order is None or self.is_reordered else y.index_select(1, self.order)

    def _readable(self, x: Any) -> Any:
        """Turn an input of codes, from a layer in low precision, into numbers where this layer reads no codes."""
        return x if self.ops.reads_codes or isinstance(x, torch.Tensor) else x.dequantize()


def _normed(x: torch.Tensor, norm: Norm | None, normed: torch.Tensor | None) -> torch.Tensor:
    if normed is not None:
        return normed
    return x if norm is None else norm.forward(x)


# -- feed-forward blocks -----------------------------------------------------------------------------------------------


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
        """Return the hidden values [T, I] of x [T, E]: all but the last projection, which the layer fuses with what
        follows."""
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
        """Return the hidden values [T, I] of x [T, E]: all but the last projection, which the layer fuses with what
        follows."""
        return ACTIVATIONS[self.activation](self.up.of_norm(x, norm, normed))
