"""Gumbel noise in Triton, from the counter-based generator of docs/runtime.md (Philox-4x32-10: Salmon et al., 2011)."""

import triton
import triton.language as tl


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
    """Gumbel noise of a uniform 32-bit word: -log(-log1p(-w)), w = (word + 0.5) / 2^32 in float32."""
    w = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log1p(-w) by its series where w is small: there the winners are, and there it must be exact
    series = 1.0 + w * (0.5 + w * (1.0 / 3 + w * (0.25 + w * (0.2 + w * (1.0 / 6 + w * (1.0 / 7 + w * 0.125))))))
    large = -natural_log(tl.maximum(1.0 - w, 1.0e-30), FAST)
    exponential = tl.where(w < 0.0625, w * series, large)
    return tl.where(w < 1.0, -natural_log(exponential, FAST), float("-inf"))


@triton.jit
def noise_tile(seed, position, start, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Noise of tokens [start, start + BLOCK), start a multiple of 4: Philox gives four words at a time."""
    counter = start // 4 + tl.arange(0, BLOCK // 4)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position, zero, zero)
    return gumbel_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)), FAST)


@triton.jit
def noise_at(seed, position, ids, FAST: tl.constexpr):
    """Noise of scattered tokens."""
    zero = ids * 0
    w0, w1, w2, w3 = tl.philox(seed, ids // 4, zero + position, zero, zero)
    low = tl.where(ids % 2 == 0, w0, w1)
    high = tl.where(ids % 2 == 0, w2, w3)
    return gumbel_of(tl.where(ids % 4 < 2, low, high), FAST)
