"""Gated activations of experts on float32 tiles, and the scales and zero points of their 4-bit codes."""

from __future__ import annotations

import triton
import triton.language as tl

from inferengine.kernels.cuda.activation import GELU_TANH, SILU, gate
from inferengine.kernels.cuda.codes import nibble_numbers

SWIGLU_CLAMPED = 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH, "swiglu_clamped": SWIGLU_CLAMPED}


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
def scale_of(exponents, HARDWARE: tl.constexpr):
    """The scales that e8m0 exponents stand for, of numbers as layout.mx_quarters gives them. HARDWARE: at most 2."""
    if HARDWARE:
        return ((exponents + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # the smallest is float32's own subnormal
        return tl.where(exponents > 0, exponents << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def from_zero(words, points, PLACE: tl.constexpr, HARDWARE: tl.constexpr):
    """The code at a place (0 to 3) of words of four 4-bit codes, less the code of zero, which the lowest 4 bits of a
    row's `points` hold: whole numbers. HARDWARE: as bfloat16, whose 0x4300 is 128, else as float32."""
    if HARDWARE:
        codes = nibble_numbers(words, PLACE, False)
        return codes - ((points & 15) + 128).to(tl.float32).to(tl.bfloat16)[:, None]
    else:
        codes = (words.to(tl.int32) >> (4 * PLACE)) & 15
        return (codes - (points & 15)[:, None]).to(tl.float32)
