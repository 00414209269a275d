"""Linear layers. Several projections of one input are stored as one weight, `parts` telling their rows apart."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.ops import Ops


class Linear(nn.Module):
    """y = x W^T + b. `parts` are the output sizes of the projections packed into W; the loader fills each by itself."""

    def __init__(self, ops: Ops, in_features: int, parts: list[int] | int, *, bias: bool = False) -> None:
        super().__init__()
        self.ops = ops
        self.parts = [parts] if isinstance(parts, int) else parts
        self.weight = nn.Parameter(torch.empty(sum(self.parts), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(self.parts)), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def finish(self) -> None:
        """After loading: put the weight into the layout that the device's kernels read fastest."""
        packed = self.ops.pack_linear(self.weight.data)
        if packed is not self.weight.data:
            self.packed = packed
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight if self.packed is None else self.packed, self.bias)
