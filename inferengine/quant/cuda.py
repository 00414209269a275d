"""Products with quantized weights on CUDA: which kernel takes how many rows. All of it may be captured in a graph.

One row of 8-bit codes: vector kernels, with gate and residual inside. More: FP8 with a scale for each output goes
through the FP8 tensor cores (inputs rounded by token; own tiles up to 64 or 128 rows, torch's beyond), W8A8 from
65 rows through the int8 ones; all else takes tiles on the tensor cores, codes made into numbers in registers. INT4 has
one kernel from one row on. From 257 rows (INT4: 65), where arithmetic is what costs, those are made into numbers once
for each product and left to cuBLAS.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels import activation, quantized, quantized_int4
from inferengine.kernels.ops import Ops
from inferengine.kernels.quantize_rows import numbers_of_blocks, quantize_rows, scale_products
from inferengine.kernels.quantized import BLOCK_COLUMNS, ByteWeight
from inferengine.kernels.quantized_fragments import fragment_product, fragment_product_float32
from inferengine.kernels.quantized_int4 import NibbleWeight, pack_nibbles
from inferengine.kernels.scratch import Scratch
from inferengine.quant import tuning
from inferengine.quant.source import Make, codes_from
from inferengine.quant.weight import INT4, QuantizedWeight

ACTIVATIONS = {"silu": activation.SILU, "gelu_tanh": activation.GELU_TANH}
MATRIX_TYPES = (torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """A weight as the kernels read it; `inputs` is the number format that many rows of inputs are rounded to."""

    weight: ByteWeight | NibbleWeight
    num_outputs: int
    inputs: torch.dtype | None


def pack(weight: QuantizedWeight) -> Packed:
    """The kernels' layout. Raises ConfigError for blocks that they cannot read."""
    rows, columns = weight.shape
    if weight.kind == INT4:
        group = weight.block.columns
        if group < columns and group % 128 and group not in (16, 32, 64):
            raise ConfigError(
                "model.path", f"INT4 in groups of {group} is not supported on CUDA; 16, 32, 64, 128 n are"
            )
        if weight.zeros is None:
            raise RuntimeError("INT4 weights carry zero points")
        return Packed(
            pack_nibbles(weight.codes, weight.scales, weight.zeros, min(group, -(-columns // 128) * 128)), rows, None
        )
    if weight.block.columns >= columns and weight.block.rows == 1:
        inputs = torch.float8_e4m3fn if weight.kind == "fp8" else torch.int8 if weight.int8_activations else None
        scales = weight.scales.reshape(-1).contiguous()
        return Packed(ByteWeight(weight.codes, scales), rows, inputs if rows % 16 == 0 and columns % 16 == 0 else None)
    if weight.block.columns != BLOCK_COLUMNS:
        raise ConfigError(
            "model.path", f"blocks of {weight.block.columns} columns are not supported on CUDA; {BLOCK_COLUMNS} are"
        )
    return Packed(ByteWeight(weight.codes, weight.scales.contiguous(), weight.block.rows), rows, None)


class CudaProducts:
    """Bound to one device's scratch memory, and to the table whose norms and activations it uses."""

    def __init__(self, base: Ops, make: Make, device: torch.device, *, deterministic: bool = False) -> None:
        self.base, self.make, self.deterministic = base, make, deterministic
        self.scratch = Scratch(device)

    def pack_linear(self, source: Any) -> Packed:
        return pack(codes_from(source, self.make))

    def linear(self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        if self._one(x, packed):
            return self._vector(x, packed, bias=bias)
        if self._few(x, packed):
            return self._tile(x, packed, bias=bias)
        if _rounds_inputs(x, packed):
            return self._rounded(*quantize_rows(x, packed.inputs), packed, x.dtype, bias)
        return _plus(self._many(x, packed), bias)

    def norm_linear(
        self, x: torch.Tensor, gain: torch.Tensor, eps: float, packed: Packed, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """linear(rms_norm(x))"""
        if self._one(x, packed) or self._few(x, packed) or not _rounds_inputs(x, packed):
            return self.linear(self.base.rms_norm(x, gain, eps), packed, bias)
        return self._rounded(*quantize_rows(x, packed.inputs, gain, eps), packed, x.dtype, bias)

    def linear_add(
        self, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """residual += linear(x), in place."""
        if self._one(x, packed):
            return self._vector(x, packed, bias=bias, residual=residual)
        if self._few(x, packed):
            return self._tile(x, packed, bias=bias, residual=residual)
        if _rounds_inputs(x, packed):
            return self._rounded(*quantize_rows(x, packed.inputs), packed, x.dtype, bias, residual)
        return residual.add_(_plus(self._many(x, packed), bias))

    def norm_gated_linear(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        packed: Packed,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """act(gate) * up of rms_norm(x), the gate's rows first."""
        if self._one(x, packed) and (packed.num_outputs % 32 == 0 or not isinstance(packed.weight, NibbleWeight)):
            normed = self.base.rms_norm(x, gain, eps)
            return self._vector(normed, packed, bias=bias, gated=ACTIVATIONS[activation])
        both = self.norm_linear(x, gain, eps, packed, bias)
        return self.base.silu_and_mul(both) if activation == "silu" else self.base.gelu_tanh_and_mul(both)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _one(self, x: torch.Tensor, packed: Packed) -> bool:
        """Whether x is one row that goes its own way. INT4's kernel takes 16 bits."""
        takes = x.dtype in MATRIX_TYPES or not isinstance(packed.weight, NibbleWeight)
        return x.shape[0] == 1 and takes and not self.deterministic

    def _few(self, x: torch.Tensor, packed: Packed) -> bool:
        if self.deterministic:
            return True
        if isinstance(packed.weight, NibbleWeight):
            return x.shape[0] <= tuning.MOST_FRAGMENT_ROWS
        rounds = _rounds_inputs(x, packed)
        return x.shape[0] <= (tuning.MOST_EXACT_ROWS[packed.inputs] if rounds else tuning.MOST_TILE_ROWS)

    def _vector(self, x: torch.Tensor, packed: Packed, **surroundings: Any) -> torch.Tensor:
        weight, gated = packed.weight, surroundings.get("gated") is not None
        if isinstance(weight, NibbleWeight):
            tuned = tuning.fragments(1, weight.rows, weight.columns, gated)
            return fragment_product(x, weight, tuned, **surroundings)
        tuned = tuning.byte_vector(*weight.codes.shape, gated, blocks=weight.block_rows > 0)
        return quantized.vector_product(x, weight, tuned, **surroundings)

    def _tile(self, x: torch.Tensor, packed: Packed, **surroundings: Any) -> torch.Tensor:
        weight = packed.weight
        rows = None if self.deterministic else x.shape[0]
        if isinstance(weight, NibbleWeight):
            tuned = tuning.fragments(rows, weight.rows, weight.columns, gated=False)
            if x.dtype in MATRIX_TYPES:
                return fragment_product(x, weight, tuned, **surroundings)
            return _around(fragment_product_float32(x, weight, tuned), **surroundings)
        tuned = tuning.byte_tile(rows, *weight.codes.shape, x.element_size())
        return quantized.tile_product(x, weight, tuned, self.scratch, **surroundings)

    def _rounded(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        packed: Packed,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rounded inputs [T, in] and their scales [T, 1] times the weight, on the 8-bit tensor cores -> [T, out]."""
        weight = packed.weight
        tuned = None
        if codes.dtype == torch.float8_e4m3fn:
            tuned = tuning.code_tile(codes.shape[0], *weight.codes.shape)
        if tuned is not None:
            return quantized.tile_product(
                codes, weight, tuned, self.scratch, bias=bias, residual=residual, input_scales=scales, dtype=dtype
            )
        product = _plus(_rounded_product(codes, scales, packed, dtype), bias)
        return product if residual is None else residual.add_(product)

    def _many(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        weight = packed.weight
        if isinstance(weight, NibbleWeight):
            return functional.linear(x, quantized_int4.to_numbers(weight, x.dtype))
        return functional.linear(x, numbers_of_blocks(weight.codes, weight.scales, weight.block_rows, x.dtype))


def table(base: Ops, make: Make, device: torch.device, *, deterministic: bool = False) -> Ops:
    """`base` with the products of quantized weights. `make` turns a float weight into codes."""
    products = CudaProducts(base, make, device, deterministic=deterministic)
    return dataclasses.replace(
        base,
        linear=products.linear,
        pack_linear=products.pack_linear,
        norm_linear=products.norm_linear,
        linear_add=products.linear_add,
        linear_add_norm=None,
        norm_gated_linear=products.norm_gated_linear,
    )


def _around(y: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
    y = _plus(y, bias)
    return y if residual is None else residual.add_(y)


def _rounded_product(codes: torch.Tensor, scales: torch.Tensor, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Rounded inputs [T, in] and their scales [T, 1] times the weight, on the 8-bit tensor cores -> [T, out]."""
    weight = packed.weight
    if not isinstance(weight, ByteWeight):
        raise RuntimeError("only 8-bit weights are multiplied with rounded inputs")
    if codes.dtype == torch.int8:
        return scale_products(torch._int_mm(codes, weight.codes.t()), scales, weight.scales, dtype)
    return torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _rounds_inputs(x: torch.Tensor, packed: Packed) -> bool:
    return packed.inputs is not None and x.dtype in MATRIX_TYPES


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)
