"""Products on CUDA whose inputs are rounded to 8 bits as well: which kernel takes how many rows, and who rounds.

Whoever computes the input rounds it where that is possible, and hands codes on: the norm that sums a product's parts,
and the gate. On Hopper FP8 products of 2 to 128 rows are streamed (kernels/cuda/gemm/w8a8_stream_hopper.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferengine.kernels.cuda.gemm.quantize_activations import (
    add_parts_norm_and_quantize,
    gate_and_quantize_rows,
    quantize_rows,
    scale_products,
)
from inferengine.kernels.cuda.gemm.w8 import ByteWeight, tile_product
from inferengine.kernels.cuda.gemm.w8a8_stream_hopper import (
    COLUMNS,
    StreamTuning,
    fits,
    stream_gated,
    stream_parts,
    stream_product,
)
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.quantization import tuning

FP8 = torch.float8_e4m3fn


class Rounded(NamedTuple):
    """Inputs as codes [T, K] e4m3 or int8, of what was `dtype`. Scales fp32: [T, 1], or [K / 128, T], one for each 128
    columns."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def by_row(self) -> bool:
        return self.scales.shape == (self.codes.shape[0], 1)

    def numbers(self) -> torch.Tensor:
        """[T, K], for a product that reads no codes."""
        numbers = self.codes.float()
        if self.by_row:
            return numbers.mul_(self.scales).to(self.dtype)
        blocks = numbers.view(len(numbers), -1, COLUMNS.value)
        return blocks.mul_(self.scales.t()[:, :, None]).view(numbers.shape).to(self.dtype)


def rounded(x: torch.Tensor, to: torch.dtype, gain: torch.Tensor | None = None, eps: float = 0.0) -> Rounded:
    """x [T, K], or with `gain` its norm."""
    return Rounded(*quantize_rows(x, to, gain, eps), x.dtype)


def product(
    x: Rounded,
    weight: ByteWeight,
    scratch: Scratch,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> [T, out]; `residual` is added in place."""
    rows, shape = x.codes.shape[0], weight.codes.shape
    if x.codes.dtype == FP8:
        streamed = tuning.stream(rows, *shape)
        if streamed is None and not x.by_row:
            streamed = _one_part(tuning.stream_parts(rows, *shape))
        if streamed is not None and fits(rows, weight.codes, streamed):
            return stream_product(
                x.codes, x.scales, weight.codes, weight.scales, streamed, x.dtype, bias=bias, residual=residual
            )
    if not x.by_row:
        x = rounded(x.numbers(), x.codes.dtype)
    tuned = tuning.code_tile(rows, *shape) if x.codes.dtype == FP8 else None
    if tuned is not None:
        return tile_product(
            x.codes, weight, tuned, scratch, bias=bias, residual=residual, input_scales=x.scales, dtype=x.dtype
        )
    y = _many(x, weight)
    if bias is not None:
        y.add_(bias)
    return y if residual is None else residual.add_(y)


def product_and_norm(
    x: Rounded, weight: ByteWeight, scratch: Scratch, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> Rounded | None:
    """residual += the product, and the norm of the sum, rounded. None where nothing is gained: nothing was done."""
    rows, shape = x.codes.shape[0], weight.codes.shape
    streamed = tuning.stream_parts(rows, *shape) if x.codes.dtype == FP8 else None
    if streamed is None or not fits(rows, weight.codes, streamed):
        return None
    parts = stream_parts(x.codes, x.scales, weight.codes, weight.scales, streamed, scratch)
    return Rounded(*add_parts_norm_and_quantize(parts, residual, gain, eps, x.codes.dtype), x.dtype)


def gated(
    x: Rounded, weight: ByteWeight, scratch: Scratch, activation: int, bias: torch.Tensor | None = None
) -> Rounded:
    """act(gate) * up of the product, the gate's rows first, rounded: [T, out / 2]."""
    rows, shape = x.codes.shape[0], weight.codes.shape
    streamed = tuning.stream_gated(rows, *shape) if x.codes.dtype == FP8 and x.by_row else None
    if streamed is not None and fits(rows, weight.codes, streamed, gated=True):
        operands = (x.codes, x.scales, weight.codes, weight.scales, streamed, activation)
        if streamed.block_n == COLUMNS.value and tuning.stream_parts(rows, shape[1], shape[0] // 2) is not None:
            return Rounded(*stream_gated(*operands, bias=bias), x.dtype)
        return rounded(stream_gated(*operands, x.dtype, bias=bias), x.codes.dtype)
    both = product(x, weight, scratch, bias)
    return Rounded(*gate_and_quantize_rows(both, x.codes.dtype, activation), x.dtype)


def _many(x: Rounded, weight: ByteWeight) -> torch.Tensor:
    if x.codes.dtype == torch.int8:
        return scale_products(torch._int_mm(x.codes, weight.codes.t()), x.scales, weight.scales, x.dtype)
    return torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=x.scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def _one_part(tuned: StreamTuning | None) -> StreamTuning | None:
    return None if tuned is None else tuned._replace(splits=1)
