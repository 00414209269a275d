"""Gated activations of experts on float32 tiles, and conversion of MXFP4, INT4 and FP8 codes to numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import GELU_TANH, SILU, gate

SWIGLU_CLAMPED = 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "swiglu_clamped": SWIGLU_CLAMPED}

# Two words of four codes each, one in each half of a register. A code's sign goes to the highest bit of its half, its
# other three bits to where bfloat16 has the lowest bits of its exponent and the highest of its fraction. The number is
# then too small by 2^126, subnormal codes included: the scales make up for it.
_UNPACK = tl.constexpr("""{
.reg .b32 a, s;
shl.b32 a, $4, 6;
shl.b32 s, $4, 12;
and.b32 a, a, 0x01C001C0;
lop3.b32 $0, s, 0x80008000, a, 0xEA;
shl.b32 a, $4, 2;
shl.b32 s, $4, 8;
and.b32 a, a, 0x01C001C0;
lop3.b32 $1, s, 0x80008000, a, 0xEA;
shr.u32 a, $4, 2;
shl.b32 s, $4, 4;
and.b32 a, a, 0x01C001C0;
lop3.b32 $2, s, 0x80008000, a, 0xEA;
shr.u32 a, $4, 6;
and.b32 a, a, 0x01C001C0;
lop3.b32 $3, $4, 0x80008000, a, 0xEA;
}""")
# Four e4m3 codes, in the same way: four bits of exponent and three of fraction, too small by 2^120.
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


@triton.jit
def gated(left, right, ACTIVATION: tl.constexpr, alpha, limit):
    """Activation of the gate times up."""
    if ACTIVATION == 2:
        left = tl.minimum(left, limit)
        right = tl.minimum(tl.maximum(right, -limit), limit)
        return left / (1.0 + tl.exp(-alpha * left)) * (right + 1.0)
    else:
        return gate(left, ACTIVATION) * right


@triton.jit
def unpacked(words, HARDWARE: tl.constexpr):
    """Words of four e2m1 codes as four tensors of numbers, the lowest codes first. HARDWARE: as bfloat16 times 2^-126,
    by instructions for two at a time; else as float32."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _UNPACK,
            "=&r,=&r,=&r,=&r,r",
            [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32) & 0xFFFF
        return _number(wide & 15), _number((wide >> 4) & 15), _number((wide >> 8) & 15), _number(wide >> 12)


@triton.jit
def _number(code):
    magnitude = code & 7
    exponent = magnitude >> 1
    normal = ((exponent + 126) << 23) | ((magnitude & 1) << 22)  # 2^(exponent - 1) * (1 + half)
    value = tl.where(exponent > 0, normal.to(tl.float32, bitcast=True), magnitude.to(tl.float32) * 0.5)
    return tl.where(code > 7, -value, value)


@triton.jit
def scale_of(exponents, HARDWARE: tl.constexpr):
    """The scales that e8m0 exponents stand for, of numbers as `unpacked` gives them. HARDWARE: at most 2."""
    if HARDWARE:
        return ((exponents + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # the smallest is float32's own subnormal
        return tl.where(exponents > 0, exponents << 23, 0x00400000).to(tl.float32, bitcast=True)


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
def from_zero(words, points, PLACE: tl.constexpr, HARDWARE: tl.constexpr):
    """The code at a place (0 to 3) of words of four 4-bit codes, less the code of zero, which the lowest 4 bits of a
    row's `points` hold: whole numbers. HARDWARE: as bfloat16, whose 0x4300 is 128, else as float32."""
    if HARDWARE:
        codes = (((words >> (4 * PLACE)) & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
        return codes - ((points & 15) + 128).to(tl.float32).to(tl.bfloat16)[:, None]
    else:
        codes = (words.to(tl.int32) >> (4 * PLACE)) & 15
        return (codes - (points & 15)[:, None]).to(tl.float32)
