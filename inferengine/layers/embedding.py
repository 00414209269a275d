"""Token embedding and the output head, which may share one weight."""

from __future__ import annotations

import torch
from torch import nn

from inferengine.kernels.ops import Ops
from inferengine.layers.norm import Norm, RMSNorm


class TokenEmbedding(nn.Module):
    """[T] ids -> [T, E]. `scale` multiplies the rows (Gemma), rounded to the weight's type as transformers does."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] ids -> [T, E]."""
        rows = self.weight.index_select(0, ids)
        if self.scale is not None:
            rows.mul_(torch.tensor(self.scale, dtype=self.weight.dtype).item())
        return rows


class Head(nn.Module):
    """Final hidden states [N, E] -> logits [N, V]. With `tied` it reads the embedding's weight."""

    def __init__(
        self,
        ops: Ops,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: TokenEmbedding | None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.softcap, self.scale = softcap, scale
        self._tied = [tied] if tied is not None else []  # in a list: not a submodule, its weight is counted once
        self.weight = (
            None if tied is not None else nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        )
        self.packed: torch.Tensor | None = None

    def finish(self) -> None:
        """Pack the weight for the device, once it is loaded. A tied weight stays shared where the device reads the
        plain layout."""
        weight = self._tied[0].weight if self._tied else self.weight
        assert weight is not None
        self.packed = self.ops.pack_linear(weight.data)
        self.weight = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits [N, V]."""
        return self._capped(self.ops.linear(hidden, self.packed, None))

    def of_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Compute the logits of norm(x)."""
        if not isinstance(norm, RMSNorm):
            return self.forward(norm(x))
        return self._capped(self.ops.norm_linear(x, norm.gain, norm.eps, self.packed, None))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            logits = logits.mul_(self.scale)
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
