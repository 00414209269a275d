"""Paged decode attention: one query token per row, the heads of a KV head packed, the context split when rows are few.

One program per (row, KV head, split). Splits of a row write partial results; the last one to arrive combines them in
split order (flash-decoding: Dao et al., 2023, with the reduction fused by an arrival counter), so that the launch is
one kernel with a grid that depends on the padded batch alone: row lengths are read on the device, which is what CUDA
graphs need. `decode_attention_qkv` also splits the packed qkv, norms, rotates and writes the new token's K and V, which
spares a decode layer one kernel; the new token enters the softmax from registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferengine.kernels.activation import tanh
from inferengine.kernels.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.rope_cache import normed_rotated
from inferengine.kernels.scratch import Scratch
from inferengine.kernels.tuning import DecodeTuning, decode_tuning

MAX_SPLITS = 64


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_len: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    scratch: Scratch,
    *,
    out: torch.Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    num_splits: int | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """q [B, H, D] -> [B, H*D]. Row b attends to positions [0, row_len[b]) of slot row_slot[b] (the last `window`).

    `kv` [num_blocks, 2, K, block_size, D], `block_table` [S, max_blocks] int32. A row of length 0 (padding of a graph)
    gives zeros. `num_splits` fixed by the caller makes a row's result independent of B (deterministic mode).
    """
    num_rows, num_heads, head_dim = q.shape
    out = q.new_empty(num_rows, num_heads * head_dim) if out is None else out
    _launch(
        q, None, None, None, 0.0, None, kv, row_slot, row_len, block_table, num_heads, scale, window, softcap,
        scratch, out, kv_scales, num_splits, tuning,
    )  # fmt: skip
    return out


def decode_attention_qkv(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_len: torch.Tensor,
    block_table: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    scratch: Scratch,
    *,
    out: torch.Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    num_splits: int | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """`qkv_rope_write` and `decode_attention` in one kernel: qkv [B, (H+2K)*D] -> [B, H*D].

    The new token of row b has position row_len[b] - 1; its K and V are written through the block table.
    """
    num_rows, head_dim = qkv.shape[0], kv.shape[-1]
    out = qkv.new_empty(num_rows, num_heads * head_dim) if out is None else out
    _launch(
        qkv, q_norm, k_norm, cos_sin, eps, qkv, kv, row_slot, row_len, block_table, num_heads, scale, window, softcap,
        scratch, out, kv_scales, num_splits, tuning,
    )  # fmt: skip
    return out


def _launch(
    q: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    eps: float,
    qkv: torch.Tensor | None,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_len: torch.Tensor,
    block_table: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    scratch: Scratch,
    out: torch.Tensor,
    kv_scales: tuple[float, float],
    num_splits: int | None,
    tuning: DecodeTuning | None,
) -> None:
    num_rows, num_kv_heads, block_size, head_dim = q.shape[0], kv.shape[2], kv.shape[3], kv.shape[4]
    if num_rows == 0:
        return
    group = num_heads // num_kv_heads
    tuned = tuning or decode_tuning(num_rows, num_kv_heads, group, head_dim)
    fitting = scratch.partial.numel() // (num_rows * num_heads * (head_dim + 1))
    splits = max(1, min(num_splits or tuned.num_splits, MAX_SPLITS, fitting))
    if num_rows * num_kv_heads > scratch.arrived.numel():
        splits = 1
    options: dict[str, Any] = launch_options(supports_pdl(q.device))
    _decode_kernel[(num_kv_heads, splits, num_rows)](
        q,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q if cos_sin is None else cos_sin,
        kv,
        row_slot,
        row_len,
        block_table,
        out,
        scratch.partial,
        scratch.partial[num_rows * splits * num_heads * head_dim :],
        scratch.arrived,
        q.stride(0),
        block_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        eps,
        scale * kv_scales[0],
        kv_scales[1],
        1.0 / kv_scales[0],
        softcap or 0.0,
        window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_GROUP=triton.next_power_of_2(group),
        DOT_GROUP=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_T=tuned.block_tokens,
        SPLITS=splits,
        MIN_TILES=tuned.min_tiles,
        PACKED=qkv is not None,
        QK_NORM=q_norm is not None,
        ROPE=cos_sin is not None,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **options,
    )


@triton.jit
def _load_tile(
    head_ptr,
    table_row,
    start,
    tile_end,
    kv_block_stride,
    kv_value_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Keys and values [BLOCK_T, BLOCK_DIM] of positions from `start` on, zeros from `tile_end` on."""
    t = start + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_DIM)[None, :]
    visible = t < tile_end
    if BLOCK_T <= BLOCK_SIZE:
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        tile = head_ptr + block * kv_block_stride + (start % BLOCK_SIZE + tl.arange(0, BLOCK_T)) * HEAD_DIM
    else:
        blocks = tl.load(table_row + t // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        tile = head_ptr + blocks * kv_block_stride + (t % BLOCK_SIZE) * HEAD_DIM
    load_mask = visible[:, None] & (d < HEAD_DIM)
    k = tl.load(tile[:, None] + d, mask=load_mask, other=0.0)
    v = tl.load(tile[:, None] + kv_value_stride + d, mask=load_mask, other=0.0)
    return k, v


@triton.jit
def _attend_tile(
    acc,
    total,
    peak,
    q,
    k,
    v,
    start,
    tile_end,
    begin,
    scale,
    softcap,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over a tile of at least one visible key; `peak` is in units of log 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    t = start + tl.arange(0, BLOCK_T)
    visible = t < tile_end
    if WINDOW:
        visible = visible & (t >= begin)
    score = tl.dot(q, tl.trans(k.to(q.dtype)), out_dtype=tl.float32, input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * tanh(score / softcap)
    score = tl.where(visible[None, :], score * LOG2E, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    weight = tl.exp2(score - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def _decode_kernel(
    q_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    kv_ptr,
    row_slot_ptr,
    row_len_ptr,
    table_ptr,
    out_ptr,
    partial_ptr,
    logsumexp_ptr,
    arrived_ptr,
    q_stride,
    table_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    eps,
    scale,
    v_scale,
    inverse_k_scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DOT_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PACKED: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    allow_next(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(row_len_ptr + row)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    g = tl.arange(0, DOT_GROUP)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    in_dim = d < HEAD_DIM
    out_row = out_ptr + row.to(tl.int64) * NUM_HEADS * HEAD_DIM
    out_at = out_row + (kv_head * GROUP + g) * HEAD_DIM + d
    out_mask = (g < GROUP) & in_dim

    # Which part of the context this program reads. Whole tiles, the same whatever the number of rows.
    end = length - 1 if PACKED else length
    begin = tl.maximum(length - window, 0) if WINDOW else 0
    first_tile = begin // BLOCK_T
    num_tiles = tl.maximum(tl.cdiv(end, BLOCK_T) - first_tile, 0)
    wanted = tl.minimum(tl.maximum(tl.cdiv(num_tiles, MIN_TILES), 1), SPLITS)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, wanted), 1)  # as equal as they get
    active = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)
    if split >= active:
        return  # split 0 of the row waits for the previous kernel
    tile_begin = (first_tile + split * tiles_per_split) * BLOCK_T
    tile_end = tl.minimum(tile_begin + tiles_per_split * BLOCK_T, end)
    table_row = table_ptr + slot * table_stride
    head_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride

    if PACKED:  # only the newest key and value come from the kernel before: the first tile need not wait for it
        k, v = _load_tile(
            head_ptr, table_row, tile_begin, tile_end, kv_block_stride, kv_value_stride, HEAD_DIM, BLOCK_DIM,
            BLOCK_SIZE, BLOCK_T,
        )  # fmt: skip
    wait_for_previous(PDL)
    if length <= 0:
        if split == 0:
            tl.store(out_at, tl.zeros([DOT_GROUP, BLOCK_DIM], tl.float32).to(out_ptr.dtype.element_ty), mask=out_mask)
        return

    q_row = q_ptr + row.to(tl.int64) * q_stride + (kv_head * GROUP + g) * HEAD_DIM
    position = (length - 1).to(tl.int64)
    cos_sin_row = cos_sin_ptr + position * HEAD_DIM
    q = normed_rotated(q_row, q_norm_ptr, cos_sin_row, eps, g < GROUP, HEAD_DIM, BLOCK_DIM, QK_NORM, ROPE)
    q = q.to(q_ptr.dtype.element_ty)

    peak = tl.full([DOT_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([DOT_GROUP], tl.float32)
    acc = tl.zeros([DOT_GROUP, BLOCK_DIM], tl.float32)
    if PACKED:
        if split == active - 1:
            one = tl.arange(0, 1)[:, None]
            k_row = q_ptr + row.to(tl.int64) * q_stride + (NUM_HEADS + kv_head) * HEAD_DIM + one
            k_new = normed_rotated(k_row, k_norm_ptr, cos_sin_row, eps, one < 1, HEAD_DIM, BLOCK_DIM, QK_NORM, ROPE)
            v_new = tl.load(k_row + NUM_KV_HEADS * HEAD_DIM + d, mask=in_dim, other=0.0).to(tl.float32)
            k_new = (k_new * inverse_k_scale).to(kv_ptr.dtype.element_ty)
            v_new = (v_new / v_scale).to(kv_ptr.dtype.element_ty)
            block = tl.load(table_row + position // BLOCK_SIZE).to(tl.int64)
            new_at = head_ptr + block * kv_block_stride + (position % BLOCK_SIZE) * HEAD_DIM + d
            tl.store(new_at, k_new, mask=in_dim)
            tl.store(new_at + kv_value_stride, v_new, mask=in_dim)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
            if SOFTCAP:
                score = softcap * tanh(score / softcap)
            peak = score * LOG2E
            total += 1.0
            acc += v_new.to(tl.float32)
        if tile_begin < tile_end:
            acc, total, peak = _attend_tile(
                acc, total, peak, q, k, v, tile_begin, tile_end, begin, scale, softcap, BLOCK_T, WINDOW, SOFTCAP
            )
        tile_begin += BLOCK_T
    for start in range(tile_begin, tile_end, BLOCK_T):
        k, v = _load_tile(
            head_ptr, table_row, start, tile_end, kv_block_stride, kv_value_stride, HEAD_DIM, BLOCK_DIM,
            BLOCK_SIZE, BLOCK_T,
        )  # fmt: skip
        acc, total, peak = _attend_tile(
            acc, total, peak, q, k, v, start, tile_end, begin, scale, softcap, BLOCK_T, WINDOW, SOFTCAP
        )

    acc = acc * v_scale / total[:, None]
    if SPLITS == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    if active == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        return

    # Partial results, [row, kv head, split, group, dim]; the last program of (row, kv head) to arrive combines them.
    unit = (row * NUM_KV_HEADS + kv_head).to(tl.int64)
    heads = unit * SPLITS * GROUP
    partial_at = partial_ptr + (heads + split * GROUP + g) * HEAD_DIM + d
    tl.store(partial_at, acc, mask=out_mask)
    g1 = tl.arange(0, DOT_GROUP)
    tl.store(logsumexp_ptr + heads + split * GROUP + g1, peak + tl.log2(total), mask=g1 < GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel", scope="gpu")
    if before != active - 1:
        return
    tl.debug_barrier()
    tl.store(arrived_ptr + unit, 0)

    STEP: tl.constexpr = 16 if SPLITS >= 16 else SPLITS
    gb = tl.arange(0, BLOCK_GROUP)
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_GROUP], tl.float32)
    result = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for first in range(0, active, STEP):
        s = first + tl.arange(0, STEP)[:, None]
        index = heads + s * GROUP + gb[None, :]
        mask = (s < active) & (gb[None, :] < GROUP)
        lse = tl.load(logsumexp_ptr + index, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + index[:, :, None] * HEAD_DIM + d[:, None, :],
            mask=mask[:, :, None] & in_dim[:, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(tl.maximum(best, tl.max(lse, axis=0)), -1.0e30)
        weight = tl.exp2(lse - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        norm = norm * shrink + tl.sum(weight, axis=0)
        result = result * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        best = new_best
    result = result / tl.maximum(norm, 1.0e-30)[:, None]
    final_at = out_row + (kv_head * GROUP + gb[:, None]) * HEAD_DIM + d
    tl.store(final_at, result.to(out_ptr.dtype.element_ty), mask=(gb[:, None] < GROUP) & in_dim)
