"""What a program of decode attention does: read a tile, turn its queries, attend, add up the splits' parts.

With few rows a program lives for one tile, and its time is the sum of the waits of one warp. Therefore tensors that
meet have one shape, heads by elements, even where the rows are equal: of other shapes the compiler would carry each
through shared memory to meet the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferengine.kernels.activation import tanh


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
def both_asked_for(k, v):
    """The same tensors, of which neither is used before both are on their way: else the compiler moves keys to shared
    memory, behind a barrier, before it asks for values. No instruction, and for devices only."""
    PACK: tl.constexpr = 32 // k.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "// $0 $1", "=r,=r,0,1", [k, v], dtype=(k.dtype, v.dtype), is_pure=False, pack=PACK
    )


@triton.jit
def rotation_factors(norm_ptr, cos_sin_row, g, d, mask, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """What elements d of heads g are multiplied by, and what their partners: the norm's gain, the angle's cosine and
    sine. Nothing of it comes from the kernel before."""
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
    results [BLOCK_GROUP, BLOCK_DIM]. Other programs wrote them: read past L1."""
    STEP: tl.constexpr = 8 if SPLITS > 4 else 4 if SPLITS > 2 else 2
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
    return result / tl.maximum(norm, 1.0e-30)[:, None]
