"""Products with quantized weights on CUDA. All of it may be captured in a CUDA graph.

kernels/cuda/dispatch.py says which kernel takes how many rows. In short: `gemv_hopper` streams one row on Hopper, with
norm, gate and residual fused; elsewhere vector kernels take it. FP8 with a scale for each output then uses the FP8
tensor cores, its inputs quantized, and W8A8 the int8 ones from 65 rows (`cuda_w8a8.py`). All other weights are
converted in registers by kernels on the tensor cores, and for many rows, where arithmetic costs most, dequantized once
for each product and multiplied by cuBLAS.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.cuda import activation
from inferengine.kernels.cuda.dispatch import Kernel, KernelChoice, Operands, Product, candidates
from inferengine.kernels.cuda.gemm.gemv_hopper import GemvShape, stream_product, stream_shape
from inferengine.kernels.cuda.gemm.quantize_activations import numbers_of_blocks
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight, pack_nibbles, to_numbers
from inferengine.kernels.cuda.gemm.w4_small_m import small_m_product, small_m_product_float32
from inferengine.kernels.cuda.gemm.w4_tiles import MOST_PARTS, nibble_tile_product
from inferengine.kernels.cuda.gemm.w8 import BLOCK_COLUMNS, ByteWeight, tile_product, vector_product
from inferengine.kernels.cuda.split_k import Scratch
from inferengine.kernels.ops import Ops
from inferengine.quantization import cuda_w8a8
from inferengine.quantization.cuda_w8a8 import QuantizedInputs
from inferengine.quantization.stored import Make, codes_from
from inferengine.quantization.weight import INT4, QuantizedWeight

ACTIVATIONS = {"silu": activation.SILU, "gelu_tanh": activation.GELU_TANH}
MATRIX_TYPES = (torch.bfloat16, torch.float16)


class CudaWeight(NamedTuple):
    """A weight as the kernels read it; `inputs` is the number format that many rows of inputs are rounded to."""

    weight: Any  # ByteWeight or NibbleWeight
    num_outputs: int
    inputs: Any  # torch.dtype or None


def pack(weight: QuantizedWeight) -> CudaWeight:
    """Pack codes as the kernels read them. Raises ConfigError for blocks that they cannot read."""
    rows, columns = weight.shape
    if weight.kind == INT4:
        group = weight.block.columns
        if group < columns and group % 128 and group not in (16, 32, 64):
            raise ConfigError(
                "model.path", f"INT4 in groups of {group} is not supported on CUDA; 16, 32, 64, 128 n are"
            )
        if weight.zeros is None:
            raise RuntimeError("INT4 weights carry zero points")
        return CudaWeight(
            pack_nibbles(weight.codes, weight.scales, weight.zeros, min(group, -(-columns // 128) * 128)), rows, None
        )
    if weight.block.columns >= columns and weight.block.rows == 1:
        inputs = torch.float8_e4m3fn if weight.kind == "fp8" else torch.int8 if weight.int8_activations else None
        scales = weight.scales.reshape(-1).contiguous()
        return CudaWeight(
            ByteWeight(weight.codes, scales), rows, inputs if rows % 16 == 0 and columns % 16 == 0 else None
        )
    if weight.block.columns != BLOCK_COLUMNS:
        raise ConfigError(
            "model.path", f"blocks of {weight.block.columns} columns are not supported on CUDA; {BLOCK_COLUMNS} are"
        )
    return CudaWeight(ByteWeight(weight.codes, weight.scales.contiguous(), weight.block.rows), rows, None)


class CudaProducts:
    """Bound to one device's scratch memory, and to the table whose norms and activations it uses."""

    def __init__(self, base: Ops, make: Make, device: torch.device, *, deterministic: bool = False) -> None:
        self.base, self.make, self.deterministic = base, make, deterministic
        self.scratch = Scratch(device)

    def pack_linear(self, source: Any) -> CudaWeight:
        """Return a Linear's weight in the kernels' layout."""
        return pack(codes_from(source, self.make))

    def linear(
        self, x: torch.Tensor | QuantizedInputs, packed: CudaWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x [T, in] times the weight, [T, out]."""
        x = self._read(x, packed)
        if isinstance(x, QuantizedInputs):
            return cuda_w8a8.product(x, packed.weight, self.scratch, bias)
        return self._multiply(x, packed, bias=bias)

    def norm_linear(
        self, x: torch.Tensor, gain: torch.Tensor, eps: float, packed: CudaWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return linear(rms_norm(x)); one kernel for a single row on Hopper."""
        streamed = self._streamed(x, packed)
        if streamed is not None:
            return stream_product(x, packed.weight, streamed, bias=bias, gain=gain, eps=eps)
        return self.linear(self._normed(x, gain, eps, packed), packed, bias)

    def linear_add(
        self, x: torch.Tensor | QuantizedInputs, packed: CudaWeight, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Add linear(x) to the residual, in place."""
        x = self._read(x, packed)
        if isinstance(x, QuantizedInputs):
            return cuda_w8a8.product(x, packed.weight, self.scratch, bias, residual)
        return self._multiply(x, packed, bias=bias, residual=residual)

    def linear_add_norm(
        self,
        x: torch.Tensor | QuantizedInputs,
        packed: CudaWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, QuantizedInputs | None]:
        """Do `linear_add`, and return with it rms_norm of the sum, quantized, where the kernel that adds up the
        product's partial sums computes it; else None."""
        x = self._read(x, packed)
        if isinstance(x, QuantizedInputs) and bias is None:
            normed = cuda_w8a8.product_and_norm(x, packed.weight, self.scratch, residual, gain, eps)
            if normed is not None:
                return residual, normed
        return self.linear_add(x, packed, bias, residual), None

    def norm_gated_linear(
        self,
        x: torch.Tensor | QuantizedInputs,
        gain: torch.Tensor | None,
        eps: float,
        packed: CudaWeight,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> Any:
        """Return act(gate) * up of rms_norm(x), of x itself without a gain; the weight's first rows are the gate's. The
        result is quantized where x is."""
        act = ACTIVATIONS[activation]
        if not isinstance(x, QuantizedInputs):
            streamed = self._streamed(x, packed, gated=True)
            if streamed is not None:
                return stream_product(x, packed.weight, streamed, bias=bias, gain=gain, eps=eps, gated=act)
            if self._gates(x, packed):
                normed = x if gain is None else self.base.rms_norm(x, gain, eps)
                return self._multiply(normed, packed, bias=bias, gated=act)
        x = self._read(x, packed) if gain is None else self._normed(x, gain, eps, packed)
        if isinstance(x, QuantizedInputs):
            return cuda_w8a8.gated_product(x, packed.weight, self.scratch, act, bias)
        both = self.linear(x, packed, bias)
        return self.base.silu_and_mul(both) if activation == "silu" else self.base.gelu_tanh_and_mul(both)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _read(self, x: torch.Tensor | QuantizedInputs, packed: CudaWeight) -> torch.Tensor | QuantizedInputs:
        """Return the input of a product as its kernel reads it, quantized or not."""
        if isinstance(x, QuantizedInputs):
            return x if x.codes.dtype == packed.inputs else x.dequantize()
        return cuda_w8a8.quantize_inputs(x, packed.inputs) if self._quantizes(x, packed) else x

    def _normed(self, x: Any, gain: torch.Tensor, eps: float, packed: CudaWeight) -> torch.Tensor | QuantizedInputs:
        if self._quantizes(x, packed):
            return cuda_w8a8.quantize_inputs(x, packed.inputs, gain, eps)
        return self.base.rms_norm(x, gain, eps)

    def _candidates(self, x: torch.Tensor, packed: CudaWeight, product: Product) -> tuple[KernelChoice, ...]:
        return candidates(
            operands_of(x.dtype, packed, self.deterministic), product, x.shape[0], *shape_of(packed.weight)
        )

    def _quantizes(self, x: torch.Tensor, packed: CudaWeight) -> bool:
        """Return whether a product quantizes its input."""
        choices = self._candidates(x, packed, Product.LINEAR)
        return bool(choices) and choices[0].kernel is Kernel.QUANTIZE_INPUTS

    def _gates(self, x: torch.Tensor, packed: CudaWeight) -> bool:
        """Return whether a kernel takes product and gate together. INT4's takes whole tiles of gate and of up."""
        whole = packed.num_outputs % 32 == 0 or not isinstance(packed.weight, NibbleWeight)
        return whole and bool(self._candidates(x, packed, Product.GATED))

    def _streamed(
        self, x: torch.Tensor, packed: CudaWeight, *, gated: bool = False, adds: bool = False
    ) -> GemvShape | None:
        """Return how `gemv_hopper` multiplies x; None where it does not."""
        choices = self._candidates(x, packed, Product.GATED if gated else Product.LINEAR)
        if not choices or choices[0].kernel is not Kernel.GEMV_HOPPER:
            return None
        return stream_shape(x, packed.weight, gated=gated, adds=adds)

    def _multiply(self, x: torch.Tensor, packed: CudaWeight, **surroundings: Any) -> torch.Tensor:
        """Multiply numbers, not codes, by the first kernel that takes them. `surroundings`: bias, and residual or
        gated."""
        weight, gated = packed.weight, surroundings.get("gated") is not None
        for kernel, config in self._candidates(x, packed, Product.GATED if gated else Product.LINEAR):
            match kernel:
                case Kernel.GEMV_HOPPER:
                    adds = surroundings.get("residual") is not None
                    shape = stream_shape(x, weight, gated=gated, adds=adds)
                    if shape is not None:
                        return stream_product(x, weight, shape, **surroundings)
                case Kernel.W8_GEMV:
                    return vector_product(x, weight, config, **surroundings)
                case Kernel.W8_TILE:
                    return tile_product(x, weight, config, self.scratch, **surroundings)
                case Kernel.W4_TILE:
                    return nibble_tile_product(x, weight, config, self.scratch, **surroundings)
                case Kernel.W4_SMALL_M if x.dtype in MATRIX_TYPES:
                    return small_m_product(x, weight, config, **surroundings)
                case Kernel.W4_SMALL_M:
                    return _around(small_m_product_float32(x, weight, config), **surroundings)
        if isinstance(weight, NibbleWeight):
            numbers = to_numbers(weight, x.dtype)
        else:
            numbers = numbers_of_blocks(weight.codes, weight.scales, weight.block_rows, x.dtype)
        return _around(functional.linear(x, numbers), **surroundings)


def operands_of(dtype: torch.dtype, packed: CudaWeight, deterministic: bool) -> Operands:
    """Return what `dispatch.candidates` is asked for where inputs of `dtype` meet a packed weight."""
    is_fp32 = dtype not in MATRIX_TYPES
    if isinstance(packed.weight, NibbleWeight):
        if deterministic:
            return Operands.W4_EXACT
        if is_fp32:
            return Operands.W4_FP32
        return Operands.W4 if packed.weight.parts <= MOST_PARTS else Operands.W4_SMALL_GROUPS
    if deterministic:
        return Operands.W8_FP32_EXACT if is_fp32 else Operands.W8_EXACT
    if is_fp32:
        return Operands.W8_FP32
    return {None: Operands.W8, torch.int8: Operands.W8A8, torch.float8_e4m3fn: Operands.FP8}[packed.inputs]


def shape_of(weight: ByteWeight | NibbleWeight) -> tuple[int, int]:
    """Return a packed weight's rows and columns, as `dispatch.candidates` is asked for them."""
    if isinstance(weight, NibbleWeight):
        return weight.rows, weight.columns
    return weight.codes.shape[0], weight.codes.shape[1]


def table(base: Ops, make: Make, device: torch.device, *, deterministic: bool = False) -> Ops:
    """Return `base` with the products of quantized weights. `make` turns a float weight into codes."""
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
    if bias is not None:
        y.add_(bias)
    return y if residual is None else residual.add_(y)
