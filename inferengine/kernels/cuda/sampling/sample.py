"""Sampling on the device: no sort, no host sync, every launch fixed by [N, V] and the features that some row uses.

The vocabulary of a row is cut in parts, so that one row uses many multiprocessors. Rows without a filter are drawn in
one pass (`_draw_kernel`: every part's best of score + Gumbel noise) and a reduction. Top-k and top-p are thresholds:
1. `_draw_kernel` leaves every part's largest score and its sum of exponentials;
2. `_census_kernel` counts the tokens above LEVELS thresholds spread below the row's maximum, the upper half of them
   first, and weighs them where no top-k needs only the count;
3. `_gather_kernel` copies the tokens above the highest threshold that holds all that the filters keep;
4. `_finish_kernel` narrows the threshold among these until nothing lies between its bounds, then draws.
A distribution so flat that more than CANDIDATES tokens remain is drawn from before top-p has a threshold: 3. draws
among all tokens above that level, 4. tests whether top-p keeps the drawn one, else draws again above it (`settle`).
With top-k its threshold is narrowed over the whole vocabulary instead: slower, as exact.

Tokens further than REACH below the best are left out: at fp32 noise they cannot win. The definition of every step is
kernels/reference/ops.py; the argmax of score + Gumbel noise is a draw from the softmax (Gumbel 1954).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.sampling.filters import (
    exact_sum,
    keep_threshold,
    mass_above,
    rough_scores,
    scaled_scores,
    weigh,
)
from inferengine.kernels.cuda.sampling.logits import process
from inferengine.kernels.reference.ops import FILTER, PROCESSED, RANDOM

CANDIDATES = 4096  # tokens of a row that `_finish_kernel` has room for
BLOCK = 1024  # tokens per tile of a pass
TARGET_PROGRAMS = 1056  # programs of a pass over all rows: eight a multiprocessor of the largest devices
MOST_PARTS = 64  # a power of two
TARGET_ROWS = 64  # rows that deterministic mode cuts the vocabulary for
LEVELS = tl.constexpr(16)
REACH = tl.constexpr(32.0)
DRAWS = tl.constexpr(64)  # of a flat row, at most: see `settle`
# Compiled once for any number of rows, parts and any place of the columns in their buffer: a new combination must not
# be compiled while requests wait.
VARIABLE = {
    "do_not_specialize": ["num_rows", "part_tiles", "num_parts"],
    "do_not_specialize_on_alignment": ["rows_ptr", "positions_ptr"],
}


# -- Gumbel noise: Philox-4x32-10 (Salmon et al. 2011), as docs/executor.md defines it ---------------------------------


@triton.jit
def natural_log(x, FAST: tl.constexpr):
    """Logarithm of a normal positive number; FAST takes the special function unit's, good to 2^-22."""
    if FAST:
        lg2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return lg2 * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def gumbel_of(word, FAST: tl.constexpr):
    """Gumbel noise of a uniform 32-bit word: -log(-log1p(-w)), w = (word + 0.5) / 2^32 in float32, at most 1 - 2^-24:
    noise of -inf would look like a token that is forbidden."""
    w = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log1p(-w) by its series where w is small: there the winners are, and there it must be exact
    series = 1.0 + w * (0.5 + w * (1.0 / 3 + w * (0.25 + w * (0.2 + w * (1.0 / 6 + w * (1.0 / 7 + w * 0.125))))))
    large = -natural_log(tl.maximum(1.0 - w, 5.960464477539063e-08), FAST)
    return -natural_log(tl.where(w < 0.0625, w * series, large), FAST)


@triton.jit
def philox(seed, position, counter):
    """Four 32-bit words of each counter. As tl.philox, but with both halves of a product from one multiplication."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c2 = c0 * 0
    c1, c3 = c2 + position.to(tl.uint32), c2
    for _ in tl.static_range(10):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise_tile(seed, position, start, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Noise of tokens [start, start + BLOCK), start a multiple of 4: Philox gives four words at a time."""
    counter = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox(seed, position, counter)
    return gumbel_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)), FAST)


