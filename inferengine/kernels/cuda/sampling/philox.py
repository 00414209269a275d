"""Gumbel noise in Triton, from the counter-based generator of docs/executor.md (Philox-4x32-10, Salmon et al. 2011)."""

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
