"""Tensor parallelism: which part of each layer a rank holds, and the layers that exchange results with other ranks.

Queries, keys, values, gate and up are divided by output (columns of the product), the projections after them by input
(rows), so that a block of a layer needs one sum over the ranks (Shoeybi et al. 2019, "Megatron-LM"). Of a mixture of
experts each rank has some experts as a whole (expert parallelism, Lepikhin et al. 2020, "GShard"): it routes every
token and adds up what its own experts make, and the same one sum joins them. Embedding and head are divided by
vocabulary. Every rank has the logits of all tokens, so every rank draws the same tokens.

Parts are contiguous. Where a number does not divide evenly, the first ranks hold more: rank 0 always holds the most.
Where there are fewer KV heads than ranks, several ranks hold the same KV head, each with some of its query heads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from inferengine.errors import ConfigError
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.norm import Norm, RMSNorm

KEY = "engine.tensor_parallel"
UNITS = (128, 64, 32, 16, 8, 4, 2, 1)  # of a feed-forward block's width: groups of quantized weights stay whole
ANY_WINDOW = 1  # of layers that are not those with full attention, where these differ
VOCABULARY_UNIT = 64  # rows of the head, for the kernels of a card: tiles are whole, and rows of logits aligned


class Communicator(Protocol):
    """Exchanges tensors between ranks. Each call is made by all ranks, in the same order, with equal shapes."""

    rank: int
    size: int

    def expect_rows(self, row_bytes: int, num_rows: int) -> None:
        """Prepare for sums of up to `num_rows` rows of at most `row_bytes`. Others work too, perhaps more slowly."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by its sum over the ranks, in place, and return it: the same bits on all."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add the sum of x over the ranks to residual, and return the RMS norm of that; None, and nothing is done,
        where no kernel does it at once."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the x of all ranks, stacked: [size, *x.shape]."""
        ...


class DimensionRange(NamedTuple):
    """The part [begin, end) of a dimension that has `whole` entries."""

    begin: int
    end: int
    whole: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.end - self.begin

    def times(self, count: int) -> DimensionRange:
        """Return the span in units that are `count` times smaller."""
        return DimensionRange(self.begin * count, self.end * count, self.whole * count)


class Cut(NamedTuple):
    """What a rank takes of a checkpoint's tensor: `spans` of dimension `dim`, one after the other. `whole` is the
    tensor's size there."""

    dim: int
    spans: tuple[DimensionRange, ...]
    whole: int

    def of(self, tensor: Any) -> torch.Tensor:
        """Read the part from a tensor, or from a safetensors slice."""
        parts = [
            tensor[span.begin : span.end] if self.dim == 0 else tensor[:, span.begin : span.end] for span in self.spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True)
class LinearPart:
    """The part of a Linear that this rank holds: `outputs` of each of its projections, or `inputs` of all."""

    outputs: tuple[DimensionRange, ...] = ()
    inputs: DimensionRange | None = None
    is_interleaved: bool = False  # a checkpoint stores the projections head by head

    def cut(self, part: int | None, *, is_bias: bool = False) -> Cut | None:
        """Return what to take of a tensor [outputs, inputs], or of a bias [outputs], of one projection or of all
        (None). Returns None for the whole tensor."""
        if self.inputs is not None:
            return None if is_bias else Cut(1, (self.inputs,), self.inputs.whole)
        if part is not None:
            return Cut(0, (self.outputs[part],), self.outputs[part].whole)
        whole = sum(span.whole for span in self.outputs)
        if self.is_interleaved:
            first, last = (sum(getattr(span, side) for span in self.outputs) for side in ("begin", "end"))
            return Cut(0, (DimensionRange(first, last, whole),), whole)
        spans, before = [], 0
        for span in self.outputs:
            spans.append(DimensionRange(before + span.begin, before + span.end, whole))
            before += span.whole
        return Cut(0, tuple(spans), whole)


