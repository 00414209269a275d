"""Split of the packed qkv, optional per-head RMSNorm of q and k, NeoX RoPE, and the KV write, in one kernel.

One program takes a few heads of one token. The rotation partner of element d is element (d + D/2) mod D of the same
head, so it is simply loaded again with rotated indices: the second load hits L1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.batch import USUAL_KEYS, NewKeys
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

HEADS_PER_PROGRAM = 8
WIDE_HEADS_PER_PROGRAM = 4  # of more than 256 elements


def qkv_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    new_keys: NewKeys = USUAL_KEYS,
) -> torch.Tensor:
    """qkv [T, (H+2K)*D] -> q [T, H, D] rotated; k and v of the token go to kv at slot_mapping (negative: nowhere).
    `new_keys`: what else is packed.

    `q_norm` and `k_norm` are [D] or None, `cos_sin` [max_pos, D] (cos, then sin; None: no rotation), `positions` [T],
    `slot_mapping` [T] int64 = block * block_size + offset, `kv` [num_blocks, 2, K, block_size, D]. `kv_scales` divide
    k and v before they are stored: 1 unless the cache is FP8.
    """
    num_tokens, head_dim = qkv.shape[0], kv.shape[-1]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return q
    new_heads = num_kv_heads if new_keys.has_keys else 0
    key_norm = q_norm if k_norm is None else k_norm  # a layer without keys of its own has none, and reads none
    heads, each = num_heads + 2 * new_heads, HEADS_PER_PROGRAM if head_dim <= 256 else WIDE_HEADS_PER_PROGRAM
    _rope_write_kernel[(num_tokens, triton.cdiv(heads, each))](
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if key_norm is None else key_norm,
        qkv if cos_sin is None else cos_sin,
        positions,
        slot_mapping,
        kv,
        q,
        qkv.stride(0),
        eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=new_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=kv.shape[3],
        HEADS=each,
        QK_NORM=q_norm is not None,
        VALUE_NORM=new_keys.value_norm,
        VALUE_BEHIND=new_heads if new_keys.has_values else 0,
        ROPE=cos_sin is not None,
        num_warps=4,
        **launch_options(supports_pdl(qkv.device)),
    )
    return q


@triton.jit
def normed_rotated(
    row_ptr,
    norm_ptr,
    cos_sin_row,
    eps,
    mask,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Heads at `row_ptr` [heads, 1] -> float32 [heads, BLOCK_D], normed by `norm_ptr` ([D], or [heads, 1] pointers)
    and rotated to the position whose cos and sin begin at `cos_sin_row`."""
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = mask & (d < D)
    x = tl.load(row_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * scale * tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        HALF: tl.constexpr = D // 2
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(row_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            y = y * scale * tl.load(norm_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        angle = tl.where(d < HALF, d, d - HALF)
        cos = tl.load(cos_sin_row + angle, mask=d < D, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin_row + HALF + angle, mask=d < D, other=0.0).to(tl.float32)
        x = x * cos + tl.where(d < HALF, -y, y) * sin
    return x


@triton.jit
def _rope_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    kv_ptr,
    q_ptr,
    qkv_stride,
    eps,
    k_scale,
    v_scale,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    QK_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    VALUE_BEHIND: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and rotate queries and keys of qkv [T, (H + 2 K) * D]; queries -> q [T, H, D], keys and values -> the cache
    at their slots. Grid: (T, groups of HEADS heads). A program computes HEADS of one token's query, key and value
    heads. A value lies VALUE_BEHIND heads behind its key: K, or 0 where keys are values."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    cos_sin_row = cos_sin_ptr
    if ROPE:  # a column of the step: no kernel of the step writes it
        cos_sin_row += tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM
    wait_for_previous(PDL)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    in_dim = d < HEAD_DIM
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    row = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    norm_row = q_norm_ptr
    if QK_NORM:
        norm_row = tl.where(head < NUM_HEADS, q_norm_ptr, k_norm_ptr)
    x = normed_rotated(
        row, norm_row, cos_sin_row, eps, head < NUM_HEADS + NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, QK_NORM, ROPE
    )
    value_row = row - tl.where(is_value, NUM_KV_HEADS - VALUE_BEHIND, 0) * HEAD_DIM
    value = tl.load(value_row + d, mask=exists & is_value & in_dim, other=0.0).to(tl.float32)
    if VALUE_NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]
    q_at = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM + d
    tl.store(q_at, x.to(q_ptr.dtype.element_ty), mask=(head < NUM_HEADS) & in_dim)

    stored = tl.where(is_value, value * v_scale, x * k_scale).to(kv_ptr.dtype.element_ty)
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    slot = tl.load(slot_mapping_ptr + token + 0 * head).to(tl.int64)
    kv_at = kv_ptr + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
    kv_at += tl.where(is_value, kv_value_stride, 0) + kv_head * kv_head_stride + d
    tl.store(kv_at, stored, mask=exists & (head >= NUM_HEADS) & in_dim & (slot >= 0))
