"""Products with quantized weights on a CPU: torch's own int8 kernels where they are fast, else numbers made per call.

Weight-only int8: up to FEW tokens go through torch's bf16 x int8 kernel (the input rounded to bf16), which reads a
quarter of the bytes of fp32; more through a float product, where arithmetic is what costs. W8A8 goes through FBGEMM: it
wants 7-bit inputs on processors without VNNI, and gets them by token. FP8 and INT4 save memory here, not time.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Protocol

import torch
from torch.nn import functional

from inferengine.kernels.ops import Ops
from inferengine.kernels.reference import ops as reference
from inferengine.quantization.stored import Make, codes_from
from inferengine.quantization.weight import INT8, QuantizedWeight, dequantize

FEW = 16
STRIDE = 32  # torch's bf16 x int8 kernel reads whole vectors: past the end of rows that are no multiple of this
INPUT_LEVELS = 63  # of either sign: 7 bits, so that pairs of products fit FBGEMM's 16-bit sums
INPUT_ZERO = 64


class CpuWeight(Protocol):
    """A weight in the layout of one kernel."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] times the weight, [T, N]."""


class Numbers:
    """Codes that become numbers for each product."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] times the dequantized weight."""
        return functional.linear(x, dequantize(self.weight, torch.float32).to(x.dtype))


class Int8Weight:
    """int8 codes and a scale for each output."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.codes, scales = weight.codes, weight.scales.squeeze(1)
        self.scales = scales.clone()
        self.short = scales.bfloat16()
        self.exact = bool((self.short.float() == scales).all())
        self.ones = torch.ones_like(self.short)
        self.most_rows = FEW if weight.shape[1] % STRIDE == 0 else 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] times the weight: few rows by the bf16 x int8 kernel."""
        if x.shape[0] > self.most_rows:
            return functional.linear(x, self.codes.to(x.dtype)).mul_(self.scales.to(x.dtype))
        y = self._product(x)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the product to residual; the addition itself widens it."""
        return residual.add_(self.multiply(x) if x.shape[0] > self.most_rows else self._product(x))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply few rows; the result is bf16 where the scales are."""
        y = torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.short if self.exact else self.ones)
        return y if self.exact else y.to(x.dtype).mul_(self.scales.to(x.dtype))


class Int8Both:
    """int8 codes times inputs that are rounded by token: x = magnitude * level / INPUT_LEVELS."""

    def __init__(self, weight: QuantizedWeight) -> None:
        scales = weight.scales.squeeze(1).double()
        with warnings.catch_warnings():  # torch warns of its older quantized tensors; this kernel takes no others
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            codes = torch._make_per_channel_quantized_tensor(weight.codes, scales, zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(codes, None)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K], quantized by row, times the weight."""
        wide = x.float()
        magnitude = torch.linalg.vector_norm(wide, torch.inf, -1, keepdim=True).clamp_(min=1e-12)
        levels = wide / magnitude
        with torch._C.DisableTorchFunctionSubclass():  # see kernels/reference/ops.py: a packed weight is slow to ask
            y: torch.Tensor = _product_of_levels(levels, 1.0 / INPUT_LEVELS, INPUT_ZERO, self.packed)
        return y.mul_(magnitude).to(x.dtype)


_product_of_levels = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op


def pack(weight: QuantizedWeight) -> CpuWeight:
    """Pack the codes for the fastest kernel that fits them."""
    if weight.kind == INT8 and weight.block.columns >= weight.shape[1] and weight.block.rows == 1:
        return Int8Both(weight) if weight.int8_activations else Int8Weight(weight)
    return Numbers(weight)


def table(base: Ops, make: Make) -> Ops:
    """Return `base` with the products of quantized weights. `make` turns a float weight into codes."""

    def pack_linear(source: Any) -> CpuWeight:
        return pack(codes_from(source, make))

    def linear(x: torch.Tensor, weight: CpuWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = weight.multiply(x)
        return y if bias is None else y.add_(bias)

    def norm_linear(
        x: torch.Tensor, gain: torch.Tensor, eps: float, weight: CpuWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(base.rms_norm(x, gain, eps), weight, bias)

    def linear_add(
        x: torch.Tensor, weight: CpuWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        if bias is None and isinstance(weight, Int8Weight):
            return weight.add_to(residual, x)
        return residual.add_(linear(x, weight, bias))

    def norm_gated_linear(
        x: torch.Tensor,
        gain: torch.Tensor | None,
        eps: float,
        weight: CpuWeight,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        act = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}[activation]
        return act(linear(x, weight, bias) if gain is None else norm_linear(x, gain, eps, weight, bias))

    return dataclasses.replace(
        base,
        linear=linear,
        pack_linear=pack_linear,
        norm_linear=norm_linear,
        linear_add=linear_add,
        norm_gated_linear=norm_gated_linear,
    )
