"""Adds the weighted outputs of each token's experts to the residual stream, and computes the norm that follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.norm import normed, store_sum
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous


def add_weighted(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    is_part: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual [T, E] += sum over k of weights [T, k] * outputs [T * k, E], in place and in order. Returned
    beside it: rms_norm of the sum as it is stored, where there is a `gain` [E].
    With `is_part` outputs of no weight are not read."""
    rows, width = residual.shape
    out = residual if gain is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _combine_kernel[(rows,)](
        outputs,
        weights,
        residual,
        residual if gain is None else gain,
        out,
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        K=weights.shape[1],
        NORM=gain is not None,
        PART=is_part,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(supports_pdl(residual.device)),
    )
    return residual, None if gain is None else out


@triton.jit(do_not_specialize=["eps"])
def _combine_kernel(
    outputs_ptr,
    weights_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the K weighted outputs of each token to the residual, and norm the sum.

    outputs [T * K, WIDTH], weights [T, K] fp32, residual [T, WIDTH] in place, out [T, WIDTH] with NORM. Grid: (T,). A
    program computes one token's row, its experts in order.
    """
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    if NORM:
        gain = tl.load(gain_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(weights_ptr + token * K + j)
        there = mask
        if PART:
            there = mask & (columns * 0.0 + weight != 0.0)
        total += weight * tl.load(outputs_ptr + (token * K + j) * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    residual_at = residual_ptr + token * residual_stride + columns
    total += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    stored = store_sum(total, residual_at, mask)
    if NORM:
        result = normed(stored, gain, eps, WIDTH)
        tl.store(out_ptr + token * WIDTH + columns, result.to(out_ptr.dtype.element_ty), mask=mask)
