"""Paged latent attention: decodes, prompts and chunks of prompts over a cache of latents (DeepSeek-V2, 2024).

What attention reads of a token is one vector for all heads: its latent and a rotated key. Scores are products of both
with a query; what is mixed is the latent alone. The tile that scores were made of is therefore the tile that is mixed,
and each latent is read once.

A program takes a tile of queries of one row, heads of a token side by side, and a part of the row's context. Every
program of a tile leaves what it has mixed, normed, with the logarithm of its weights' sum, and a second kernel combines
them; where no context is divided there is none. The grid depends on the padded batch alone.

Two more kernels: one rotates queries and keys, norms latents and writes the cache; one multiplies each head's rows by
the head's own matrix in a fixed order, for deterministic mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.attention.row_tiles import find_row
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import NUM_FLOATS, Scratch

MOST_SPLITS = 128  # programs that share the context of a tile, a power of two
PARTS_AT_ONCE = 16  # that are combined
PROGRAMS = 256  # that are wanted where contexts are divided: two for each multiprocessor of a large card
MIN_TILES = 2  # of keys that a program is worth
LOG2_E = 1.4426950408889634


class LatentTiles(NamedTuple):
    """Rows of a tile of queries and heads (a power of two, 16 or more), keys of a tile, and the compiler's options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def latent_tiles(num_heads: int, item_bytes: int, *, decode: bool) -> LatentTiles:
    """Return the tiles of a launch. fp32 has less shared memory for as many numbers."""
    if item_bytes == 4:
        return LatentTiles(16, 16, 4, 1)
    rows = max(16, min(64, triton.next_power_of_2(num_heads))) if decode else 64
    return LatentTiles(rows, 32, 8 if rows == 64 else 4, 5)  # stages: block table, then latents, twice each


