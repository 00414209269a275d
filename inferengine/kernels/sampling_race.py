"""Draws without filters: the best of score + Gumbel noise over a part of a row, with noise only where it can matter."""

import triton
import triton.language as tl

from inferengine.kernels.sampling_noise import gumbel_of, philox


@triton.jit
def race(row, begin, end, VOCAB: tl.constexpr, temperature, seed, position, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """(best score + noise, its id) of tokens [begin, end) of a row.

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
            v0, v1 = noisy(s0, w0, temperature, FAST), noisy(s1, w1, temperature, FAST)
            v2, v3 = noisy(s2, w2, temperature, FAST), noisy(s3, w3, temperature, FAST)
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
def noisy(score, word, temperature, FAST: tl.constexpr):
    score = tl.div_rn(score, tl.zeros_like(score) + temperature)
    return tl.where(score == score, score, float("inf")) + gumbel_of(word, FAST)
