"""Rows of numbers into 8-bit codes with a scale each, with what surrounds it (a sum and its norm, a gated activation),
and codes back into numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.norm import add_parts, normed, store_sum
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, gain: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> codes [T, K] of `dtype` (float8_e4m3fn or int8) and scales [T, 1] fp32; with `gain`, of its norm."""
    return _launch(x, x.shape[1], dtype, gain=gain, eps=eps)


def gate_and_quantize_rows(x: torch.Tensor, dtype: torch.dtype, activation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, 2I] -> codes [T, I] and scales [T, 1] of act(x[:, :I]) * x[:, I:], by an activation of activation.py."""
    return _launch(x, x.shape[1] // 2, dtype, activation=activation)


def add_parts_norm_and_quantize(
    parts: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual [T, K] += the sum of `parts` [S, T, K] fp32, in place; codes [T, K] and scales [T, 1] of its norm."""
    return _launch(residual, residual.shape[1], dtype, gain=gain, eps=eps, parts=parts)


def _launch(
    x: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    parts: torch.Tensor | None = None,
    activation: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _quantize_kernel[(rows,)](
            x,
            x if gain is None else gain,
            x if parts is None else parts,
            codes,
            scales,
            x.stride(0),
            rows,
            eps,
            K=columns,
            BLOCK=block,
            LARGEST=LARGEST[dtype],
            WHOLE=dtype == torch.int8,
            NORM=gain is not None,
            PARTS=0 if parts is None else parts.shape[0],
            GATED=activation is not None,
            ACTIVATION=activation or 0,
            num_warps=min(16, max(4, block // 256)),
            **launch_options(supports_pdl(x.device)),
        )
    return codes, scales


def scale_products(
    products: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """int32 sums [T, N] times the scales of both factors, [T, 1] and [N] -> [T, N] of `dtype`."""
    out = torch.empty(products.shape, dtype=dtype, device=products.device)
    rows, columns = products.shape
    _scale_kernel[(rows, triton.cdiv(columns, 1024))](products, row_scales, column_scales, out, N=columns, BLOCK=1024)
    return out


def numbers_of_blocks(codes: torch.Tensor, scales: torch.Tensor, block_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """8-bit codes [N, K] and the scales of their blocks [ceil(N / block_rows), ceil(K / 128)], or [N] where
    `block_rows` is 0, as numbers."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    grid = scales.shape[-1] if block_rows else 1
    _numbers_kernel[(rows, triton.cdiv(columns, 1024))](
        codes, scales, out, K=columns, BLOCK_ROWS=max(1, block_rows), GRID=grid, BLOCKS=block_rows > 0, BLOCK=1024
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr,
    gain_ptr,
    parts_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    num_rows,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round rows to codes with a scale each: x [T, K], or [T, 2 * K] with GATED, -> codes [T, K], scales [T]. Grid:
    (T,). A program rounds one row, after the gate, the sum of the parts and the norm where it has them."""
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    if NORM:
        gain = tl.load(gain_ptr + k, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x_at = x_ptr + row * x_stride + k
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = gate(x, ACTIVATION) * tl.load(x_at + K, mask=mask, other=0.0).to(tl.float32)
    if PARTS:
        x = store_sum(add_parts(x, parts_ptr, row, k, mask, num_rows, K, PARTS), x_at, mask)
    if NORM:
        x = normed(x, gain, eps, K)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / LARGEST
    code = x / scale
    if WHOLE:
        code = tl.floor(code + 0.5)
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST)
    tl.store(codes_ptr + row * K + k, code.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _scale_kernel(products_ptr, row_scales_ptr, column_scales_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Scale int32 sums: products [T, N] * row scales [T] * column scales [N] -> out [T, N]. Grid: (T, blocks of
    columns). A program scales BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(products_ptr + row * N + n, mask=n < N, other=0).to(tl.float32)
    scale = tl.load(row_scales_ptr + row) * tl.load(column_scales_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + row * N + n, (product * scale).to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _numbers_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GRID: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantize 8-bit codes [N, K] -> out [N, K]. Grid: (N, blocks of columns). A program writes BLOCK columns of one
    row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(codes_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if BLOCKS:
        number *= tl.load(scales_ptr + row // BLOCK_ROWS * GRID + k // 128, mask=k < K, other=0.0)
    else:
        number *= tl.load(scales_ptr + row)
    tl.store(out_ptr + row * K + k, number.to(out_ptr.dtype.element_ty), mask=k < K)
