"""Products with quantized weights on CUDA: which kernel takes how many rows. All of it may be captured in a graph.

One row is streamed on Hopper, with norm, gate and residual inside; elsewhere vector kernels take it. More: FP8 with a
scale for each output goes through the FP8 tensor cores, its inputs rounded, W8A8 from 65 rows through the int8 ones
(rounded.py); all else takes tiles on the tensor cores, codes made into numbers in registers, INT4 from 17 rows on. From
257 rows (INT4: 129), where arithmetic is what costs, those are made into numbers once for each product and left to
cuBLAS.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.cuda import activation
from inferengine.kernels.cuda.gemm import w4_layout as quantized_int4
from inferengine.kernels.cuda.gemm import w8 as quantized
from inferengine.kernels.cuda.gemm.gemv_hopper.kernel import Shape
from inferengine.kernels.cuda.gemm.gemv_hopper.launch import stream_product, stream_shape
from inferengine.kernels.cuda.gemm.quantize_activations import numbers_of_blocks
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight, pack_nibbles
from inferengine.kernels.cuda.gemm.w4_small_m import fragment_product, fragment_product_float32
from inferengine.kernels.cuda.gemm.w4_tiles import MOST_PARTS, nibble_tile_product
from inferengine.kernels.cuda.gemm.w8 import BLOCK_COLUMNS, ByteWeight
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.kernels.ops import Ops
from inferengine.quantization import cuda_w8a8 as rounded
from inferengine.quantization import tuning
from inferengine.quantization.cuda_w8a8 import Rounded
from inferengine.quantization.stored import Make, codes_from
from inferengine.quantization.weight import INT4, QuantizedWeight

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

    def linear(self, x: torch.Tensor | Rounded, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        x = self._read(x, packed)
        if isinstance(x, Rounded):
            return rounded.product(x, packed.weight, self.scratch, bias)
        if self._one(x, packed):
            return self._vector(x, packed, bias=bias)
        if self._few(x, packed):
            return self._tile(x, packed, bias=bias)
        return _plus(self._many(x, packed), bias)

    def norm_linear(
        self, x: torch.Tensor, gain: torch.Tensor, eps: float, packed: Packed, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """linear(rms_norm(x))"""
        streamed = self._streamed(x, packed)
        if streamed is not None:
            return stream_product(x, packed.weight, streamed, bias=bias, gain=gain, eps=eps)
        return self.linear(self._normed(x, gain, eps, packed), packed, bias)

    def linear_add(
        self, x: torch.Tensor | Rounded, packed: Packed, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """residual += linear(x), in place."""
        x = self._read(x, packed)
        if isinstance(x, Rounded):
            return rounded.product(x, packed.weight, self.scratch, bias, residual)
        if self._one(x, packed):
            return self._vector(x, packed, bias=bias, residual=residual)
        if self._few(x, packed):
            return self._tile(x, packed, bias=bias, residual=residual)
        return residual.add_(_plus(self._many(x, packed), bias))

    def linear_add_norm(
        self,
        x: torch.Tensor | Rounded,
        packed: Packed,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, Rounded | None]:
        """`linear_add`, and rms_norm of the sum, rounded, where a kernel that adds up the product's parts has it."""
        x = self._read(x, packed)
        if isinstance(x, Rounded) and bias is None:
            normed = rounded.product_and_norm(x, packed.weight, self.scratch, residual, gain, eps)
            if normed is not None:
                return residual, normed
        return self.linear_add(x, packed, bias, residual), None

    def norm_gated_linear(
        self,
        x: torch.Tensor | Rounded,
        gain: torch.Tensor | None,
        eps: float,
        packed: Packed,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor | Rounded:
        """act(gate) * up of rms_norm(x), of x itself without a gain; the gate's rows first. Rounded where x is."""
        streamed = self._streamed(x, packed, gated=True)
        if streamed is not None:
            return stream_product(
                x, packed.weight, streamed, bias=bias, gain=gain, eps=eps, gated=ACTIVATIONS[activation]
            )
        whole = packed.num_outputs % 32 == 0 or not isinstance(packed.weight, NibbleWeight)
        if whole and not isinstance(x, Rounded) and self._one(x, packed):
            normed = x if gain is None else self.base.rms_norm(x, gain, eps)
            return self._vector(normed, packed, bias=bias, gated=ACTIVATIONS[activation])
        x = self._read(x, packed) if gain is None else self._normed(x, gain, eps, packed)
        if isinstance(x, Rounded):
            return rounded.gated(x, packed.weight, self.scratch, ACTIVATIONS[activation], bias)
        both = self.linear(x, packed, bias)
        return self.base.silu_and_mul(both) if activation == "silu" else self.base.gelu_tanh_and_mul(both)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _read(self, x: torch.Tensor | Rounded, packed: Packed) -> torch.Tensor | Rounded:
        """The input of a product as its kernel reads it: codes where many rows are rounded, numbers elsewhere."""
        if isinstance(x, Rounded):
            return x if x.codes.dtype == packed.inputs else x.numbers()
        return rounded.rounded(x, packed.inputs) if self._rounds(x, packed) else x

    def _normed(self, x: torch.Tensor, gain: torch.Tensor, eps: float, packed: Packed) -> torch.Tensor | Rounded:
        if self._rounds(x, packed):
            return rounded.rounded(x, packed.inputs, gain, eps)
        return self.base.rms_norm(x, gain, eps)

    def _rounds(self, x: torch.Tensor, packed: Packed) -> bool:
        return _rounds_inputs(x, packed) and not self._one(x, packed) and not self._few(x, packed)

    def _one(self, x: torch.Tensor, packed: Packed) -> bool:
        """Whether x is one row that goes its own way. INT4's kernel takes 16 bits."""
        takes = x.dtype in MATRIX_TYPES or not isinstance(packed.weight, NibbleWeight)
        return x.shape[0] == 1 and takes and not self.deterministic

    def _few(self, x: torch.Tensor, packed: Packed) -> bool:
        if self.deterministic:
            return True
        if isinstance(packed.weight, NibbleWeight):
            return x.shape[0] <= (
                tuning.MOST_NIBBLE_ROWS if _takes_tiles(x, packed.weight) else tuning.MOST_FRAGMENT_ROWS
            )
        rounds = _rounds_inputs(x, packed)
        return x.shape[0] <= (tuning.MOST_EXACT_ROWS[packed.inputs] if rounds else tuning.MOST_TILE_ROWS)

    def _streamed(
        self, x: torch.Tensor | Rounded, packed: Packed, *, gated: bool = False, adds: bool = False
    ) -> Shape | None:
        """How one row is streamed; None where other kernels take it."""
        if self.deterministic or isinstance(x, Rounded):
            return None
        return stream_shape(x, packed.weight, gated=gated, adds=adds)

    def _vector(self, x: torch.Tensor, packed: Packed, **surroundings: Any) -> torch.Tensor:
        weight, gated = packed.weight, surroundings.get("gated") is not None
        streamed = self._streamed(x, packed, gated=gated, adds=surroundings.get("residual") is not None)
        if streamed is not None:
            return stream_product(x, weight, streamed, **surroundings)
        if isinstance(weight, NibbleWeight):
            tuned = tuning.fragments(1, weight.rows, weight.columns, gated)
            return fragment_product(x, weight, tuned, **surroundings)
        tuned = tuning.byte_vector(*weight.codes.shape, gated, blocks=weight.block_rows > 0)
        return quantized.vector_product(x, weight, tuned, **surroundings)

    def _tile(self, x: torch.Tensor, packed: Packed, **surroundings: Any) -> torch.Tensor:
        weight = packed.weight
        rows = None if self.deterministic else x.shape[0]
        if isinstance(weight, NibbleWeight):
            tiled = None
            if rows is not None and _takes_tiles(x, weight):
                tiled = tuning.nibble_tile(rows, weight.rows, weight.columns)
            if tiled is not None:
                return nibble_tile_product(x, weight, tiled, self.scratch, **surroundings)
            tuned = tuning.fragments(rows, weight.rows, weight.columns, gated=False)
            if x.dtype in MATRIX_TYPES:
                return fragment_product(x, weight, tuned, **surroundings)
            return _around(fragment_product_float32(x, weight, tuned), **surroundings)
        tuned = tuning.byte_tile(rows, *weight.codes.shape, x.element_size())
        return quantized.tile_product(x, weight, tuned, self.scratch, **surroundings)

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
        linear_add_norm=products.linear_add_norm,
        norm_gated_linear=products.norm_gated_linear,
        reads_codes=True,
    )


def _around(y: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
    y = _plus(y, bias)
    return y if residual is None else residual.add_(y)


def _takes_tiles(x: torch.Tensor, weight: NibbleWeight) -> bool:
    return x.dtype in MATRIX_TYPES and weight.parts <= MOST_PARTS


def _rounds_inputs(x: torch.Tensor, packed: Packed) -> bool:
    return packed.inputs is not None and x.dtype in MATRIX_TYPES


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias)
