"""Paged decode attention: one query token per row, the heads of a KV head packed, the context split when rows are few.

One program per (row, KV head, split). Splits of a row write partial results; the last one to arrive combines them in
split order (flash-decoding: Dao et al., 2023, with the reduction fused by an arrival counter), so that the launch is
one kernel with a grid that depends on the padded batch alone: row lengths are read on the device, which is what CUDA
graphs need. `decode_attention_qkv` also splits the packed qkv, norms, rotates and writes the new token's K and V, which
spares a decode layer one kernel; the new token enters the softmax from registers.

A program loads a tile of keys and values, rotates its queries, attends, and combines the splits' partial results. With
few rows it has one tile, and its time is the sum of the waits of one warp. Tensors that are combined therefore have one
shape, heads by elements, even where all rows are equal: the compiler would convert other shapes through shared memory.

Where rows begin with the same blocks, shared_prefix.py attends these for all of them first. A row's first program then
begins with what was found there (`PrefixParts`), and its programs share the rest of the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inferengine.kernels.batch import USUAL_KEYS, NewKeys
from inferengine.kernels.cuda.activation import tanh
from inferengine.kernels.cuda.dispatch import AttentionKey, DecodeConfig, decode_config, decode_rule
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import NUM_FLOATS, Scratch

MAX_SPLITS = 64


class PrefixParts(NamedTuple):
    """What attention over the first keys of rows gave, in `splits` parts: results [B, K, splits, H / K, D] and their
    log-sum-exp in units of log 2 [B, K, splits, H / K], fp32. `lengths` [B] int32: how many keys of a row were
    attended to, 0 for none. `block_tokens` and `min_tiles` say into how many parts a length was divided."""

    lengths: torch.Tensor
    results: torch.Tensor
    logsumexp: torch.Tensor
    splits: int
    block_tokens: int
    min_tiles: int


@triton.jit
def share_of_tiles(num_tiles, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """Return how many of a context's tiles each program takes, as equal as they get, and how many programs have some:
    one more for each MIN_TILES, at most SPLITS."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(num_tiles, MIN_TILES), 1), SPLITS)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, wanted), 1)
    return tiles_per_split, tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def load_tile(
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
def both_loads_issued(k, v):
    """Return the same tensors, neither of which is used before both loads are issued: else the compiler moves keys to
    shared memory, behind a barrier, before it loads values. Emits no instruction; for devices only."""
    PACK: tl.constexpr = 32 // k.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "// $0 $1", "=r,=r,0,1", [k, v], dtype=(k.dtype, v.dtype), is_pure=False, pack=PACK
    )


@triton.jit
def rotation_factors(norm_ptr, cos_sin_row, g, d, mask, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Return the factors of elements d of heads g and those of their rotation partners: the norm's gain times cosine or
    sine of the angle. None of it is written by the kernel before."""
    HALF: tl.constexpr = HEAD_DIM // 2
    direct = tl.where(mask, 1.0, 0.0)
    crossed = tl.zeros_like(direct)
    if ROPE:
        angle = cos_sin_row + g * 0 + tl.where(d < HALF, d, d - HALF)
        direct = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
        crossed = tl.load(angle + HALF, mask=mask, other=0.0).to(tl.float32)
        crossed = tl.where(d < HALF, -crossed, crossed)
    if NORM:
        gain = norm_ptr + g * 0
        direct *= tl.load(gain + d, mask=mask, other=0.0).to(tl.float32)
        if ROPE:
            crossed *= tl.load(gain + tl.where(d < HALF, d + HALF, d - HALF), mask=mask, other=0.0).to(tl.float32)
    return direct, crossed


@triton.jit
def rotated(x, partner, direct, crossed, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Heads x [heads, BLOCK_DIM] and their elements' rotation partners -> float32, normed and rotated."""
    x = x.to(tl.float32)
    turned = x * direct
    if ROPE:
        turned += partner.to(tl.float32) * crossed
    if NORM:
        turned *= tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    return turned


@triton.jit
def attend_tile(
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
    """One step of the online softmax over a tile; some key so far must be visible. `peak` is in units of log 2."""
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
def with_sinks(acc, total, peak, sink):
    """One more step of the online softmax, with a score for each row that stands for no key: in units of log 2, -inf
    for none."""
    new_peak = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - new_peak)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - new_peak), new_peak


