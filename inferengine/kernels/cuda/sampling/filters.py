"""Top-k, top-p and min-p as a threshold: narrowed between two bounds until no number lies between them.

Every thread of a program must take the same branches: they contain barriers and exchanges between threads. A branch
depends only on what is loaded, on integers, on maxima and minima, and on sums of `exact_sum`. A plain `tl.sum` of
floats is not safe there. A reduction adds a neighbour's value to a thread's own. Where the own value is a product, the
compiler fuses product and addition: one thread computes fma(a, b, c * d), its neighbour fma(c, d, a * b). On an H200
two halves of a warp disagreed on a total by that rounding, took different branches and waited for each other for ever.
"""

import triton
import triton.language as tl

WAYS = tl.constexpr(8)  # thresholds tried at once when narrowing
ROUNDS = tl.constexpr(12)  # 8^12 divisions: the bounds are neighbours in fp32 before that
MASS_UNIT = tl.constexpr(2.0**-36)  # of a sum in fixed point: weights of up to 2^27 in all fit 63 bits


@triton.jit
def scaled_scores(row, token, end, temperature):
    """Scores over temperature; NaN becomes +inf, which no later step takes for a winner. Past the end: -inf."""
    score = tl.load(row + token, mask=token < end, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        score = tl.div_rn(score, tl.zeros_like(score) + temperature)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def exact_sum(mass, axis: tl.constexpr):
    """Sum along an axis of weights, less than 2^27 in all, in fixed point: the same bits in every thread and order."""
    return tl.sum((mass * (1.0 / MASS_UNIT)).to(tl.int64), axis=axis).to(tl.float32) * MASS_UNIT


@triton.jit
def rough_scores(row, token, end, slope):
    """Scores times 1 / temperature: what levels are held against, a rounding away from the scaled ones."""
    return tl.load(row + token, mask=token < end, other=float("-inf")).to(tl.float32) * slope


@triton.jit
def weigh(row, begin, end, VOCAB: tl.constexpr, temperature, BLOCK: tl.constexpr):
    """(largest scaled score, sum of exp(score - it)) of tokens [begin, end) of a row; +inf with a NaN among them."""
    far: tl.constexpr = 1.0e30  # stands for infinity: differences of it are numbers
    slope = 1.4426950408889634 / temperature
    best = tl.full([BLOCK], -far, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        score = tl.minimum(tl.where(score == score, score, far), far)
        less = tl.exp2(-tl.abs(score - best) * slope)
        mass = tl.where(score > best, mass * less + 1.0, mass + less)
        best = tl.maximum(best, score)
    top = tl.max(best, axis=0)
    total = tl.sum(mass * tl.exp2((best - top) * slope), axis=0)
    peak = tl.max(tl.div_rn(best, tl.zeros_like(best) + temperature), axis=0)
    peak = tl.where(top >= far, float("inf"), tl.where(top <= -far, float("-inf"), peak))
    return peak, total


@triton.jit
def mass_above(row, size, temperature, least, peak, BLOCK: tl.constexpr):
    """Sum of exp(score - peak) of the tokens whose scaled scores are above `least`."""
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        score = scaled_scores(row, start + tl.arange(0, BLOCK), size, temperature)
        masses += tl.where(score > least, tl.exp(score - peak), 0.0)
    return exact_sum(masses, 0)


@triton.jit
def narrow(row, size, temperature, low, high, target, weighed, peak, BLOCK: tl.constexpr):
    """The largest threshold in [low, high) at or above which tokens count (or, `weighed`, weigh) at least `target`;
    `low` if none does. Returns it and the sum of exp(score - peak) at or above it.

    Each round tries WAYS thresholds; it ends when at most one token, several of one score (16-bit logits have few
    different ones), or no number lies between the bounds.
    """
    way = tl.arange(0, WAYS)
    above_low = float("inf")
    above_high = 0.0
    mass_low = -1.0
    rounds = 0
    while (rounds < ROUNDS) & (above_low - above_high > 1.0):
        step = (high - low) / WAYS
        threshold = low + step * way.to(tl.float32)
        counts = tl.zeros([WAYS, BLOCK], tl.float32)
        masses = tl.zeros([WAYS, BLOCK], tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            score = scaled_scores(row, start + tl.arange(0, BLOCK), size, temperature)
            above = score[None, :] >= threshold[:, None]
            counts += above.to(tl.float32)
            masses += tl.where(above, tl.exp(score - peak)[None, :], 0.0)
            inside = (score >= low) & (score < high)
            least = tl.minimum(least, tl.where(inside, score, float("inf")))
            most = tl.maximum(most, tl.where(inside, score, float("-inf")))
        count = tl.sum(counts, axis=1)
        mass = exact_sum(masses, 1)
        enough = tl.where(weighed, mass, count) >= target
        last = tl.maximum(tl.max(tl.where(enough, way, 0), axis=0), 0)
        new_low = tl.sum(tl.where(way == last, threshold, 0.0), axis=0)
        above_low = tl.sum(tl.where(way == last, count, 0.0), axis=0)
        mass_low = tl.sum(tl.where(way == last, mass, 0.0), axis=0)
        if last < WAYS - 1:
            high = tl.sum(tl.where(way == last + 1, threshold, 0.0), axis=0)
            above_high = tl.sum(tl.where(way == last + 1, count, 0.0), axis=0)
        low = new_low
        rounds += 1
        if (tl.min(least, axis=0) >= tl.max(most, axis=0)) | (low + (high - low) / 2 <= low):
            rounds = ROUNDS
    return low, mass_low


@triton.jit
def keep_threshold(row, size, temperature, low, top_k, top_p, min_p, peak, total, BLOCK: tl.constexpr):
    """Score from which on tokens of `row` pass top-k, then top-p of what that left, and min-p."""
    above_peak = peak + tl.maximum(tl.abs(peak) * 1.0e-6, 1.0e-6)
    threshold = low
    if top_k > 0:
        threshold, total = narrow(row, size, temperature, low, above_peak, top_k.to(tl.float32), False, peak, BLOCK)
    if top_p < 1.0:
        by_mass, _ = narrow(row, size, temperature, threshold, above_peak, top_p * total, True, peak, BLOCK)
        threshold = tl.maximum(threshold, by_mass)
    if min_p > 0:
        threshold = tl.maximum(threshold, peak + tl.log(min_p))
    return tl.minimum(threshold, peak)
