"""Token embedding and the output head, which may share one weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inferengine.kernels.ops import Ops
from inferengine.layers.norm import Norm, RMSNorm


class TokenEmbedding(nn.Module):
    """[T] ids -> [T, E]. `scale` multiplies the rows; with `rounds_scale` (Gemma) it is rounded to the weight's type
    first, as transformers does."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float | None = None, rounds_scale: bool = False
    ) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.shape = (vocab_size, hidden_size)
        self.weight: nn.Parameter | None = weight  # None where `source` or `packed` stands for it
        self.vocab_size = vocab_size  # rows of the weight behind these are padding
        self.scale, self.rounds_scale = scale, rounds_scale
        self.source: Any = None  # what a quantized checkpoint stores instead of `weight`
        self.packed: Any = None
        self.ops: Ops | None = None  # of a packed weight

    def pad(self, num_rows: int) -> None:
        """Let the weight have `num_rows` rows, those behind the tokens' for zeros. Before loading."""
        if self.weight is not None:
            self.weight = _padded(self.weight, num_rows)

    def finish(self) -> None:
        """Pack what a quantized checkpoint stores, once it is loaded."""
        if self.source is not None:
            assert self.ops is not None
            self.packed, self.source = self.ops.pack_linear(self.source), None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, E] of ids [T]."""
        return self.scaled(self._rows(ids))

    def scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows of the table by the scale, in place."""
        if self.scale is None:
            return rows
        return rows.mul_(torch.tensor(self.scale, dtype=rows.dtype).item() if self.rounds_scale else self.scale)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return self.weight.index_select(0, ids)
        assert self.ops is not None
        assert self.ops.rows_of is not None
        return self.ops.rows_of(self.packed, ids)


class Head(nn.Module):
    """Final hidden states [N, E] -> logits [N, V]. With `tied` it reads the embedding's weight.

    Where the weight has padding rows, the logits are a view of the product that leaves out their columns: nothing that
    reads logits knows of padding, but their rows may lie further apart than V.
    """

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
        self.vocab_size = vocab_size  # rows of the weight behind these are padding
        self.source: Any = None  # what a quantized checkpoint stores instead of `weight`
        self.packed: Any = None

    @property
    def tied(self) -> TokenEmbedding | None:
        """The embedding whose weight this is."""
        return self._tied[0] if self._tied else None

    def pad(self, num_rows: int) -> None:
        """Let the weight have `num_rows` rows, that of the embedding where it is tied. Before loading. What a quantized
        checkpoint stores instead of a weight stays as it is."""
        if self.tied is not None:
            self.tied.pad(num_rows)
        elif self.weight is not None:
            self.weight = _padded(self.weight, num_rows)

    def finish(self) -> None:
        """Pack the weight for the device, once it is loaded. A tied weight stays shared where the device reads the
        plain layout, and where it is packed: the embedding comes first."""
        if self.tied is not None and self.tied.packed is not None:
            self.packed = self.tied.packed
        elif self.source is not None:
            self.packed, self.source = self.ops.pack_linear(self.source), None
        else:
            weight = self.weight if self.tied is None else self.tied.weight
            assert weight is not None
            self.packed = self.ops.pack_linear(weight.data)
        self.weight = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of states [N, E]."""
        return self._logits_of(self.ops.linear(hidden, self.packed, None))

    def of_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Compute the logits of norm(x)."""
        if not isinstance(norm, RMSNorm):
            return self.forward(norm(x))
        return self._logits_of(self.ops.norm_linear(x, norm.gain, norm.eps, self.packed, None))

    def _logits_of(self, product: torch.Tensor) -> torch.Tensor:
        """Scale and cap the product, and leave out the padding: last, since whole tensors are scaled faster."""
        if self.scale is not None:
            product = product.mul_(self.scale)
        if self.softcap is not None:
            product = self.ops.softcap(product, self.softcap)
        return product if product.shape[1] == self.vocab_size else product[:, : self.vocab_size]


def _padded(weight: nn.Parameter, num_rows: int) -> nn.Parameter:
    """Return a parameter like `weight` with `num_rows` rows, without its values."""
    return nn.Parameter(weight.new_empty(num_rows, weight.shape[1]), requires_grad=False)