def decode_splits(num_rows: int, num_heads: int, rank: int, rows_of_tile: int, room: int = NUM_FLOATS) -> int:
    """Return how many programs share the context of a decode row, as far as their results fit into `room`."""
    blocks = -(-num_heads // min(num_heads, rows_of_tile))
    return _fitting(PROGRAMS // max(1, num_rows * blocks), num_rows * num_heads * (rank + 1), room)


def _fitting(wanted: int, floats: int, room: int) -> int:
    return max(1, min(wanted, MOST_SPLITS, room // floats))


def row_classes(num_heads: int, rank: int, item_bytes: int, max_rows: int) -> list[int]:
    """Return, for each kernel that steps of 1 to `max_rows` decode rows launch, the fewest rows that launch it."""
    tile = latent_tiles(num_heads, item_bytes, decode=True).rows
    first: dict[bool, int] = {}
    for rows in range(1, max_rows + 1):
        first.setdefault(decode_splits(rows, num_heads, rank, tile) > 1, rows)
    return list(first.values())


def latent_rope_write(
    q: torch.Tensor,
    new: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    token_slot: torch.Tensor,
    block_table: torch.Tensor,
    kv: torch.Tensor,
    wide: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Rotate the last P numbers of queries q [T, H * (N + P)] into the last P of `wide` [T, H, R + P]; norm and rotate
    `new` [T, R + P] into the cache, where `block_table` [S, max_blocks] int32 has the position of each token's slot.

    `positions`, `token_slot` [T] int32, `gain` [R], `cos_sin` [max_position, P] (cosines, then sines), `kv`
    [num_blocks, 1, 1, block_size, R + P]. Rows of `q` and `new` may lie apart. `kv_scale` divides what is stored: 1
    unless the cache is FP8.
    """
    num_tokens, num_heads, width = wide.shape
    if num_tokens == 0:
        return
    rank, turning = len(gain), width - len(gain)
    _write_kernel[(num_tokens,)](
        q,
        new,
        gain,
        cos_sin,
        positions,
        token_slot,
        block_table,
        kv,
        wide,
        q.stride(0),
        new.stride(0),
        block_table.stride(0),
        kv.stride(0),
        eps,
        1.0 / kv_scale,
        HEADS=num_heads,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        QUERY=q.shape[1] // num_heads,
        RANK=rank,
        BLOCK_RANK=triton.next_power_of_2(rank),
        TURNING=turning,
        BLOCK_HALF=triton.next_power_of_2(turning // 2),
        BLOCK_SIZE=kv.shape[3],
        num_warps=4,
        **launch_options(supports_pdl(q.device)),
    )


@triton.jit
def _write_kernel(
    q_ptr,
    new_ptr,
    gain_ptr,
    cos_sin_ptr,
    positions_ptr,
    token_slot_ptr,
    table_ptr,
    kv_ptr,
    wide_ptr,
    q_stride,
    new_stride,
    table_stride,
    kv_block_stride,
    eps,
    inverse_kv_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    QUERY: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = TURNING // 2
    WIDTH: tl.constexpr = RANK + TURNING
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(token_slot_ptr + token).to(tl.int64)
    block = tl.load(table_ptr + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    inside = half < HALF
    cos = tl.load(cos_sin_ptr + position * TURNING + half, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * TURNING + HALF + half, mask=inside, other=0.0)
    r = tl.arange(0, BLOCK_RANK)
    gain = tl.load(gain_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    wait_for_previous(PDL)

    head = tl.arange(0, BLOCK_HEADS)[:, None]
    mask = (head < HEADS) & inside[None, :]
    q_at = q_ptr + token * q_stride + head * QUERY + (QUERY - TURNING) + half[None, :]
    left = tl.load(q_at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(q_at + HALF, mask=mask, other=0.0).to(tl.float32)
    out_at = wide_ptr + (token * HEADS + head) * WIDTH + RANK + half[None, :]
    turned = left * cos[None, :] - right * sin[None, :]
    tl.store(out_at, turned.to(wide_ptr.dtype.element_ty), mask=mask)
    turned = right * cos[None, :] + left * sin[None, :]
    tl.store(out_at + HALF, turned.to(wide_ptr.dtype.element_ty), mask=mask)

    row_ptr = new_ptr + token * new_stride
    to_ptr = kv_ptr + block * kv_block_stride + (position % BLOCK_SIZE) * WIDTH
    x = tl.load(row_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps) * gain
    tl.store(to_ptr + r, (x * inverse_kv_scale).to(kv_ptr.dtype.element_ty), mask=r < RANK)
    left = tl.load(row_ptr + RANK + half, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(row_ptr + RANK + HALF + half, mask=inside, other=0.0).to(tl.float32)
    turned = (left * cos - right * sin) * inverse_kv_scale
    tl.store(to_ptr + RANK + half, turned.to(kv_ptr.dtype.element_ty), mask=inside)
    turned = (right * cos + left * sin) * inverse_kv_scale
    tl.store(to_ptr + RANK + HALF + half, turned.to(kv_ptr.dtype.element_ty), mask=inside)


def latent_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_len: torch.Tensor,
    block_table: torch.Tensor,
    rank: int,
    scale: float,
    scratch: Scratch,
    *,
    out: torch.Tensor,
    kv_scale: float = 1.0,
    num_splits: int | None = None,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """Attend with q [B, H, R + P] -> out [B, H, R]. Row b attends to positions [0, row_len[b]) of slot row_slot[b]; one
    of length 0 (padding of a graph) gives zeros."""
    num_rows, num_heads = q.shape[:2]
    if num_rows == 0:
        return out
    tiles = tiles or latent_tiles(num_heads, q.element_size(), decode=True)
    splits = num_splits or decode_splits(num_rows, num_heads, rank, tiles.rows, scratch.partial.numel())
    _launch(
        q, kv, row_slot, row_len, row_len, block_table, rank, scale, scratch, out, kv_scale, tiles, splits,
        first_row=0, num_rows=num_rows, num_tiles=num_rows, decode=True,
    )  # fmt: skip
    return out


def latent_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_start: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    rank: int,
    scale: float,
    scratch: Scratch,
    *,
    first_row: int,
    num_tokens: int,
    out: torch.Tensor,
    kv_scale: float = 1.0,
    num_splits: int | None = None,
    tiles: LatentTiles | None = None,
) -> torch.Tensor:
    """Attend causally with q [T, H, R + P] -> out [T, H, R] for the tokens of rows [first_row, R); other rows of `out`
    are not touched. `num_tokens`, the tokens of those rows, is a host integer: an upper bound is enough."""
    num_heads, num_rows = q.shape[1], len(row_slot) - first_row
    if num_rows <= 0 or num_tokens <= 0:
        return out
    tiles = tiles or latent_tiles(num_heads, q.element_size(), decode=False)
    tile_tokens = _tile_tokens(tiles.rows, num_heads)
    if num_splits is None:
        blocks = -(-num_heads // min(num_heads, tiles.rows))
        wanted = PROGRAMS // (-(-num_tokens // tile_tokens) * blocks)
        num_splits = _fitting(wanted, len(q) * num_heads * (rank + 1), scratch.partial.numel())
    _launch(
        q, kv, row_slot, row_start, query_start, block_table, rank, scale, scratch, out, kv_scale, tiles, num_splits,
        first_row=first_row, num_rows=num_rows, num_tiles=num_tokens // tile_tokens + num_rows, decode=False,
    )  # fmt: skip
    return out


def _tile_tokens(rows: int, num_heads: int) -> int:
    """Tokens of a tile: those whose heads fit, or a part of one's."""
    return max(1, rows // num_heads)


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_place: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    rank: int,
    scale: float,
    scratch: Scratch,
    out: torch.Tensor,
    kv_scale: float,
    tiles: LatentTiles,
    splits: int,
    *,
    first_row: int,
    num_rows: int,
    num_tiles: int,
    decode: bool,
) -> None:
    """`row_place`: the lengths of decode rows, or where the queries of others start."""
    num_tokens, num_heads, width = q.shape
    heads = min(num_heads, tiles.rows)
    options: dict[str, Any] = launch_options(supports_pdl(q.device))
    assert splits == 1 or num_tokens * num_heads * splits * (rank + 1) <= scratch.partial.numel()
    sums = scratch.partial[num_tokens * num_heads * splits * rank :]
    _latent_kernel[(num_tiles, triton.cdiv(num_heads, heads), splits)](
        q,
        kv,
        row_slot,
        row_place,
        query_start,
        block_table,
        out,
        scratch.partial,
        sums,
        block_table.stride(0),
        kv.stride(0),
        first_row,
        num_rows,
        splits,
        scale * kv_scale * LOG2_E,
        kv_scale,
        HEADS=num_heads,
        TILE_HEADS=heads,
        TILE_TOKENS=1 if decode else _tile_tokens(tiles.rows, num_heads),
        BLOCK_M=tiles.rows,
        RANK=rank,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        TURNING=width - rank,
        BLOCK_TURNING=max(16, triton.next_power_of_2(width - rank)),
        BLOCK_SIZE=kv.shape[3],
        BLOCK_T=tiles.keys,
        SPLIT=splits > 1,
        LEAST=MIN_TILES,
        DECODE=decode,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if splits > 1:
        _combine_kernel[(num_tokens * num_heads,)](
            scratch.partial,
            sums,
            query_start,
            out,
            first_row,
            splits,
            HEADS=num_heads,
            RANK=rank,
            BLOCK_RANK=triton.next_power_of_2(rank),
            BLOCK_SPLITS=MOST_SPLITS,
            STEP=PARTS_AT_ONCE,
            DECODE=decode,
            num_warps=4,
            **options,
        )


@triton.jit(do_not_specialize=["first_row", "num_rows", "splits"])
def _latent_kernel(
    q_ptr,
    kv_ptr,
    row_slot_ptr,
    row_place_ptr,
    query_start_ptr,
    table_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    table_stride,
    kv_block_stride,
    first_row,
    num_rows,
    splits,
    scale,
    kv_scale,
    HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK_TURNING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = RANK + TURNING
    allow_next(PDL)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * TILE_HEADS + m % TILE_HEADS
    within = m // TILE_HEADS
    if DECODE:
        row = tl.program_id(0)
        token = row + within
        first_position = tl.load(row_place_ptr + row) - 1
        count = tl.minimum(first_position + 1, 1)
        last_position = first_position
    else:
        row, tile = find_row(query_start_ptr, first_row, num_rows, tl.program_id(0), TILE_TOKENS)
        begin = tl.load(query_start_ptr + row)
        count = tl.load(query_start_ptr + row + 1) - begin - tile * TILE_TOKENS
        token = begin + tile * TILE_TOKENS + within
        first_position = tl.load(row_place_ptr + row) + tile * TILE_TOKENS
        last_position = first_position + tl.minimum(count, TILE_TOKENS) - 1
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    wait_for_previous(PDL)
    fits = (within < TILE_TOKENS) & (head < HEADS)
    valid = fits & (within < count)
    unit = token.to(tl.int64) * HEADS + head
    r = tl.arange(0, BLOCK_RANK)
    out_mask = valid[:, None] & (r < RANK)[None, :]
    if count <= 0:
        if DECODE:  # padding
            none = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
            zero_mask = (fits & (split + within * 0 == 0))[:, None] & (r < RANK)[None, :]
            tl.store(out_ptr + unit[:, None] * RANK + r[None, :], none.to(out_ptr.dtype.element_ty), mask=zero_mask)
            if SPLIT:
                tl.store(sums_ptr + unit * splits + split, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=fits)
        return

    # Which part of the context this program reads: whole tiles.
    num_tiles = last_position // BLOCK_T + 1
    wanted = tl.minimum(tl.maximum(tl.cdiv(num_tiles, LEAST), 1), splits)
    each = tl.cdiv(num_tiles, wanted)
    key_begin = split * each * BLOCK_T
    key_end = tl.minimum(key_begin + each * BLOCK_T, last_position + 1)
    if SPLIT:
        if key_begin >= key_end:
            tl.store(sums_ptr + unit * splits + split, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
            return

    turn = tl.arange(0, BLOCK_TURNING)
    q_at = q_ptr + unit[:, None] * WIDTH
    q_plain = tl.load(q_at + r[None, :], mask=out_mask, other=0.0)
    q_turned = tl.load(q_at + RANK + turn[None, :], mask=valid[:, None] & (turn < TURNING)[None, :], other=0.0)
    position = first_position + within
    table_row = table_ptr + slot * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(key_begin, key_end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        seen = t < key_end
        if BLOCK_SIZE % BLOCK_T == 0:
            block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
            at = kv_ptr + block * kv_block_stride + (start % BLOCK_SIZE + tl.arange(0, BLOCK_T)) * WIDTH
        else:
            blocks = tl.load(table_row + t // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            at = kv_ptr + blocks * kv_block_stride + (t % BLOCK_SIZE) * WIDTH
        latent = tl.load(at[:, None] + r[None, :], mask=seen[:, None] & (r < RANK)[None, :], other=0.0)
        turned = tl.load(at[:, None] + RANK + turn[None, :], mask=seen[:, None] & (turn < TURNING)[None, :], other=0.0)
        latent = latent.to(q_plain.dtype)
        score = tl.dot(q_turned, tl.trans(turned.to(q_plain.dtype)), out_dtype=tl.float32, input_precision="ieee")
        score = tl.dot(q_plain, tl.trans(latent), score, out_dtype=tl.float32, input_precision="ieee")
        score = tl.where(seen[None, :] & (t[None, :] <= position[:, None]), score * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        finite = tl.maximum(new_peak, -1.0e30)  # a query may see nothing of this part of the context
        weight = tl.exp2(score - finite[:, None])
        shrink = tl.exp2(peak - finite)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(q_plain.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    acc = acc * kv_scale / tl.maximum(total, 1.0e-30)[:, None]
    if not SPLIT:
        tl.store(out_ptr + unit[:, None] * RANK + r[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        part = unit * splits + split
        tl.store(partial_ptr + part[:, None] * RANK + r[None, :], acc, mask=out_mask)
        tl.store(
            sums_ptr + part,
            tl.where(total > 0.0, peak + tl.log2(tl.maximum(total, 1.0e-30)), float("-inf")),
            mask=valid,
        )


@triton.jit(do_not_specialize=["first_row", "splits"])
def _combine_kernel(
    partial_ptr,
    sums_ptr,
    query_start_ptr,
    out_ptr,
    first_row,
    splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts [token, head, split, RANK] of a token and head -> [token, head, RANK]. Tokens of decode rows are left
    out where the parts are of other rows."""
    allow_next(PDL)
    unit = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    if not DECODE:
        if unit < tl.load(query_start_ptr + first_row).to(tl.int64) * HEADS:
            return
    r = tl.arange(0, BLOCK_RANK)
    at = sums_ptr + unit * splits
    all_splits = tl.arange(0, BLOCK_SPLITS)
    sums = tl.load(at + all_splits, mask=all_splits < splits, other=float("-inf"))
    best = tl.maximum(tl.max(sums, axis=0), -1.0e30)
    total = tl.maximum(tl.sum(tl.exp2(sums - best), axis=0), 1.0e-30)
    mixed = tl.zeros([BLOCK_RANK], tl.float32)
    for first in range(0, splits, STEP):
        split = first + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(at + split, mask=split < splits, other=float("-inf")) - best)
        mask = (weight > 0.0)[:, None] & (r < RANK)[None, :]
        part = tl.load(partial_ptr + (unit * splits + split)[:, None] * RANK + r[None, :], mask=mask, other=0.0)
        mixed += tl.sum(part * weight[:, None], axis=0)
    tl.store(out_ptr + unit * RANK + r, (mixed / total).to(out_ptr.dtype.element_ty), mask=r < RANK)


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Multiply each head's rows: x [T, H, K] by weight [H, K, N] -> out [T, H, N]. Rows and heads may lie apart. A
    row's sums are added in the same order whatever the batch."""
    num_tokens, num_heads, columns = x.shape
    width = weight.shape[2]
    if num_tokens == 0:
        return out
    _heads_kernel[(triton.cdiv(num_tokens, 16), triton.cdiv(width, 64), num_heads)](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        num_tokens,
        K=columns,
        N=width,
        BLOCK_M=16,
        BLOCK_N=64,
        BLOCK_K=32,
        num_warps=4,
        **launch_options(supports_pdl(x.device), exact=True),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _heads_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    num_tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    exists = token < num_tokens
    wait_for_previous(PDL)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + head * x_head_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + k
        x = tl.load(x_at + inner[None, :], mask=exists[:, None] & (inner < K)[None, :], other=0.0)
        weight_at = weight_ptr + (head * K + inner)[:, None] * N + n[None, :]
        weight = tl.load(weight_at, mask=(inner < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_at = out_ptr + token.to(tl.int64)[:, None] * out_stride + head * out_head_stride + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (n < N)[None, :])
