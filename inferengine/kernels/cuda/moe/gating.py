"""The gated activations of experts, on float32 tiles, and codes of MXFP4 and FP8 as numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import GELU_TANH, SILU, gate

SWIGLU_CLAMPED = 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "swiglu_clamped": SWIGLU_CLAMPED}

# Four bytes of two codes each. A byte in the upper half of 16 bits has the sign of its upper code in place; the other
# three bits belong where bfloat16 has the lowest bits of its exponent and the highest of its fraction. The number is
# then too small by 2^126, subnormal codes included.
_UNPACK = tl.constexpr("""{
.reg .b32 a, b, c, big, minus_zero;
mov.b32 big, 0x7E807E80;
mov.b32 minus_zero, 0x80008000;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shr.u32 c, a, 6;
and.b32 c, c, 0x01C001C0;
lop3.b32 c, a, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $2, c, big, minus_zero;
shr.u32 c, b, 6;
and.b32 c, c, 0x01C001C0;
lop3.b32 c, b, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $3, c, big, minus_zero;
shr.u32 c, a, 2;
and.b32 c, c, 0x01C001C0;
shl.b32 a, a, 4;
lop3.b32 c, a, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $0, c, big, minus_zero;
shr.u32 c, b, 2;
and.b32 c, c, 0x01C001C0;
shl.b32 b, b, 4;
lop3.b32 c, b, 0x80008000, c, 0xEA;
fma.rn.bf16x2 $1, c, big, minus_zero;
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
def unpacked(codes, HARDWARE: tl.constexpr):
    """Bytes of two e2m1 codes as numbers of the lower and of the upper ones. HARDWARE: as bfloat16, by instructions for
    two at a time; else as float32."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int32)
        return _number(wide & 15), _number(wide >> 4)


@triton.jit
def _number(code):
    magnitude = code & 7
    exponent = magnitude >> 1
    normal = ((exponent + 126) << 23) | ((magnitude & 1) << 22)  # 2^(exponent - 1) * (1 + half)
    value = tl.where(exponent > 0, normal.to(tl.float32, bitcast=True), magnitude.to(tl.float32) * 0.5)
    return tl.where(code > 7, -value, value)


@triton.jit
def power_of_two(exponents):
    """e8m0 scales as float32; the smallest, 2^-127, as float32's own subnormal."""
    wide = exponents.to(tl.int32)
    return tl.where(wide > 0, wide << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def widened(codes, HARDWARE: tl.constexpr):
    """e4m3 codes as bfloat16 by instructions for two at a time (HARDWARE), else as float32. NaN is none."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _WIDEN, "=r,=r,r", [codes.to(tl.uint8, bitcast=True)], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return codes.to(tl.float32)
