"""The instruction mma m16n8k16 with the loads and conversions around it, each in a thread's registers.

Each function has the instruction itself for the card and the same arithmetic in Triton for the interpreter (HARDWARE).
"""

from __future__ import annotations

import triton
import triton.language as tl

_BF16_NUMBERS = tl.constexpr("""{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
}""")
_FP16_NUMBERS = tl.constexpr("""{
.reg .b32 a, b, c, d;
shl.b32 a, $4, 6;
shl.b32 b, $4, 2;
shr.u32 c, $4, 2;
shr.u32 d, $4, 6;
lop3.b32 $0, a, 0x03C003C0, 0x4C004C00, 0xEA;
lop3.b32 $1, b, 0x03C003C0, 0x4C004C00, 0xEA;
lop3.b32 $2, c, 0x03C003C0, 0x4C004C00, 0xEA;
lop3.b32 $3, d, 0x03C003C0, 0x4C004C00, 0xEA;
}""")
_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_BF16_MULTIPLY = tl.constexpr(_MULTIPLY.replace("TYPE", "bf16"))
_FP16_MULTIPLY = tl.constexpr(_MULTIPLY.replace("TYPE", "f16"))


@triton.jit
def code_numbers(words, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """Four pairs of 16-bit numbers, 128 (fp16: 16) + code, of the nibbles i and i + 4 of each word. The compiler does
    not find that and-or is one instruction."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _FP16_NUMBERS if HALF else _BF16_NUMBERS,
            "=&r,=&r,=&r,=&r,r",
            [words],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        if HALF:
            return (
                ((words << 6) & 0x03C003C0) | 0x4C004C00,
                ((words << 2) & 0x03C003C0) | 0x4C004C00,
                ((words >> 2) & 0x03C003C0) | 0x4C004C00,
                ((words >> 6) & 0x03C003C0) | 0x4C004C00,
            )
        else:
            return (
                (words & 0x000F000F) | 0x43004300,
                ((words >> 4) & 0x000F000F) | 0x43004300,
                ((words >> 8) & 0x000F000F) | 0x43004300,
                ((words >> 12) & 0x000F000F) | 0x43004300,
            )


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, c, HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """c + a b in each warp: 16 x 16 times 16 x 8, each operand spread over the threads 4 g + t as mma.m16n8k16 has it.
    a1 and a3 are of rows g + 8, a2, a3 and b1 of inner columns + 8, the others of rows g and columns 2 t, 2 t + 1; c
    has rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _FP16_MULTIPLY if HALF else _BF16_MULTIPLY,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = tl.join(tl.join(a0, a2), tl.join(a1, a3))
        b = tl.join(b0, b1)
        WARPS: tl.constexpr = a0.shape[0] // 32
        products = _products(low_half(a, HALF), low_half(b, HALF), WARPS) + _products(
            high_half(a, HALF), high_half(b, HALF), WARPS
        )
        total = tl.sum(tl.sum(products, axis=4), axis=3)  # by row g, column, half of the rows
        upper, lower = tl.split(tl.reshape(total, [WARPS * 32, 2, 2]))
        upper_even, upper_odd = tl.split(upper)
        lower_even, lower_odd = tl.split(lower)
        return c[0] + upper_even, c[1] + upper_odd, c[2] + lower_even, c[3] + lower_odd


@triton.jit
def _products(a, b, WARPS: tl.constexpr):
    """For the interpreter: a [32 threads 4 g + t, register, half of the rows] times b [32 threads, register]."""
    return tl.reshape(a, [WARPS, 8, 1, 4, 2, 2]) * tl.reshape(b, [WARPS, 1, 8, 4, 2, 1])


@triton.jit
def low_half(pairs, HALF: tl.constexpr):
    """Return the lower 16-bit number of each word as fp32."""
    if HALF:
        return half_to_float(pairs)
    else:
        return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pairs, HALF: tl.constexpr):
    """Return the upper 16-bit number of each word as fp32."""
    if HALF:
        return half_to_float(pairs >> 16)
    else:
        return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def half_to_float(bits):
    """Return the fp16 number in the lower 16 bits as fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_two(at, mask):
    """Two neighbours from each address. `mask` None: all are there."""
    neighbours = at[:, None] + tl.arange(0, 2)[None, :]
    if mask is None:
        two = tl.load(neighbours)
    else:
        two = tl.load(neighbours, mask=mask[:, None], other=0)
    return tl.split(two)


@triton.jit
def load_four(at, mask):
    """Load four neighbours from each address. `mask` None: all exist."""
    neighbours = at[:, None] + tl.arange(0, 4)[None, :]
    if mask is None:
        four = tl.load(neighbours, eviction_policy="evict_first")
    else:
        four = tl.load(neighbours, mask=mask[:, None], other=0, eviction_policy="evict_first")
    even, odd = tl.split(tl.reshape(four, [at.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def issue_loads(lane, HARDWARE: tl.constexpr):
    """What was to be loaded before is asked for before anything that follows: the compiler would rather load into the
    registers that multiplying sets free, and wait."""
    if HARDWARE:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [lane], tl.int32, is_pure=False, pack=1
        )