@triton.jit
def noise_at(seed, position, ids, FAST: tl.constexpr):
    """Noise of scattered tokens."""
    w0, w1, w2, w3 = philox(seed, position, ids // 4)
    low = tl.where(ids % 2 == 0, w0, w1)
    high = tl.where(ids % 2 == 0, w2, w3)
    return gumbel_of(tl.where(ids % 4 < 2, low, high), FAST)


# -- draws -------------------------------------------------------------------------------------------------------------


@triton.jit
def gumbel_argmax(
    row, begin, end, VOCAB: tl.constexpr, temperature, seed, position, floor, STRICTLY: tl.constexpr,
    BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return (best score + noise, its id) of tokens [begin, end) of a row whose scaled scores are at least `floor`, or
    STRICTLY above it; -inf where there is none.

    Noise is -log(-log(1 - w)), at most -log(w), so only a token with w < exp(score - best) can win. That is an
    exponential and a comparison a token, the two logarithms are taken for tiles in which some token passes: the first,
    and then as seldom as a running maximum changes. The allowance covers the rounding of the test.
    """
    QUARTER: tl.constexpr = BLOCK // 4  # Philox gives words for four tokens at a time
    best = float("-inf")
    best_id = 0
    log2_e: tl.constexpr = 1.4426950408889634
    slope = log2_e / temperature
    four = tl.arange(0, QUARTER)
    for start in range(begin, end, BLOCK):
        token = start + 4 * four[:, None] + tl.arange(0, 4)[None, :]
        score = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        even, odd = tl.split(tl.reshape(score, [QUARTER, 2, 2]))
        s0, s2 = tl.split(even)
        s1, s3 = tl.split(odd)
        w0, w1, w2, w3 = philox(seed, position, start // 4 + four)
        known = tl.minimum(tl.maximum(best, -1.0e37), 1.0e37)
        offset = 0.01 + 1.0e-5 * tl.abs(known) - known * log2_e
        passes = may_win(s0, w0, slope, offset) | may_win(s1, w1, slope, offset)
        passes |= may_win(s2, w2, slope, offset) | may_win(s3, w3, slope, offset)
        if tl.max(passes.to(tl.int32), axis=0) > 0:
            v0 = noisy(s0, w0, temperature, floor, STRICTLY, FAST)
            v1 = noisy(s1, w1, temperature, floor, STRICTLY, FAST)
            v2 = noisy(s2, w2, temperature, floor, STRICTLY, FAST)
            v3 = noisy(s3, w3, temperature, floor, STRICTLY, FAST)
            top = tl.max(tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), axis=0)
            first = tl.where(v2 == top, 2, tl.where(v3 == top, 3, 4))
            first = tl.where(v0 == top, 0, tl.where(v1 == top, 1, first))
            top_id = tl.min(tl.where(first < 4, start + 4 * four + first, 2147483647), axis=0)
            if top > best:
                best = top
                best_id = top_id
    return best, best_id


@triton.jit
def may_win(score, word, slope, offset):
    """False only for tokens whose noise cannot lift them above the best so far. NaN passes: the minimum is a number."""
    low = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0  # w or a little less
    return low < tl.exp2(tl.minimum(score * slope + offset, 1.0))


@triton.jit
def noisy(score, word, temperature, floor, STRICTLY: tl.constexpr, FAST: tl.constexpr):
    """Return score / temperature + noise, -inf below the floor; NaN counts as infinite, so that it is found."""
    score = tl.div_rn(score, tl.zeros_like(score) + temperature)
    score = tl.where(score == score, score, float("inf"))
    if STRICTLY:
        passes = score > floor
    else:
        passes = score >= floor
    return tl.where(passes, score + gumbel_of(word, FAST), float("-inf"))


def sample(
    logits: torch.Tensor,
    slots: Any,
    rows: torch.Tensor,
    positions: torch.Tensor,
    needs: int,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Draw from logits [N, V] of the slots `rows` [N] -> ids [N] int32, also written to slots.tokens[row, position].

    `positions` [N] are the indices of the tokens drawn; `needs` are the feature bits that some row uses. A row without
    a finite winner, or with a NaN, gives -1, or -2 where every score is -inf (and 0 in slots.tokens). `deterministic`:
    the vocabulary is cut the same way for any number of rows, so that a row's sums have the same bits.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return ids
    options = launch_options(supports_pdl(logits.device))
    scores = logits
    if needs & PROCESSED:  # processed scores are drawn from by one set of kernels, whatever their rows use
        scores = process(logits, slots, rows, positions, needs, options)
        needs |= RANDOM | FILTER
    part_tiles, num_parts = _parts(TARGET_ROWS if deterministic else num_rows, vocab_size)
    parts = (part_tiles, num_parts)
    filtered = bool(needs & FILTER)
    fast = logits.device.type == "cuda"
    best = torch.empty(4, num_rows, num_parts, dtype=torch.float32, device=logits.device)
    shape: dict[str, Any] = {"VOCAB": vocab_size, "BLOCK": BLOCK, **options}
    state = (slots.temperature, slots.top_k, slots.top_p, slots.min_p)
    _draw_kernel[(num_rows, num_parts)](
        scores, scores.stride(0), rows, positions, *state, slots.seed, best, num_rows, *parts,
        IS_RANDOM=bool(needs & RANDOM), FILTERED=filtered, FAST=fast, num_warps=4, **shape,
    )  # fmt: skip
    census = kept_ids = kept_scores = best
    if filtered:
        census = torch.empty(2, num_rows, num_parts, LEVELS.value, dtype=torch.float32, device=logits.device)
        kept_scores = torch.empty(num_rows, CANDIDATES, dtype=torch.float32, device=logits.device)
        kept_ids = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=logits.device)
        _census_kernel[(num_rows, num_parts)](
            scores, scores.stride(0), rows, *state, best, census, num_rows, *parts, MOST_PARTS=MOST_PARTS,
            num_warps=4, **shape,
        )  # fmt: skip
        _gather_kernel[(num_rows, num_parts)](
            scores, scores.stride(0), rows, positions, *state, slots.seed, best, census, kept_scores, kept_ids,
            num_rows, *parts, MOST_PARTS=MOST_PARTS, CAPACITY=CANDIDATES, FAST=fast, num_warps=4, **shape,
        )  # fmt: skip
    _finish_kernel[(num_rows,)](
        scores if filtered else best, scores.stride(0), rows, positions, *state, slots.seed, best, census,
        kept_scores, kept_ids, slots.tokens, slots.tokens.stride(0), ids, num_rows, num_parts,
        MOST_PARTS=MOST_PARTS, CAPACITY=CANDIDATES, FILTERED=filtered, FAST=fast, num_warps=8 if filtered else 1,
        **shape,
    )  # fmt: skip
    return ids


def _parts(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """(tiles of BLOCK tokens per part, parts): as many parts as fill the device."""
    tiles = triton.cdiv(vocab_size, BLOCK)
    parts = max(1, min(MOST_PARTS, TARGET_PROGRAMS // num_rows, tiles))
    part_tiles = triton.cdiv(tiles, parts)
    return part_tiles, triton.cdiv(tiles, part_tiles)


@triton.jit
def has_filter(temperature, top_k, top_p, min_p):
    """Return whether a row is drawn with top-k, top-p or min-p."""
    return (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit(**VARIABLE)
def _draw_kernel(
    scores_ptr, scores_stride, rows_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    best_ptr, num_rows, part_tiles, num_parts, VOCAB: tl.constexpr, BLOCK: tl.constexpr, IS_RANDOM: tl.constexpr,
    FILTERED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one part of a row: the best score with its id; for rows with a filter the sum of exponentials in its place."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    position = tl.load(positions_ptr + n)
    temperature = 0.0
    if IS_RANDOM:
        temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seed_ptr + slot)
    filtered = False
    if FILTERED:
        filtered = has_filter(
            temperature, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        )
    row = scores_ptr + n * scores_stride
    begin = part * part_tiles * BLOCK
    end = tl.minimum(begin + part_tiles * BLOCK, VOCAB)
    at = n * num_parts + part
    plane = num_rows * num_parts
    if IS_RANDOM:
        if (temperature > 0) & (not filtered):
            floor = float("-inf")
            top, top_id = gumbel_argmax(row, begin, end, VOCAB, temperature, seed, position, floor, False, BLOCK, FAST)
            tl.store(best_ptr + at, top)
            tl.store((best_ptr + plane + at).to(tl.pointer_type(tl.int32)), top_id)
            return
    if FILTERED:
        if filtered:
            top, mass = weigh(row, begin, end, VOCAB, temperature, BLOCK)
            tl.store(best_ptr + at, top)
            tl.store(best_ptr + 2 * plane + at, mass)
            return
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = scaled_scores(row, token, VOCAB, 0.0)
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, token, best_id)
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, 2147483647), axis=0)
    tl.store(best_ptr + at, top)
    tl.store((best_ptr + plane + at).to(tl.pointer_type(tl.int32)), top_id)


@triton.jit
def row_peak(best_ptr, n, plane, num_parts, MOST_PARTS: tl.constexpr):
    """A row's largest score and the sum of exp(score - it), the same bits in every thread."""
    p = tl.arange(0, MOST_PARTS)
    tops = tl.load(best_ptr + n * num_parts + p, mask=p < num_parts, other=float("-inf"))
    masses = tl.load(best_ptr + 2 * plane + n * num_parts + p, mask=p < num_parts, other=0.0)
    peak = tl.max(tops, axis=0)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    return peak, exact_sum(masses * tl.exp(tl.minimum(tops - shift, 0.0)), 0)


@triton.jit
def level_of(peak, level):
    """Threshold `level` in [0, LEVELS): close together near the peak, REACH below it at the end."""
    fraction = (level + 1).to(tl.float32) / LEVELS
    return peak - REACH * fraction * fraction


@triton.jit(**VARIABLE)
def _census_kernel(
    scores_ptr, scores_stride, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, census_ptr,
    num_rows, part_tiles, num_parts, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MOST_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tokens of a part at or above each level: how many, and their sum of exp(score - peak)."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if not has_filter(temperature, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)):
        return
    plane = num_rows * num_parts
    peak, total = row_peak(best_ptr, n, plane, num_parts, MOST_PARTS)
    if tl.abs(peak) == float("inf"):
        return  # the row fails
    row = scores_ptr + n * scores_stride
    begin = part * part_tiles * BLOCK
    end = tl.minimum(begin + part_tiles * BLOCK, VOCAB)
    at = census_ptr + (n * num_parts + part) * LEVELS
    HALF: tl.constexpr = LEVELS // 2
    level = tl.arange(0, HALF)
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    # deep levels do not matter where the upper ones hold enough, though it be in this part alone
    if top_k > 0:
        counts, _unused = census(row, begin, end, VOCAB, temperature, peak, 0, HALF, False, BLOCK)
        deep_counts = tl.zeros([HALF], tl.float32) + top_k
        if tl.max(counts, axis=0) < top_k:
            deep_counts, _unused = census(row, begin, end, VOCAB, temperature, peak, HALF, HALF, False, BLOCK)
        tl.store(at + level, counts)
        tl.store(at + HALF + level, deep_counts)
        return
    counts, masses = census(row, begin, end, VOCAB, temperature, peak, 0, HALF, True, BLOCK)
    deep_counts = tl.zeros([HALF], tl.float32)
    deep_masses = deep_counts + 2.0 * total
    enough = tl.max(masses, axis=0) >= 1.001 * top_p * total
    if top_p >= 1.0:
        enough = tl.exp(-REACH * 0.25) < min_p
    if not enough:
        deep_counts, deep_masses = census(row, begin, end, VOCAB, temperature, peak, HALF, HALF, True, BLOCK)
    tl.store(at + level, counts)
    tl.store(at + HALF + level, deep_counts)
    tl.store(at + plane * LEVELS + level, masses)
    tl.store(at + plane * LEVELS + HALF + level, deep_masses)


@triton.jit
def census(
    row, begin, end, VOCAB: tl.constexpr, temperature, peak, first_level, COUNT: tl.constexpr, WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of COUNT levels: tokens of a part at or above them, and (else 0) their sum of exp(score - peak)."""
    threshold = level_of(peak, tl.arange(0, COUNT) + first_level)
    slope = 1.0 / temperature
    RUN: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth  # neighbours that one thread loads and sums
    counts = tl.zeros([COUNT, BLOCK // RUN], tl.float32)
    masses = tl.zeros([COUNT, BLOCK // RUN], tl.float32)
    for start in range(begin, end, BLOCK):
        score = rough_scores(row, start + tl.arange(0, BLOCK), VOCAB, slope)
        runs = tl.reshape(score, [1, BLOCK // RUN, RUN])
        above = runs >= threshold[:, None, None]
        counts += tl.sum(above.to(tl.float32), axis=2)
        if WEIGHED:
            masses += tl.sum(tl.where(above, tl.exp(runs - peak), 0.0), axis=2)
    return tl.sum(counts, axis=1), exact_sum(masses, 1)


@triton.jit
def choose_level(census_ptr, n, plane, top_k, top_p, min_p, peak, total, num_parts, MOST_PARTS: tl.constexpr):
    """(threshold, how many tokens are at or above it, level) of the highest level that holds all that is kept: the end
    of REACH and level LEVELS if none does. Fourth, without top-k, a score from which on all tokens are kept."""
    p = tl.arange(0, MOST_PARTS)[:, None]
    level = tl.arange(0, LEVELS)
    at = census_ptr + (n * num_parts + p) * LEVELS + level[None, :]
    counts = tl.sum(tl.load(at, mask=p < num_parts, other=0.0), axis=0)
    threshold = level_of(peak, level)
    kept_from = peak
    if top_k > 0:
        holds = counts >= top_k.to(tl.float32)
    elif top_p < 1.0:  # a row with top-k has counts alone
        masses = exact_sum(tl.load(at + plane * LEVELS, mask=p < num_parts, other=0.0), 0)
        holds = masses >= top_p * total * 1.00001  # a little more, for sums in another order
        kept_from = tl.min(tl.where(masses < top_p * total * 0.99999, threshold, peak), axis=0)
    else:
        holds = threshold <= peak + tl.log(min_p)
    chosen = tl.min(tl.where(holds, level, LEVELS), axis=0)
    chosen_count = tl.sum(tl.where(level == chosen, counts, 0.0), axis=0)
    chosen_threshold = tl.min(tl.where(level <= chosen, threshold, peak), axis=0)
    return chosen_threshold, chosen_count.to(tl.int32), chosen, kept_from


@triton.jit
def rounding(threshold, peak):
    """How far a rough score may be from the scaled one, near this threshold."""
    return 1.0e-6 * (tl.abs(threshold) + tl.abs(peak))


@triton.jit(**VARIABLE)
def _gather_kernel(
    scores_ptr, scores_stride, rows_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    best_ptr, census_ptr, kept_scores_ptr, kept_ids_ptr, num_rows, part_tiles, num_parts, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, MOST_PARTS: tl.constexpr, CAPACITY: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the tokens of a part that are at or above the row's level, in order of their ids, if all fit; else, without
    top-k, draw one of them."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    if not has_filter(temperature, top_k, top_p, min_p):
        return
    plane = num_rows * num_parts
    peak, total = row_peak(best_ptr, n, plane, num_parts, MOST_PARTS)
    if tl.abs(peak) == float("inf"):
        return
    threshold, count, level, _unused = choose_level(
        census_ptr, n, plane, top_k, top_p, min_p, peak, total, num_parts, MOST_PARTS
    )
    row = scores_ptr + n * scores_stride
    begin = part * part_tiles * BLOCK
    end = tl.minimum(begin + part_tiles * BLOCK, VOCAB)
    if (level >= LEVELS) | (count > CAPACITY):
        if top_k > 0:
            return
        floor = threshold - rounding(threshold, peak)
        if min_p > 0:
            floor = tl.minimum(tl.maximum(floor, peak + tl.log(min_p)), peak)
        seed, position = tl.load(seed_ptr + slot), tl.load(positions_ptr + n)
        top, top_id = gumbel_argmax(row, begin, end, VOCAB, temperature, seed, position, floor, False, BLOCK, FAST)
        at = best_ptr + n * num_parts + part
        tl.store((at + plane).to(tl.pointer_type(tl.int32)), top_id)
        tl.store(at + 3 * plane, top)
        return
    p = tl.arange(0, MOST_PARTS)
    before = tl.load(census_ptr + (n * num_parts + p) * LEVELS + level, mask=p < part, other=0.0)
    place = tl.sum(before, axis=0).to(tl.int32)
    slope = 1.0 / temperature
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        above = rough_scores(row, token, VOCAB, slope) >= threshold
        taken = above.to(tl.int32)
        count_here = tl.sum(taken, axis=0)
        if count_here > 0:
            at = n * CAPACITY + place + tl.cumsum(taken, axis=0) - 1
            tl.store(kept_scores_ptr + at, scaled_scores(row, token, VOCAB, temperature), mask=above)
            tl.store(kept_ids_ptr + at, token, mask=above)
            place += count_here


@triton.jit
def settle(
    row, VOCAB: tl.constexpr, temperature, seed, position, winner, token, kept_from, target, peak, BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(score + noise, id) of the draw among the tokens of a row that top-p keeps, where `winner` and `token` are the
    draw among more of them. All tokens from the score `kept_from` on are kept.

    A token is kept where those above it weigh less than `target`, and then it has won among the kept ones, too. Else
    none at or below its score is kept, and the next draw is among those above it. A draw that is not kept halves what
    is too much, on average: after k of them the chance is below ln(1 / top_p)^k / k!, so DRAWS are never used up.
    """
    rounds = 0
    while rounds < DRAWS:
        score = tl.div_rn(tl.load(row + token).to(tl.float32), temperature)
        rounds += 1
        above = -1.0
        if score < tl.minimum(kept_from, peak):
            above = mass_above(row, VOCAB, temperature, score, peak, 4 * BLOCK)
        if above < target:
            rounds = DRAWS
        else:
            winner, token = gumbel_argmax(
                row, 0, VOCAB, VOCAB, temperature, seed, position, score, True, 4 * BLOCK, FAST
            )
    return winner, token


@triton.jit(**VARIABLE)
def _finish_kernel(
    scores_ptr, scores_stride, rows_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr,
    best_ptr, census_ptr, kept_scores_ptr, kept_ids_ptr, tokens_ptr, tokens_stride, ids_ptr, num_rows, num_parts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, MOST_PARTS: tl.constexpr, CAPACITY: tl.constexpr,
    FILTERED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The winner of a row: from the parts' winners, or among the tokens that its filters keep."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    position = tl.load(positions_ptr + n)
    plane = num_rows * num_parts
    p = tl.arange(0, MOST_PARTS)
    tops = tl.load(best_ptr + n * num_parts + p, mask=p < num_parts, other=float("-inf"))
    top_ids = tl.load(
        (best_ptr + plane + n * num_parts + p).to(tl.pointer_type(tl.int32)), mask=p < num_parts, other=2147483647
    )
    winner = tl.max(tops, axis=0)
    token = tl.min(tl.where(tops == winner, top_ids, 2147483647), axis=0)
    if FILTERED:
        temperature = tl.load(temperature_ptr + slot)
        top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        finite = (winner > float("-inf")) & (winner < float("inf"))
        if has_filter(temperature, top_k, top_p, min_p) & finite:
            seed = tl.load(seed_ptr + slot)
            peak, total = row_peak(best_ptr, n, plane, num_parts, MOST_PARTS)
            low, count, level, kept_from = choose_level(
                census_ptr, n, plane, top_k, top_p, min_p, peak, total, num_parts, MOST_PARTS
            )
            row = scores_ptr + n * scores_stride
            best = tl.full([BLOCK], float("-inf"), tl.float32)
            best_id = tl.full([BLOCK], 2147483647, tl.int32)
            if (level < LEVELS) & (count <= CAPACITY):
                kept = kept_scores_ptr + n * CAPACITY
                low -= rounding(low, peak)  # the level was held against rough scores
                threshold = keep_threshold(kept, count, 0.0, low, top_k, top_p, min_p, peak, total, BLOCK)
                for start in range(0, count, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    score = scaled_scores(kept, i, count, 0.0)
                    ids = tl.load(kept_ids_ptr + n * CAPACITY + i, mask=i < count, other=0)
                    drawn = tl.where(score >= threshold, score + noise_at(seed, position, ids, FAST), float("-inf"))
                    better = drawn > best
                    best = tl.where(better, drawn, best)
                    best_id = tl.where(better, ids, best_id)
                winner = tl.max(best, axis=0)
                token = tl.min(tl.where(best == winner, best_id, 2147483647), axis=0)
            elif top_k > 0:
                threshold = keep_threshold(row, VOCAB, temperature, low, top_k, top_p, min_p, peak, total, BLOCK)
                for start in range(0, VOCAB, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    score = scaled_scores(row, ids, VOCAB, temperature)
                    noise = noise_tile(seed, position, start, BLOCK, FAST)
                    drawn = tl.where(score >= threshold, score + noise, float("-inf"))
                    better = drawn > best
                    best = tl.where(better, drawn, best)
                    best_id = tl.where(better, ids, best_id)
                winner = tl.max(best, axis=0)
                token = tl.min(tl.where(best == winner, best_id, 2147483647), axis=0)
            else:
                drawn = tl.load(best_ptr + 3 * plane + n * num_parts + p, mask=p < num_parts, other=float("-inf"))
                winner = tl.max(drawn, axis=0)
                token = tl.min(tl.where(drawn == winner, top_ids, 2147483647), axis=0)
                if top_p < 1.0:
                    winner, token = settle(
                        row, VOCAB, temperature, seed, position, winner, token, kept_from + rounding(kept_from, peak),
                        top_p * total, peak, BLOCK, FAST,
                    )  # fmt: skip
    good = (winner > float("-inf")) & (winner < float("inf"))
    tl.store(ids_ptr + n, tl.where(good, token, tl.where(winner == float("-inf"), -2, -1)))
    tl.store(tokens_ptr + slot * tokens_stride + position, tl.where(good, token, 0))
