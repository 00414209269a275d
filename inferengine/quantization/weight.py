"""QuantizedWeight: the one form that every scheme makes, every layout is read into and every kernel packs from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from inferengine.layers.parallel import Cut, DimensionRange

FP8, INT8, INT4 = "fp8", "int8", "int4"  # kinds of codes
FP8_MAX = 448.0  # largest finite e4m3 number


class Block(NamedTuple):
    """The part of a weight that shares one scale: (1, K) a row, (1, 128) a group of a row, (128, 128) a square."""

    rows: int
    columns: int


class QuantizedWeight(NamedTuple):
    """A weight [N, K] as codes and scales: weight = (codes - zeros) * scales, block by block.

    `codes` [N, K]: float8_e4m3fn, int8, or uint8 below 16 for INT4. `scales` [ceil(N / rows), ceil(K / columns)] fp32.
    `zeros`, INT4 only: the code that stands for 0, in the shape of `scales`. `int8_activations`: the inputs are
    meant to be rounded to 8 bits as well, by token (W8A8).
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    block: Block
    zeros: torch.Tensor | None = None
    int8_activations: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.codes.shape[0], self.codes.shape[1]


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dequantize the weight to [N, K]."""
    codes = weight.codes.to(dtype)
    if weight.zeros is not None:
        codes = codes.sub_(spread(weight.zeros, weight).to(dtype))
    return codes.mul_(spread(weight.scales, weight).to(dtype))


def spread(values: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return block values as a tensor that broadcasts against the codes: [N, 1] for whole rows, else [N, K]."""
    rows, columns = weight.shape
    if weight.block.rows > 1:
        values = values.repeat_interleave(weight.block.rows, 0)[:rows]
    if weight.block.columns >= columns:
        return values
    return values.repeat_interleave(weight.block.columns, 1)[:, :columns]


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack projections of one input as one weight. Blocks of several rows that a seam would cut become rows' own.
    Raises ValueError for blocks of different sizes."""
    if len(parts) == 1:
        return parts[0]
    if any(part.shape[0] % part.block.rows for part in parts[:-1]) or any(
        part.block != parts[0].block for part in parts
    ):
        parts = [by_row(part) for part in parts]  # a rank may have whole blocks of queries and parts of one of keys
    if any(part.block != parts[0].block for part in parts):
        raise ValueError("projections of one input must share the size of their blocks")
    first = parts[0]
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    return first._replace(codes=codes, scales=torch.cat([part.scales for part in parts]), zeros=zeros)


def by_row(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same weight with a scale for every row of a block."""
    repeated = weight.scales.repeat_interleave(weight.block.rows, 0)[: weight.shape[0]]
    return weight._replace(scales=repeated, block=Block(1, weight.block.columns))


def cut(weight: QuantizedWeight, part: Cut | None) -> QuantizedWeight:
    """Cut a part of the rows or of the columns. Raises ValueError where it would cut a block of columns that shares a
    scale; blocks of rows become rows' own where they are cut."""
    if part is None:
        return weight
    if part.dim == 0:
        if any(side % weight.block.rows for span in part.spans for side in (span.begin, span.end % part.whole)):
            weight = by_row(weight)
        rows = weight.block.rows
        scaled = part._replace(
            spans=tuple(DimensionRange(s.begin // rows, -(-s.end // rows), s.whole) for s in part.spans)
        )
    else:
        columns = weight.block.columns
        if columns >= part.whole:
            scaled = part._replace(spans=(DimensionRange(0, 1, 1),))
        elif any(side % columns for span in part.spans for side in (span.begin, span.end % part.whole)):
            raise ValueError(f"its groups of {columns} inputs do not divide among the ranks of engine.tensor_parallel")
        else:
            scaled = part._replace(
                spans=tuple(DimensionRange(s.begin // columns, -(-s.end // columns), s.whole) for s in part.spans)
            )
    zeros = None if weight.zeros is None else scaled.of(weight.zeros)
    codes = part.of(weight.codes.view(torch.uint8)).view(weight.codes.dtype)
    block = weight.block._replace(columns=min(weight.block.columns, codes.shape[1]))
    return weight._replace(codes=codes.contiguous(), scales=scaled.of(weight.scales), zeros=zeros, block=block)


def blocks_of(weight: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a float weight [N, K] seen as [N / rows, rows, K / columns, columns], padded with zeros to whole
    blocks."""
    rows, columns = weight.shape
    pad = (0, -columns % block.columns, 0, -rows % block.rows)
    padded = torch.nn.functional.pad(weight, pad) if any(pad) else weight
    return padded.view(padded.shape[0] // block.rows, block.rows, padded.shape[1] // block.columns, block.columns)
