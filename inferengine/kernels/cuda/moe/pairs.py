"""Products of few pairs of token and expert on the vector units. Each row of the chosen experts' weights is read once.

The kernel is that of dense_small_m.gemv, with the weight found by the expert's number. Rows of gate and up alternate.
If two pairs share an expert, its weight comes from the cache the second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.codes import widened
from inferengine.kernels.cuda.moe.configurations import PairConfig
from inferengine.kernels.cuda.moe.gating import ACTIVATIONS, gated
from inferengine.kernels.cuda.moe.grouped import FP8, FP8_GROUPS, NUMBERS, ExpertMatrix
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.experts import Gating


def reads(weight: ExpertMatrix, tuned: PairConfig) -> bool:
    """Return whether the kernel supports this weight.

    4-bit codes are not supported, because the tensor cores' kernels unpack them faster. INT8 is not supported. Scales
    of groups are supported only if all rows of a tile share them.
    """
    shares = weight.kind != FP8_GROUPS or weight.shared_rows % (2 * tuned.block_n) == 0
    return weight.kind in (NUMBERS, FP8, FP8_GROUPS) and shares


def multiply_pairs(
    x: torch.Tensor,
    weight: ExpertMatrix,
    ids: torch.Tensor,
    tuned: PairConfig,
    *,
    gating: Gating | None = None,
    is_part: bool = False,
) -> torch.Tensor:
    """Multiply x by the weights of the chosen experts.

    With `gating`: x [T, K], one row for each token -> [T * k, rows / 2] by pair number. Without: x [T * k, K] ->
    [T * k, rows]. With `is_part`, results of pairs whose expert has the number after the last are not written.
    """
    num_pairs = ids.numel()
    width = weight.rows // 2 if gating is not None else weight.rows
    out = x.new_empty(num_pairs, width)
    _pair_kernel[(triton.cdiv(width, tuned.block_n), num_pairs)](
        x,
        weight.codes,
        weight.codes if weight.scales is None else weight.scales,
        x if weight.bias is None else weight.bias,
        ids,
        out,
        x.stride(0),
        0.0 if gating is None else gating.alpha,
        0.0 if gating is None else gating.limit,
        N=weight.rows,
        K=weight.columns,
        CHOSEN=ids.shape[1],
        BLOCK_N=tuned.block_n,
        BLOCK_K=tuned.block_k,
        KIND=weight.kind,
        BIAS=weight.bias is not None,
        GATED=gating is not None,
        EXPERTS=weight.num_experts,
        PART=is_part,
        ACTIVATION=0 if gating is None else ACTIVATIONS[gating.activation],
        HARDWARE=x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit
def _loaded(at, mask, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    codes = tl.load(at, mask=mask, other=0.0)
    if KIND == 0:
        return codes.to(tl.float32)
    else:
        return widened(codes, HARDWARE).to(tl.float32)


@triton.jit(do_not_specialize=["alpha", "limit"])
def _pair_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    x_stride,
    alpha,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply each pair of token and expert by itself, on the vector units.

    x [T or T * k, K], codes and scales as ExpertMatrix has them, out [T * k, WIDTH]. Grid: (blocks of outputs, T * k).
    A program computes BLOCK_N outputs of one pair; with GATED rows of gate and up alternate in the weight.
    """
    WIDTH: tl.constexpr = N // 2 if GATED else N
    STEP: tl.constexpr = 2 if GATED else 1
    pair = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    allow_next(PDL)
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if PART:
        if expert >= EXPERTS:
            return
    if GATED:
        x_at = x_ptr + (pair // CHOSEN).to(tl.int64) * x_stride
    else:
        x_at = x_ptr + pair.to(tl.int64) * x_stride
    row = expert * N + tl.minimum(n, WIDTH - 1) * STEP
    codes_at = codes_ptr + row[:, None] * K + tl.max_contiguous(k, 8)[None, :]
    if KIND == 2:
        GROUPS: tl.constexpr = (K + 127) // 128
        scales_at = scales_ptr + expert * (N * GROUPS) + tl.program_id(0) * BLOCK_N * STEP
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.load(x_at + start + k, mask=inside, other=0.0).to(tl.float32)
        left = _loaded(codes_at + start, inside[None, :], KIND, HARDWARE)
        if GATED:
            right = _loaded(codes_at + K + start, inside[None, :], KIND, HARDWARE)
        if KIND == 2:
            group = tl.minimum(start + k, K - 1) // 128 * N
            acc += left * (x * tl.load(scales_at + group))[None, :]
            if GATED:
                acc_up += right * (x * tl.load(scales_at + group + 1))[None, :]
        else:
            acc += left * x[None, :]
            if GATED:
                acc_up += right * x[None, :]
    result = tl.sum(acc, axis=1)
    if KIND == 1:
        result = result * tl.load(scales_ptr + row)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, axis=1)
        if KIND == 1:
            up = up * tl.load(scales_ptr + row + 1)
        if BIAS:
            up += tl.load(bias_ptr + row + 1).to(tl.float32)
        result = gated(result, up, ACTIVATION, alpha, limit)
    tl.store(out_ptr + pair.to(tl.int64) * WIDTH + n, result.to(out_ptr.dtype.element_ty), mask=n < WIDTH)
