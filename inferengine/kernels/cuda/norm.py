"""RMSNorm, and residual add + RMSNorm, in either order, in one pass over the row. One program per token, statistics in
float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return, for x [T, E], weight * x / sqrt(mean(x^2) + eps), same dtype (Zhang and Sennrich, 2019)."""
    out = torch.empty_like(x) if out is None else out
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, then the norm of the sum. Returns (normed, residual), both [T, E].

    The norm is taken of the sum as it is stored: the next layer adds to the same numbers.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, residual, weight, eps, out)
    return out, residual


def rms_norm_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    following: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """residual += norm of x in place, both [T, E]. Returns the norm of the sum by the weight and eps of the norm that
    follows; None where none does.

    The norm of x is rounded before it is added, as `rms_norm` stores it, and the sum before it is normed.
    """
    num_tokens, width = x.shape
    out = None if following is None else torch.empty_like(x)
    next_weight, next_eps = following or (weight, 0.0)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _rms_norm_add_kernel[(num_tokens,)](
            x,
            weight,
            residual,
            next_weight,
            residual if out is None else out,
            x.stride(0),
            residual.stride(0),
            eps,
            next_eps,
            WIDTH=width,
            BLOCK=block,
            FOLLOWING=following is not None,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(supports_pdl(x.device)),
        )
    return out


def norm_queries_keys(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
    """Norm the queries of packed qkv [T, Q + K + ...] in place, all of a token together, by q_weight [Q]; and likewise
    its keys by k_weight [K]."""
    num_queries, num_keys = len(q_weight), len(k_weight)
    if len(qkv):
        block = triton.next_power_of_2(max(num_queries, num_keys))
        _norm_queries_keys_kernel[(len(qkv), 2)](
            qkv,
            q_weight,
            k_weight,
            qkv.stride(0),
            eps,
            QUERIES=num_queries,
            KEYS=num_keys,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(supports_pdl(qkv.device)),
        )


def add_parts_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of a product left in parts [S, T, E] fp32 that are to be summed. Returns (normed, residual)."""
    num_parts, num_tokens, width = parts.shape
    out = torch.empty_like(residual)
    if num_tokens:
        block = triton.next_power_of_2(width)
        _add_parts_kernel[(num_tokens,)](
            parts,
            residual,
            weight,
            out,
            residual.stride(0),
            num_tokens,
            eps,
            WIDTH=width,
            BLOCK=block,
            PARTS=num_parts,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(supports_pdl(residual.device)),
        )
    return out, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    num_tokens, width = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(supports_pdl(x.device)),
    )


@triton.jit
def store_sum(total, residual_at, mask):
    """Store a float32 row where the residual stream lies; what was stored, as float32: what the next layer adds to."""
    stored = total.to(residual_at.dtype.element_ty)
    tl.store(residual_at, stored, mask=mask)
    return stored.to(tl.float32)


@triton.jit
def normed(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of a float32 row of WIDTH numbers, zeros behind them."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    return x * scale * weight


@triton.jit
def add_parts(total, parts_ptr, token, columns, mask, num_tokens, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Add a row's sums of a product left in parts [PARTS, num_tokens, WIDTH] fp32, in order."""
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * num_tokens + token) * WIDTH + columns, mask=mask, other=0.0)
    return total


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm x [T, WIDTH] -> out; with RESIDUAL the sum of x and the residual, which is stored there. Grid: (T,). A
    program computes one token's row."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual_row = residual_ptr + token * residual_stride + columns
        x = store_sum(x + tl.load(residual_row, mask=mask, other=0.0).to(tl.float32), residual_row, mask)
    result = normed(x, weight, eps, WIDTH)
    tl.store(out_ptr + token * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_queries_keys_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    x_stride,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm columns [0, QUERIES) and [QUERIES, QUERIES + KEYS) of x in place. Grid: (T, 2). A program computes the
    queries or the keys of one token."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    row = x_ptr + token * x_stride
    if tl.program_id(1) == 0:
        _norm_in_place(row + columns, q_weight_ptr + columns, columns < QUERIES, eps, QUERIES, PDL)
    else:
        _norm_in_place(row + QUERIES + columns, k_weight_ptr + columns, columns < KEYS, eps, KEYS, PDL)


@triton.jit
def _norm_in_place(at, weight_at, mask, eps, WIDTH: tl.constexpr, PDL: tl.constexpr):
    weight = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, normed(x, weight, eps, WIDTH).to(at.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_add_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    next_weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    eps,
    next_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLLOWING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm x [T, WIDTH], add it to the residual in place, and with FOLLOWING norm the sum -> out. Grid: (T,). A program
    computes one token's row."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if FOLLOWING:
        next_weight = tl.load(next_weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    residual_row = residual_ptr + token * residual_stride + columns
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    rounded = normed(x, weight, eps, WIDTH).to(residual_ptr.dtype.element_ty).to(tl.float32)
    total = store_sum(residual + rounded, residual_row, mask)
    if FOLLOWING:
        result = normed(total, next_weight, next_eps, WIDTH)
        tl.store(out_ptr + token * WIDTH + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_stride,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add parts [PARTS, T, WIDTH] fp32 to the residual [T, WIDTH] in place, and norm the sum -> out. Grid: (T,). A
    program computes one token's row."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    residual_row = residual_ptr + token * residual_stride + columns
    total = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    total = add_parts(total, parts_ptr, token, columns, mask, num_tokens, WIDTH, PARTS)
    result = normed(store_sum(total, residual_row, mask), weight, eps, WIDTH)
    tl.store(out_ptr + token * WIDTH + columns, result.to(out_ptr.dtype.element_ty), mask=mask)
