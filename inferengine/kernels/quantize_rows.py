"""Rows of numbers into 8-bit codes with a scale each, optionally RMS-normed on the way, and codes back into numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, gain: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> codes [T, K] of `dtype` (float8_e4m3fn or int8) and scales [T, 1] fp32; with `gain`, of its norm."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _quantize_kernel[(rows,)](
            x,
            x if gain is None else gain,
            codes,
            scales,
            x.stride(0),
            eps,
            K=columns,
            BLOCK=block,
            LARGEST=LARGEST[dtype],
            WHOLE=dtype == torch.int8,
            NORM=gain is not None,
            num_warps=min(16, max(4, block // 1024)),
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


@triton.jit
def _quantize_kernel(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * tl.load(gain_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / LARGEST
    code = x / scale
    if WHOLE:
        code = tl.floor(code + 0.5)
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST)
    tl.store(codes_ptr + row * K + k, code.to(codes_ptr.dtype.element_ty), mask=k < K)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _scale_kernel(products_ptr, row_scales_ptr, column_scales_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
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
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(codes_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if BLOCKS:
        number *= tl.load(scales_ptr + row // BLOCK_ROWS * GRID + k // 128, mask=k < K, other=0.0)
    else:
        number *= tl.load(scales_ptr + row)
    tl.store(out_ptr + row * K + k, number.to(out_ptr.dtype.element_ty), mask=k < K)