@triton.jit
def combined_splits(
    partial_ptr,
    logsumexp_ptr,
    first_head,
    active,
    g,
    d,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of splits 0 to `active` - 1 [split, GROUP, HEAD_DIM] from `first_head` on, in this order -> the heads'
    sums of values [BLOCK_GROUP, BLOCK_DIM] and of weights, and the largest score, as `attend_tile` keeps them. Other
    programs wrote them: read past L1."""
    MOST: tl.constexpr = 8 if SPLITS > 4 else 4 if SPLITS > 2 else 2
    STEP: tl.constexpr = MOST if BLOCK_DIM <= 256 else 2  # as many parts as registers hold
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_GROUP], tl.float32)
    result = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for first in range(0, active, STEP):
        split = first + tl.arange(0, STEP)[None, :]
        head = first_head + split * GROUP + g
        mask = (split < active) & (g < GROUP)
        logsumexp = tl.load(logsumexp_ptr + head, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + head[:, :, None] * HEAD_DIM + d[:, None, :],
            mask=mask[:, :, None] & (d < HEAD_DIM)[:, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(tl.maximum(best, tl.max(logsumexp, axis=1)), -1.0e30)
        weight = tl.exp2(logsumexp - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        norm = norm * shrink + tl.sum(weight, axis=1)
        result = result * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=1)
        best = new_best
    return result, norm, best


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
    tuning: DecodeConfig | None = None,
    sinks: torch.Tensor | None = None,
    prefixes: PrefixParts | None = None,
) -> torch.Tensor:
    """Attend with q [B, H, D] -> [B, H*D]. Row b attends to positions [0, row_len[b]) of slot row_slot[b] (the last
    `window`).

    `kv` [num_blocks, 2, K, block_size, D], `block_table` [S, max_blocks] int32. A row of length 0 (padding of a graph)
    gives zeros. `num_splits` fixed by the caller makes a row's result independent of B (deterministic mode). `sinks`
    [H] fp32: of each head a score that stands for no key. `prefixes`: what was found in the rows' first keys, fewer
    than row_len[b], which are not attended to again; without a window only.
    """
    num_rows, num_heads, head_dim = q.shape
    out = q.new_empty(num_rows, num_heads * head_dim) if out is None else out
    _launch(
        q, None, None, None, 0.0, None, kv, row_slot, row_len, block_table, num_heads, scale, window, softcap,
        scratch, out, kv_scales, num_splits, tuning, sinks, prefixes,
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
    tuning: DecodeConfig | None = None,
    sinks: torch.Tensor | None = None,
    new_keys: NewKeys = USUAL_KEYS,
) -> torch.Tensor:
    """`qkv_rope_write` and `decode_attention` in one kernel: qkv [B, (H+2K)*D] -> [B, H*D].

    The new token of row b has position row_len[b] - 1; its K and V are written through the block table. `new_keys`:
    what else is packed, keys always.
    """
    assert new_keys.has_keys
    num_rows, head_dim = qkv.shape[0], kv.shape[-1]
    out = qkv.new_empty(num_rows, num_heads * head_dim) if out is None else out
    _launch(
        qkv, q_norm, k_norm, cos_sin, eps, qkv, kv, row_slot, row_len, block_table, num_heads, scale, window, softcap,
        scratch, out, kv_scales, num_splits, tuning, sinks, None, new_keys,
    )  # fmt: skip
    return out


def attention_key(num_heads: int, kv: torch.Tensor, window: int | None) -> AttentionKey:
    """Return under which key decode attention over a cache is measured."""
    return AttentionKey(num_heads, kv.shape[2], kv.shape[4], kv.shape[3], 8 * kv.element_size(), window or 0)


def chosen_config(q: torch.Tensor, num_heads: int, kv: torch.Tensor, window: int | None) -> DecodeConfig:
    """Return the configuration for queries of so many rows, in their number format; fp32 keeps the rule."""
    if q.dtype == torch.float32:
        return decode_rule(q.shape[0], kv.shape[2], kv.shape[4])
    return decode_config(attention_key(num_heads, kv, window), q.shape[0])


def row_classes(keys: Iterable[AttentionKey], max_rows: int, *, is_fp32: bool = False) -> list[int]:
    """Return, for each kernel that steps of 1 to `max_rows` decode rows launch, the fewest rows that launch it."""
    first: dict[tuple[AttentionKey, DecodeConfig, int], int] = {}
    for key in keys:
        for rows in range(1, max_rows + 1):
            by_rule = decode_rule(rows, key.num_kv_heads, key.head_dim)
            tuned = by_rule if is_fp32 else decode_config(key, rows)
            splits = fitting_splits(tuned.num_splits, rows * key.num_heads * (key.head_dim + 1), NUM_FLOATS)
            first.setdefault((key, tuned, splits), rows)
    return sorted(set(first.values()))


def fitting_splits(wanted: int, floats: int, room: int) -> int:
    """Return how many programs share a row, each of which leaves `floats` behind: a power of two where fewer fit than
    wanted, because each number is a kernel of its own."""
    fitting = max(1, room // floats)
    return wanted if wanted <= fitting else 1 << (fitting.bit_length() - 1)


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
    tuning: DecodeConfig | None,
    sinks: torch.Tensor | None,
    prefixes: PrefixParts | None = None,
    new_keys: NewKeys = USUAL_KEYS,
) -> None:
    num_rows, num_kv_heads, block_size, head_dim = q.shape[0], kv.shape[2], kv.shape[3], kv.shape[4]
    if num_rows == 0:
        return
    group = num_heads // num_kv_heads
    if tuning is not None:
        tuned = tuning
    elif num_splits is not None:  # deterministic: nothing that was measured may change the order of sums
        tuned = decode_rule(num_rows, num_kv_heads, head_dim)
    else:
        tuned = chosen_config(q, num_heads, kv, window)
    wanted = min(num_splits or tuned.num_splits, MAX_SPLITS)
    splits = fitting_splits(wanted, num_rows * num_heads * (head_dim + 1), scratch.partial.numel())
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
        scratch.partial if sinks is None else sinks,
        row_len if prefixes is None else prefixes.lengths,
        scratch.partial if prefixes is None else prefixes.results,
        scratch.partial if prefixes is None else prefixes.logsumexp,
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
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_T=tuned.block_tokens,
        SPLITS=splits,
        MIN_TILES=tuned.min_tiles,
        PACKED=qkv is not None,
        QK_NORM=q_norm is not None,
        VALUE_NORM=new_keys.value_norm,
        VALUE_BEHIND=num_kv_heads if new_keys.has_values else 0,
        ROPE=cos_sin is not None,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PREFIX_SPLITS=0 if prefixes is None else prefixes.splits,
        PREFIX_BLOCK_T=1 if prefixes is None else prefixes.block_tokens,
        PREFIX_MIN_TILES=1 if prefixes is None else prefixes.min_tiles,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **options,
    )


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
    sinks_ptr,
    prefix_len_ptr,
    prefix_partial_ptr,
    prefix_logsumexp_ptr,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PACKED: tl.constexpr,
    QK_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    VALUE_BEHIND: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    PREFIX_BLOCK_T: tl.constexpr,
    PREFIX_MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with one query a row over its paged context: q [B, H, D] or, with PACKED, qkv [B, (H + 2 K) * D] -> out
    [B, H * D].

    Grid: (KV heads, splits of a context, B). A program attends with the GROUP query heads of one KV head over its share
    of the row's tiles; with PACKED it rotates the query first, and the last split writes the new key and value. The
    value lies VALUE_BEHIND heads behind the key: K, or 0 where keys are values. Of several splits the last one to
    arrive combines all. With PREFIX_SPLITS (not PACKED, no WINDOW) a context begins behind the row's prefix, with whose
    results the first split begins.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HAS_BEGIN: tl.constexpr = WINDOW or PREFIX_SPLITS > 0  # keys before `begin` may lie in the first tile
    allow_next(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(row_len_ptr + row)
    slot = tl.load(row_slot_ptr + row, volatile=True).to(tl.int64)  # volatile: asked for with the length, not after it
    g = tl.arange(0, BLOCK_GROUP)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (g < GROUP) & (d < HEAD_DIM)
    out_at = out_ptr + (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + g) * HEAD_DIM + d

    # Which part of the context this program reads. Whole tiles, the same whatever the number of rows.
    end = length - 1 if PACKED else length
    begin = tl.maximum(length - window, 0) if WINDOW else 0
    if PREFIX_SPLITS > 0:
        begin = tl.load(prefix_len_ptr + row)
    first_tile = begin // BLOCK_T
    num_tiles = tl.maximum(tl.cdiv(end, BLOCK_T) - first_tile, 0)
    tiles_per_split, active = share_of_tiles(num_tiles, SPLITS, MIN_TILES)
    active = tl.maximum(active, 1)
    if split >= active:
        return  # split 0 of the row waits for the previous kernel
    if length <= 0:
        wait_for_previous(PDL)
        tl.store(out_at, tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32).to(out_ptr.dtype.element_ty), mask=mask)
        return
    tile_begin = (first_tile + split * tiles_per_split) * BLOCK_T
    tile_end = tl.minimum(tile_begin + tiles_per_split * BLOCK_T, end)
    table_row = table_ptr + slot * table_stride
    head_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride
    row_ptr = q_ptr + row.to(tl.int64) * q_stride
    q_at = row_ptr + (kv_head * GROUP + g) * HEAD_DIM

    if PACKED:
        # Of the kernel before come the query and the newest key and value, so all else is read before the wait, and
        # what comes is asked for at once. The newest pair is the last split's; the others' loads of it are masked out.
        k, v = load_tile(
            head_ptr, table_row, tile_begin, tile_end, kv_block_stride, kv_value_stride, HEAD_DIM, BLOCK_DIM,
            BLOCK_SIZE, BLOCK_T,
        )  # fmt: skip
        if PDL:
            k, v = both_loads_issued(k, v)
        position = (length - 1).to(tl.int64)
        block = tl.load(table_row + position // BLOCK_SIZE).to(tl.int64)
        new_at = head_ptr + block * kv_block_stride + (position % BLOCK_SIZE) * HEAD_DIM + g * 0 + d
        cos_sin_row = cos_sin_ptr + position * HEAD_DIM
        q_direct, q_crossed = rotation_factors(q_norm_ptr, cos_sin_row, g, d, mask, HEAD_DIM, QK_NORM, ROPE)
        k_direct, k_crossed = rotation_factors(k_norm_ptr, cos_sin_row, g, d, mask, HEAD_DIM, QK_NORM, ROPE)
        partner = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
        k_at = row_ptr + (NUM_HEADS + kv_head + g * 0) * HEAD_DIM
        is_last = split == active - 1
        new_mask = mask & (split + g * 0 == active - 1)
        wait_for_previous(PDL)
        q = tl.load(q_at + d, mask=mask, other=0.0)
        k_new = tl.load(k_at + d, mask=new_mask, other=0.0)
        v_new = tl.load(k_at + VALUE_BEHIND * HEAD_DIM + d, mask=new_mask, other=0.0)
        q_partner, k_partner = q, k_new
        if ROPE:
            q_partner = tl.load(q_at + partner, mask=mask, other=0.0)
            k_partner = tl.load(k_at + partner, mask=new_mask, other=0.0)
        q = rotated(q, q_partner, q_direct, q_crossed, eps, HEAD_DIM, QK_NORM, ROPE).to(q_ptr.dtype.element_ty)
        k_new = rotated(k_new, k_partner, k_direct, k_crossed, eps, HEAD_DIM, QK_NORM, ROPE)
        k_new = (k_new * inverse_k_scale).to(kv_ptr.dtype.element_ty)
        v_new = v_new.to(tl.float32)
        if VALUE_NORM:
            v_new *= tl.rsqrt(tl.sum(v_new * v_new, axis=1) / HEAD_DIM + eps)[:, None]
        v_new = (v_new / v_scale).to(kv_ptr.dtype.element_ty)
        tl.store(new_at, k_new, mask=new_mask & (g < 1))
        tl.store(new_at + kv_value_stride, v_new, mask=new_mask & (g < 1))
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
        if SOFTCAP:
            score = softcap * tanh(score / softcap)
        peak = tl.where(is_last, score * LOG2E, float("-inf"))
        total = tl.where(is_last, 1.0, 0.0) + tl.zeros([BLOCK_GROUP], tl.float32)
        acc = v_new.to(tl.float32)
        acc, total, peak = attend_tile(
            acc, total, peak, q, k, v, tile_begin, tile_end, begin, scale, softcap, BLOCK_T, WINDOW, SOFTCAP
        )
        tile_begin += BLOCK_T
    else:
        wait_for_previous(PDL)
        q = tl.load(q_at + d, mask=mask, other=0.0)
        if PREFIX_SPLITS > 0:
            _share, parts = share_of_tiles(tl.cdiv(begin, PREFIX_BLOCK_T), PREFIX_SPLITS, PREFIX_MIN_TILES)
            first_part = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * PREFIX_SPLITS * GROUP
            acc, total, peak = combined_splits(
                prefix_partial_ptr, prefix_logsumexp_ptr, first_part, tl.where(split == 0, parts, 0), g, d, GROUP,
                BLOCK_GROUP, HEAD_DIM, BLOCK_DIM, PREFIX_SPLITS,
            )  # fmt: skip
        else:
            peak = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_GROUP], tl.float32)
            acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(tile_begin, tile_end, BLOCK_T):
        k, v = load_tile(
            head_ptr, table_row, start, tile_end, kv_block_stride, kv_value_stride, HEAD_DIM, BLOCK_DIM,
            BLOCK_SIZE, BLOCK_T,
        )  # fmt: skip
        acc, total, peak = attend_tile(
            acc, total, peak, q, k, v, start, tile_end, begin, scale, softcap, BLOCK_T, HAS_BEGIN, SOFTCAP
        )

    if SINKS:  # the row's first program counts them
        heads = tl.arange(0, BLOCK_GROUP)
        sink = tl.load(
            sinks_ptr + kv_head * GROUP + heads, mask=(heads < GROUP) & (split + heads * 0 == 0), other=float("-inf")
        )
        acc, total, peak = with_sinks(acc, total, peak, sink * LOG2E)
    acc = acc * v_scale / total[:, None]
    if SPLITS == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        return
    if active == 1:
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        return

    # Partial results, [row, kv head, split, group, dim]; the last program of (row, kv head) to arrive combines them.
    unit = (row * NUM_KV_HEADS + kv_head).to(tl.int64)
    first_head = unit * SPLITS * GROUP
    tl.store(partial_ptr + (first_head + split * GROUP + g) * HEAD_DIM + d, acc, mask=mask)
    g1 = tl.arange(0, BLOCK_GROUP)
    tl.store(logsumexp_ptr + first_head + split * GROUP + g1, peak + tl.log2(total), mask=g1 < GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel", scope="gpu")
    if before != active - 1:
        return
    tl.debug_barrier()
    tl.store(arrived_ptr + unit, 0)
    result, norm, _best = combined_splits(
        partial_ptr, logsumexp_ptr, first_head, active, g, d, GROUP, BLOCK_GROUP, HEAD_DIM, BLOCK_DIM, SPLITS
    )
    result = result / tl.maximum(norm, 1.0e-30)[:, None]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=mask)
