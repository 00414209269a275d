"""Conversion of codes of 4 and 8 bits to 16-bit numbers, two at a time, by instructions no compiler finds.

HARDWARE: the instructions themselves; else the same numbers in Triton, for the interpreter and other number formats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferengine.kernels.cuda.mma import high_half, low_half

# Four e4m3 codes: the sign goes to the highest bit of bfloat16, the other bits to where it has the lowest bits of its
# exponent and the highest of its fraction. The number is then too small by 2^120, subnormal codes included.
_WIDEN = tl.constexpr("""{
.reg .b32 a, b, c, big, minus_zero;
mov.b32 big, 0x7B807B80;
mov.b32 minus_zero, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
and.b32 c, c, 0x07F007F0;
lop3.b32 c, a, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $0, c, big, minus_zero;
shr.u32 c, b, 4;
and.b32 c, c, 0x07F007F0;
lop3.b32 c, b, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $1, c, big, minus_zero;
}""")
# Four int8 codes. The lower seven bits become 128 + those bits, from which 128 or, where the eighth is set, 256 is
# subtracted.
_INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 a, b, c, one;
mov.b32 one, 0x3F803F80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, c;
lop3.b32 c, b, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, b, one, c;
}""")
# The nibble at each place of two half words, as 128 + code or, in fp16, 1024 + code.
_NIBBLE = "{{.reg .b32 a; shr.u32 a, $1, {}; lop3.b32 $0, a, 0x000F000F, {}, 0xEA;}}"
_NIBBLE_TO_BF16 = tl.constexpr(tuple(_NIBBLE.format(4 * place, "0x43004300") for place in range(4)))
_NIBBLE_TO_FP16 = tl.constexpr(tuple(_NIBBLE.format(4 * place, "0x64006400") for place in range(4)))


@triton.jit
def widened(codes, HARDWARE: tl.constexpr):
    """e4m3 codes as bfloat16 by instructions for two at a time (HARDWARE), else as float32. NaN is none."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _WIDEN, "=r,=r,r", [codes.to(tl.uint8, bitcast=True)], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return codes.to(tl.float32)


@triton.jit
def byte_numbers(codes, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of 8 bits, int8 or e4m3, as numbers of `dtype`."""
    if HARDWARE and dtype == tl.bfloat16 and codes.dtype == tl.int8:
        return tl.inline_asm_elementwise(_INT8_TO_BF16, "=&r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        return codes.to(dtype)


@triton.jit
def nibble_numbers(words, PLACE: tl.constexpr, HALF: tl.constexpr):
    """The nibble at a place (0 to 3) of int16 words, as bf16 128 + code, with HALF as fp16 1024 + code. On the hardware
    only."""
    if HALF:
        return tl.inline_asm_elementwise(_NIBBLE_TO_FP16[PLACE], "=r,r", [words], tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_NIBBLE_TO_BF16[PLACE], "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def join_halves(low, high):
    """Pairs of bf16 of float32 numbers that bf16 represents."""
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def less_pairs(pairs, zeros, HARDWARE: tl.constexpr):
    """Subtract pairs of whole bf16 numbers, exactly."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2;}",
            "=r,r,r",
            [pairs, zeros ^ -2147450880],  # the signs of both
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = low_half(pairs, False) - low_half(zeros, False)
        return join_halves(low, high_half(pairs, False) - high_half(zeros, False))