class Shard(NamedTuple):
    """One of `size` ranks."""

    rank: int = 0
    size: int = 1

    def span(self, whole: int, unit: int = 1) -> DimensionRange:
        """Return this rank's part of `whole` entries, in multiples of `unit` up to the last."""
        units = -(-whole // unit)
        each, more = divmod(units, self.size)
        begin = self.rank * each + min(self.rank, more)
        end = begin + each + (self.rank < more)
        return DimensionRange(min(begin * unit, whole), min(end * unit, whole), whole)

    def heads(self, config: DecoderConfig, window: int | None = ANY_WINDOW) -> tuple[DimensionRange, DimensionRange]:
        """Return this rank's query heads and KV heads, in layers with this window. Raises ConfigError where some rank
        would have no query head."""
        queries, keys, size = config.num_heads, config.kv_shape(window).num_heads, self.size
        each = queries // keys
        if keys >= size:
            span = self.span(keys)
            return span.times(each), span
        head = next(head for head in range(keys) if self.rank < (head + 1) * size // keys)
        first, after = head * size // keys, (head + 1) * size // keys
        if each < after - first:
            raise ConfigError(KEY, f"{queries} query heads in {keys} groups do not divide among {size} ranks")
        part = Shard(self.rank - first, after - first).span(each)
        return DimensionRange(head * each + part.begin, head * each + part.end, queries), DimensionRange(
            head, head + 1, keys
        )

    def width(self, config: DecoderConfig) -> DimensionRange:
        """Return this rank's part of the feed-forward block's width. Raises ConfigError where some rank would have
        none."""
        return self.width_of(config.intermediate_size)

    def width_of(self, whole: int) -> DimensionRange:
        """Return this rank's part of a width, in the largest unit that divides it. Raises ConfigError as `width`."""
        if whole < self.size:
            raise ConfigError(KEY, f"a feed-forward block of width {whole} does not divide among {self.size} ranks")
        return self.span(whole, next(unit for unit in UNITS if whole % unit == 0 and whole // unit >= self.size))

    def experts(self, moe: MoeConfig) -> DimensionRange:
        """Return the experts that this rank holds. Raises ConfigError where some rank would have none."""
        if moe.num_experts < self.size:
            raise ConfigError(KEY, f"{moe.num_experts} experts do not divide among {self.size} ranks")
        return self.span(moe.num_experts)

    def vocabulary(self, config: DecoderConfig) -> DimensionRange:
        """Return this rank's tokens; the last ranks of a small vocabulary may have none."""
        size = self.vocabulary_rows(config)
        begin = min(self.rank * size, config.vocab_size)
        return DimensionRange(begin, min(begin + size, config.vocab_size), config.vocab_size)

    def vocabulary_rows(self, config: DecoderConfig) -> int:
        """Return the rows of the embedding and of the head on each rank, padding included."""
        return vocabulary_rows(config.vocab_size, self.size)

    def divide(self, config: DecoderConfig) -> DecoderConfig:
        """Return the configuration of this rank's part of the model: heads and width are its own, the rest is the
        model's. Raises ConfigError where the model does not divide."""
        if self.size == 1:
            return config
        if config.implementation != "native":
            raise ConfigError(KEY, f"the modules of {config.implementation} are not divided: set it to 1")
        queries, keys = self.heads(config)
        full_kv, moe = config.full_kv, config.moe
        if full_kv is not None:
            full_kv = full_kv._replace(num_heads=self.heads(config, None)[1].size)
            ranks = [Shard(rank, self.size) for rank in range(self.size)]
            if any(rank.heads(config)[0] != rank.heads(config, None)[0] for rank in ranks):
                raise ConfigError(KEY, f"the KV heads of some layers divide the heads of {config.model_type} otherwise")
        if moe is not None:
            experts = self.experts(moe)
            shared = self.width_of(moe.shared_size).size if moe.shared_size else 0
            moe = dataclasses.replace(moe, held=(experts.begin, experts.size), shared_size=shared)
        return dataclasses.replace(
            config,
            num_heads=queries.size,
            num_kv_heads=keys.size,
            full_kv=full_kv,
            intermediate_size=self.width(config).size,
            intermediate_sizes=tuple(self.width_of(width).size for width in config.intermediate_sizes),
            moe=moe,
        )


def vocabulary_rows(vocab_size: int, num_ranks: int = 1) -> int:
    """Return the rows of a padded embedding, and of the head, on each rank."""
    return -(-vocab_size // (num_ranks * VOCABULARY_UNIT)) * VOCABULARY_UNIT


class VocabularyParallelEmbedding(TokenEmbedding):
    """A TokenEmbedding of which each rank holds some rows, and all return the sum: one of them has the token's row."""

    def __init__(
        self, whole: TokenEmbedding, rows: int, span: DimensionRange, communicator: Communicator | None
    ) -> None:
        assert whole.weight is not None  # nothing is packed yet
        super().__init__(rows, whole.weight.shape[1], scale=whole.scale, rounds_scale=whole.rounds_scale)
        self.span, self.communicator = span, communicator

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, E] of ids [T]."""
        assert self.communicator is not None  # only for counting bytes
        own = ids - self.span.begin
        elsewhere = (own < 0) | (own >= self.span.size)
        rows = self._rows(own.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0.0)
        self.communicator.all_reduce(rows)
        return self.scaled(rows)


class VocabularyParallelHead(Head):
    """A Head of which each rank computes the logits of its own tokens; all return those of all tokens."""

    def __init__(
        self,
        whole: Head,
        rows: int,
        span: DimensionRange,
        hidden_size: int,
        tied: TokenEmbedding | None,
        communicator: Communicator | None,
    ) -> None:
        super().__init__(whole.ops, rows, hidden_size, tied=tied, softcap=whole.softcap, scale=whole.scale)
        self.span, self.communicator = span, communicator

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of states [N, E]."""
        return self._gathered(super().forward(hidden))

    def of_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Compute the logits of norm(x)."""
        if not isinstance(norm, RMSNorm):
            return self.forward(norm(x))
        return self._gathered(super().of_norm(x, norm))

    def _gathered(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.communicator is not None  # only for counting bytes
        parts = self.communicator.all_gather(logits)  # [ranks, N, rows]
        return parts.transpose(0, 1).flatten(1)[:, : self.span.whole]  # all padding is behind the last token


class ParallelRMSNorm(nn.Module):
    """RMS norm over the heads of all ranks, each of which holds some (OLMo 2)."""

    def __init__(self, span: DimensionRange, eps: float, communicator: Communicator | None) -> None:
        super().__init__()
        self.span, self.eps, self.communicator = span, eps, communicator
        self.weight = nn.Parameter(torch.empty(span.size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x [T, heads * head_dim] of this rank."""
        assert self.communicator is not None  # only for counting bytes
        wide = x.float()
        squares = self.communicator.all_reduce(wide.square().sum(-1, keepdim=True))
        normed = wide * squares.mul_(1.0 / self.span.whole).add_(self.eps).rsqrt_()
        return normed.to(x.dtype).mul_(self.weight)


def summed(base: Ops, communicator: Communicator) -> Ops:
    """Return `base` for a Linear whose inputs are divided: its products are summed over the ranks, the bias is added
    once."""

    def linear(x: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = communicator.all_reduce(base.linear(x, weight, None))
        return y if bias is None else y.add_(bias)

    def linear_add(x: Any, weight: Any, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(linear(x, weight, bias))

    def linear_add_norm(
        x: Any, weight: Any, bias: torch.Tensor | None, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is not None:
            normed, residual = base.add_rms_norm(linear(x, weight, bias), residual, gain, eps)
            return residual, normed
        part = base.linear(x, weight, None)
        together = communicator.add_rms_norm(part, residual, gain, eps)
        if together is not None:
            return residual, together
        normed, residual = base.add_rms_norm(communicator.all_reduce(part), residual, gain, eps)
        return residual, normed

    return dataclasses.replace(base, linear=linear, linear_add=linear_add, linear_add_norm=linear_add_norm)
