"""Variable-length paged attention for rows of any number of queries: prompts, chunks of prompts, draft tokens to
verify.

Hopper has a kernel of its own for steps of many tokens (prefill_hopper.py). This one takes all others, on which it is
faster, and all steps in deterministic mode, where one kernel must compute them all.

A program takes a tile of queries of one row with all heads of one KV head packed beside each other (BLOCK_ROWS =
tokens x group), so that short chunks fill the tile as well as long ones, and walks the row's keys in the paged cache
in tiles that start at multiples of BLOCK_TOKENS. The grid is bounded by host integers; a program finds its row by
bisection over `query_start`. Where few tiles would leave the device idle, several programs share the keys of each, and
the last one to arrive adds up their sums, as in decode.py. In deterministic mode none do: a query's result then depends
on nothing but its own row, not on chunking, not on neighbours (tiles above its diagonal add exact zeros).

Source: FlashAttention-2 (Dao, 2023); the search over rows follows vLLM's unified Triton attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inferengine.kernels.cuda.activation import tanh
from inferengine.kernels.cuda.attention import prefill_hopper
from inferengine.kernels.cuda.attention.decode import with_sinks
from inferengine.kernels.cuda.attention.row_tiles import find_row
from inferengine.kernels.cuda.dispatch import PrefillConfig, hopper_prefill_is_faster, prefill_config
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch

MOST_SPLITS = 16
LEAST_TILES = tl.constexpr(8)  # of keys that a split of a tile is worth


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_start: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    first_row: int,
    num_tokens: int,
    out: torch.Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    tuning: PrefillConfig | None = None,
    deterministic: bool = False,
    scratch: Scratch | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with q [T, H, D] -> out [T, H*D] for the tokens of rows [first_row, R); other rows of `out` are not
    touched.

    Row r's queries are tokens [query_start[r], query_start[r + 1]) at positions row_start[r] on; it attends causally
    to everything in the cache up to itself. `num_tokens`, the tokens of those rows, is a host integer: an upper bound
    is enough. `tuning`: the tiles of this file's kernel, whatever the device. `deterministic`: no contraction of
    products and sums, so that masked and unmasked tiles round alike. `scratch`: counters, zero before and after a
    launch, and room for the sums of tiles whose keys several programs share; without it none are shared. `sinks`
    [H] fp32: of each head a score that stands for no key.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_rows = row_slot.shape[0] - first_row
    if num_rows <= 0 or num_tokens <= 0:
        return out
    faster = not deterministic and hopper_prefill_is_faster(num_tokens, num_rows, head_dim)
    if tuning is None and faster and prefill_hopper.fits(q, kv):
        return prefill_hopper.prefill_attention(
            q, kv, row_slot, row_start, query_start, block_table, scale, window, softcap, first_row=first_row,
            num_tokens=num_tokens, out=out, kv_scales=kv_scales, scratch=scratch, sinks=sinks,
        )  # fmt: skip
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group = num_heads // num_kv_heads
    tuned = tuning or prefill_config(head_dim, block_size)
    tile_tokens = tuned.block_rows // group
    assert tile_tokens > 0
    num_tiles = num_tokens // tile_tokens + num_rows
    tma = tuned.tma and can_use_tma(kv, tuned.block_tokens)
    view = TensorDescriptor.from_tensor(kv.view(-1, head_dim), [tuned.block_tokens, head_dim]) if tma else kv
    splits, partial, shares = 1, out, False
    if tuned.fill and not deterministic and scratch is not None:  # one kernel, whatever the number of splits
        shares, partial = True, scratch.partial
        # What a step of one row needs: an upper bound of the tiles counts rows that have no queries.
        wanted = min(MOST_SPLITS, tuned.fill // (num_kv_heads * -(-num_tokens // tile_tokens)))
        room = scratch.partial.numel() // (num_tokens * num_heads * (head_dim + 2))
        splits = max(1, min(wanted, room)) if num_tiles * num_kv_heads <= scratch.arrived.numel() else 1
    _prefill_kernel[(num_kv_heads, num_tiles, splits)](
        q,
        view,
        row_slot,
        row_start,
        query_start,
        block_table,
        out,
        q if sinks is None else sinks,
        partial,
        partial[num_tokens * num_heads * splits * head_dim :] if splits > 1 else partial,
        row_slot if scratch is None else scratch.arrived,
        block_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        first_row,
        num_rows,
        scale * kv_scales[0],
        kv_scales[1],
        softcap or 0.0,
        window or 0,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=tuned.block_rows,
        TILE_TOKENS=tile_tokens,
        BLOCK_T=tuned.block_tokens,
        SPLIT=shares,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        TMA=tma,
        SINKS=sinks is not None,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(q.device), exact=deterministic),
    )
    return out


def can_use_tma(kv: torch.Tensor, block_tokens: int) -> bool:
    """Return whether the tensor memory accelerator can load tiles: each lies within one block, and the head dimension
    is a power of two."""
    block_size, head_dim = kv.shape[3], kv.shape[4]
    fits = block_size % block_tokens == 0 and head_dim & (head_dim - 1) == 0 and head_dim * kv.element_size() >= 32
    capable = kv.device.type != "cuda" or torch.cuda.get_device_capability(kv.device)[0] >= 9
    return fits and capable and kv.is_contiguous()


@triton.jit
def _attend(
    acc,
    total,
    peak,
    q,
    key_begin,
    key_end,
    query_position,
    kv,
    kv_head,
    table_row,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):
    """The online softmax over keys [key_begin, key_end), key_begin a multiple of BLOCK_T; MASKED applies the diagonal,
    the window and the end."""
    LOG2E: tl.constexpr = 1.4426950408889634
    d = tl.arange(0, BLOCK_DIM)
    for start in range(key_begin, key_end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        if TMA:  # the cache seen as rows of one key or value each
            block = tl.load(table_row + start // BLOCK_SIZE)
            key_row = (block * (2 * NUM_KV_HEADS) + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
        elif BLOCK_T <= BLOCK_SIZE:
            head_ptr = kv + kv_head.to(tl.int64) * kv_head_stride
            block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
            tile = head_ptr + block * kv_block_stride + (start % BLOCK_SIZE + tl.arange(0, BLOCK_T)) * HEAD_DIM
        else:
            head_ptr = kv + kv_head.to(tl.int64) * kv_head_stride
            blocks = tl.load(table_row + t // BLOCK_SIZE, mask=t < key_end, other=0).to(tl.int64)
            tile = head_ptr + blocks * kv_block_stride + (t % BLOCK_SIZE) * HEAD_DIM
        if TMA:
            k = kv.load([key_row, 0]).to(q.dtype)
        elif MASKED or HEAD_DIM != BLOCK_DIM:
            load_mask = (t < key_end)[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(tile[:, None] + d[None, :], mask=load_mask, other=0.0).to(q.dtype)
        else:
            k = tl.load(tile[:, None] + d[None, :]).to(q.dtype)
        score = tl.dot(q, tl.trans(k), out_dtype=tl.float32, input_precision="ieee")
        if SOFTCAP:
            score = softcap * tanh(score * (scale / softcap))
        to_log2 = LOG2E if SOFTCAP else scale * LOG2E
        if MASKED:
            visible = t[None, :] <= query_position[:, None]
            if WINDOW:
                visible = visible & (t[None, :] > query_position[:, None] - window)
            score = tl.where(visible, score, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(score, axis=1) * to_log2)
        weight = tl.exp2(score * to_log2 - new_peak[:, None])
        if MASKED and (WINDOW or SPLIT):  # maybe no key of a query is visible: its weights must not become exp2(0)
            weight = tl.where(visible, weight, 0.0)
        shrink = tl.exp2(peak - new_peak)
        if TMA:
            v = kv.load([key_row + NUM_KV_HEADS * BLOCK_SIZE, 0]).to(q.dtype)
        elif MASKED or HEAD_DIM != BLOCK_DIM:
            v = tl.load(tile[:, None] + kv_value_stride + d[None, :], mask=load_mask, other=0.0).to(q.dtype)
        else:
            v = tl.load(tile[:, None] + kv_value_stride + d[None, :]).to(q.dtype)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(q.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _prefill_kernel(
    q_ptr,
    kv,
    row_slot_ptr,
    row_start_ptr,
    query_start_ptr,
    table_ptr,
    out_ptr,
    sinks_ptr,
    partial_ptr,
    peak_ptr,
    arrived_ptr,
    table_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    first_row,
    num_rows,
    scale,
    v_scale,
    softcap,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with all new tokens of the rows over their paged contexts, causally: q [T, H, D] -> out [T, H * D].

    Grid: (KV heads, tiles of tokens, splits). A program attends with TILE_TOKENS tokens of one row and the GROUP query
    heads of one KV head; tiles beyond a row's tokens end at once. With SPLIT programs share a tile's keys, and the last
    one to arrive adds up their parts.
    """
    allow_next(PDL)
    wait_for_previous(PDL)
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the tiles with the longest context first
    row, row_tile = find_row(query_start_ptr, first_row, num_rows, tile, TILE_TOKENS)
    first_query = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - first_query
    first_token = row_tile * TILE_TOKENS
    if first_token >= count:
        return
    start_position = tl.load(row_start_ptr + row)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    table_row = table_ptr + slot * table_stride
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP

    i = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    token = first_token + i // GROUP
    valid = (i < TILE_TOKENS * GROUP) & (token < count)
    at = ((first_query + token).to(tl.int64) * NUM_HEADS + kv_head * GROUP + i % GROUP) * HEAD_DIM
    q_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=q_mask, other=0.0)
    query_position = start_position + token

    last_token = tl.minimum(first_token + TILE_TOKENS, count) - 1
    first_position = start_position + first_token
    key_end = start_position + last_token + 1
    key_begin = 0
    if WINDOW:
        key_begin = tl.maximum(first_position - window + 1, 0) // BLOCK_T * BLOCK_T
    # Keys that every query of the tile sees need no mask; the diagonal tiles do.
    diagonal = (first_position + 1) // BLOCK_T * BLOCK_T
    split, splits, active = tl.program_id(2), tl.num_programs(2), 1
    if SPLIT:  # as equal as whole tiles get
        key_tiles = tl.cdiv(key_end - key_begin, BLOCK_T)
        per_split = tl.cdiv(key_tiles, tl.minimum(tl.cdiv(key_tiles, LEAST_TILES), splits))
        active = tl.cdiv(key_tiles, per_split)
        if split >= active:
            return
        key_begin += split * per_split * BLOCK_T
        key_end = tl.minimum(key_end, key_begin + per_split * BLOCK_T)
        diagonal = tl.minimum(tl.maximum(diagonal, key_begin), key_end)

    peak = tl.full([BLOCK_ROWS], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    if WINDOW:
        diagonal = key_begin
    else:
        acc, total, peak = _attend(
            acc, total, peak, q, key_begin, diagonal, query_position, kv, kv_head, table_row, kv_block_stride,
            kv_value_stride, kv_head_stride, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE,
            BLOCK_T, False, SPLIT, False, SOFTCAP, TMA,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, diagonal, key_end, query_position, kv, kv_head, table_row, kv_block_stride,
        kv_value_stride, kv_head_stride, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_T,
        True, SPLIT, WINDOW, SOFTCAP, TMA,
    )  # fmt: skip
    if SPLIT:
        if active > 1:
            # Unnormalized sums, [token, head, split, dim]; the last program of a tile to arrive adds them in order.
            base = tl.load(query_start_ptr + first_row)
            line = ((first_query - base + token) * NUM_HEADS + kv_head * GROUP + i % GROUP) * splits
            tl.store(partial_ptr + ((line + split) * HEAD_DIM)[:, None] + d[None, :], acc, mask=q_mask)
            tl.store(peak_ptr + (line + split) * 2, peak, mask=valid)
            tl.store(peak_ptr + (line + split) * 2 + 1, total, mask=valid)
            unit = arrived_ptr + tile * NUM_KV_HEADS + kv_head
            tl.debug_barrier()
            before = tl.atomic_add(unit, 1, sem="acq_rel", scope="gpu")
            if before != active - 1:
                return
            tl.debug_barrier()
            tl.store(unit, 0)
            peak = tl.full([BLOCK_ROWS], -1.0e30, tl.float32)
            total = tl.zeros([BLOCK_ROWS], tl.float32)
            acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
            for each in range(active):
                place = line + each
                part = tl.load(
                    partial_ptr + (place * HEAD_DIM)[:, None] + d[None, :], mask=q_mask, other=0.0, cache_modifier=".cg"
                )
                part_peak = tl.load(peak_ptr + place * 2, mask=valid, other=-1.0e30, cache_modifier=".cg")
                part_total = tl.load(peak_ptr + place * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
                new_peak = tl.maximum(peak, part_peak)
                shrink = tl.exp2(peak - new_peak)
                weight = tl.exp2(part_peak - new_peak)
                total = total * shrink + part_total * weight
                acc = acc * shrink[:, None] + part * weight[:, None]
                peak = new_peak
            total = tl.maximum(total, 1.0e-30)  # rows of the tile that are no query
    if SINKS:
        sink = tl.load(sinks_ptr + kv_head * GROUP + i % GROUP) * 1.4426950408889634
        acc, total, peak = with_sinks(acc, total, peak, sink)
    acc = acc * (v_scale / total)[:, None]
    tl.store(out_ptr + at[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
