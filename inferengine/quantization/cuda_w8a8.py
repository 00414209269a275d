"""Products on CUDA whose inputs are quantized to 8 bits as well as the weight (W8A8).

The kernel that computes an input quantizes it where that is possible, and hands codes on: the norm that sums a
product's partial sums, and the gated activation. kernels/cuda/dispatch.py says which kernel takes how many rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, Operands, Product, candidates
from inferengine.kernels.cuda.gemm.quantize_activations import (
    add_parts_norm_and_quantize,
    gate_and_quantize_rows,
    quantize_rows,
    scale_products,
)
from inferengine.kernels.cuda.gemm.w8 import ByteWeight, tile_product
from inferengine.kernels.cuda.gemm.w8a8_stream_hopper import (
    COLUMNS,
    fits,
    stream_gated,
    stream_parts,
    stream_product,
)
from inferengine.kernels.cuda.split_k import Scratch

FP8 = torch.float8_e4m3fn


class QuantizedInputs(NamedTuple):
    """Inputs as codes [T, K] e4m3 or int8, of numbers that were `dtype`. Scales fp32: [T, 1], or [K / 128, T], one for
    each 128 columns."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape == (self.codes.shape[0], 1)

    @property
    def operands(self) -> Operands:
        """What `dispatch.candidates` is asked for."""
        if self.codes.dtype != FP8:
            return Operands.INT8_CODES
        return Operands.FP8_CODES if self.by_row else Operands.FP8_BLOCK_CODES

    def dequantize(self) -> torch.Tensor:
        """Return the numbers [T, K], for a product that reads no codes."""
        numbers = self.codes.float()
        if self.by_row:
            return numbers.mul_(self.scales).to(self.dtype)
        blocks = numbers.view(len(numbers), -1, COLUMNS.value)
        return blocks.mul_(self.scales.t()[:, :, None]).view(numbers.shape).to(self.dtype)


def quantize_inputs(
    x: torch.Tensor, to: torch.dtype, gain: torch.Tensor | None = None, eps: float = 0.0
) -> QuantizedInputs:
    """Quantize x [T, K], or with `gain` its norm, with a scale for each row."""
    return QuantizedInputs(*quantize_rows(x, to, gain, eps), x.dtype)


def product(
    x: QuantizedInputs,
    weight: ByteWeight,
    scratch: Scratch,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product [T, out]; `residual` is added in place."""
    choice = _choose(x, weight, Product.LINEAR)
    if choice is None and not x.by_row:
        x = quantize_inputs(x.dequantize(), x.codes.dtype)
        choice = _choose(x, weight, Product.LINEAR)
    if choice is not None and choice.kernel is Kernel.STREAM:
        return stream_product(
            x.codes, x.scales, weight.codes, weight.scales, choice.config, x.dtype, bias=bias, residual=residual
        )
    if choice is not None:
        return tile_product(
            x.codes, weight, choice.config, scratch, bias=bias, residual=residual, input_scales=x.scales, dtype=x.dtype
        )
    y = _library_product(x, weight)
    if bias is not None:
        y.add_(bias)
    return y if residual is None else residual.add_(y)


def product_and_norm(
    x: QuantizedInputs, weight: ByteWeight, scratch: Scratch, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> QuantizedInputs | None:
    """Add the product to the residual and return the norm of the sum, quantized. None, and nothing done, where this is
    not faster."""
    choice = _choose(x, weight, Product.PARTS)
    if choice is None:
        return None
    parts = stream_parts(x.codes, x.scales, weight.codes, weight.scales, choice.config, scratch)
    return QuantizedInputs(*add_parts_norm_and_quantize(parts, residual, gain, eps, x.codes.dtype), x.dtype)


def gated_product(
    x: QuantizedInputs, weight: ByteWeight, scratch: Scratch, activation: int, bias: torch.Tensor | None = None
) -> QuantizedInputs:
    """Return act(gate) * up of the product, quantized [T, out / 2]; the gate's rows are the weight's first."""
    choice = _choose(x, weight, Product.GATED)
    if choice is None:
        both = product(x, weight, scratch, bias)
        return QuantizedInputs(*gate_and_quantize_rows(both, x.codes.dtype, activation), x.dtype)
    rows, (width, columns) = x.codes.shape[0], weight.codes.shape
    operands = (x.codes, x.scales, weight.codes, weight.scales, choice.config, activation)
    # The product that follows goes back from the gated width to the columns of this one.
    if choice.config.block_n == COLUMNS.value and candidates(x.operands, Product.PARTS, rows, columns, width // 2):
        blocks: Any = stream_gated(*operands, bias=bias)
        return QuantizedInputs(blocks.codes, blocks.scales, x.dtype)
    numbers: Any = stream_gated(*operands, x.dtype, bias=bias)
    return quantize_inputs(numbers, x.codes.dtype)


def _choose(x: QuantizedInputs, weight: ByteWeight, product: Product) -> KernelChoice | None:
    """Return the best kernel that takes these tensors; None: none does."""
    rows, is_gated = x.codes.shape[0], product is Product.GATED
    for choice in candidates(x.operands, product, rows, *weight.codes.shape):
        if choice.kernel is not Kernel.STREAM or fits(rows, weight.codes, choice.config, gated=is_gated):
            return choice
    return None


def _library_product(x: QuantizedInputs, weight: ByteWeight) -> torch.Tensor:
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
