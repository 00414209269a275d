"""The row of numbers of row_stream.py on its way to shared memory: scaled by group, cut up, and put in the order in
which threads multiply.

A group is of 64 columns, of 128 for INT4. A power of two brings its largest number below 2^9 (fp16, which then holds
every number of bf16 that counts beside it) or 2^14 (integers, cut into a high and a low byte: one part in 2^14 of the
largest number, where bf16 itself has one in 2^9).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inferengine.kernels.row_stream_shape import axis_layout

FLOAT_BITS = gl.constexpr(8)
WHOLE_BITS = gl.constexpr(13)


@gluon.jit
def columns_of_chunk(SHAPE: gl.constexpr):
    """The columns of a chunk of x, as its layout has them."""
    LAYOUT: gl.constexpr = SHAPE.x_layout
    COLUMNS: gl.constexpr = SHAPE.group_columns
    group = gl.arange(0, SHAPE.chunk // COLUMNS, axis_layout(0, LAYOUT))
    if SHAPE.nibbles:
        return (
            group[:, None, None, None, None] * COLUMNS
            + gl.arange(0, 4, axis_layout(1, LAYOUT))[None, :, None, None, None] * 32
            + gl.arange(0, 2, axis_layout(2, LAYOUT))[None, None, :, None, None] * 16
            + gl.arange(0, 4, axis_layout(3, LAYOUT))[None, None, None, :, None] * 4
            + gl.arange(0, 4, axis_layout(4, LAYOUT))[None, None, None, None, :]
        )
    else:
        return (
            group[:, None, None] * COLUMNS
            + gl.arange(0, COLUMNS // 8, axis_layout(1, LAYOUT))[None, :, None] * 8
            + gl.arange(0, 8, axis_layout(2, LAYOUT))[None, None, :]
        )


@gluon.jit
def load_chunks(at, column, SHAPE: gl.constexpr):
    """All chunks of a row: all are on their way before the first is needed."""
    CHUNKS: gl.constexpr = SHAPE.columns // SHAPE.chunk
    found = ()
    for chunk in gl.static_range(CHUNKS):
        found += (gl.load(at + chunk * SHAPE.chunk + column),)
    return found


@gluon.jit
def put_inputs(memory, x, gains, SHAPE: gl.constexpr, NORM: gl.constexpr):
    """Chunks of x, times those of the norm's gain, to shared memory: words, what a group's products are to be
    multiplied by, and for INT4 the sums of its integers. Gives the squares of x, to be added up."""
    words, scales, totals = memory
    CHUNKS: gl.constexpr = SHAPE.columns // SHAPE.chunk
    squares = gl.zeros_like(x[0].to(gl.float32))
    made = ()
    for chunk in gl.static_range(CHUNKS):
        number = x[chunk].to(gl.float32)
        if NORM:
            squares += number * number
            number = number * gains[chunk].to(gl.float32)
        if SHAPE.e4m3:
            made += (_as_floats(number, SHAPE),)
        elif SHAPE.int8:
            made += (_as_bytes(number, SHAPE),)
        else:
            made += (_as_nibble_bytes(number, SHAPE),)
    for chunk in gl.static_range(CHUNKS):
        words.index(chunk).store(made[chunk][0])
        scales.index(chunk).store(made[chunk][1])
        if SHAPE.nibbles:
            totals.index(chunk).store(made[chunk][2])
    return squares


@gluon.jit
def _as_floats(x, SHAPE: gl.constexpr):
    """Pairs of fp16 numbers."""
    up, down = _scales(gl.max(gl.max(gl.abs(x), axis=2), axis=1), FLOAT_BITS)
    bits = (x * up[:, None, None]).to(gl.float16).to(gl.int16, bitcast=True)
    low, high = gl.split(gl.reshape(bits, [SHAPE.chunk // 2, 2]))
    return (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16), down


@gluon.jit
def _as_bytes(x, SHAPE: gl.constexpr):
    """Of a group four threads' high bytes, then their low ones, four neighbours to a word."""
    up, down = _scales(gl.max(gl.max(gl.abs(x), axis=2), axis=1), WHOLE_BITS)
    whole = _whole(x * up[:, None, None])
    low = _low_byte(whole)
    pieces = gl.reshape(gl.join((whole - low) >> 8, low), [SHAPE.chunk // 64, 4, 4, 4, 2])
    pieces = gl.permute(pieces, [0, 4, 1, 2, 3])  # group, piece, thread, word, byte
    return _pack_bytes(gl.reshape(pieces, [SHAPE.chunk // 2, 4])), down


@gluon.jit
def _as_nibble_bytes(x, SHAPE: gl.constexpr):
    """Likewise, in the order of quantized_int4.py: the words that meet the even and the odd nibbles of a word."""
    up, down = _scales(gl.max(gl.max(gl.max(gl.max(gl.abs(x), axis=4), axis=3), axis=2), axis=1), WHOLE_BITS)
    whole = _whole(x * up[:, None, None, None, None])
    total = gl.sum(gl.sum(gl.sum(gl.sum(whole, axis=4), axis=3), axis=2), axis=1)
    low = _low_byte(whole)
    pieces = gl.reshape(gl.join((whole - low) >> 8, low), [SHAPE.chunk // 128, 4, 2, 4, 2, 2, 2])
    pieces = gl.permute(pieces, [0, 6, 3, 1, 4, 5, 2])  # group, piece, thread, step, even or odd, neighbour, half
    return _pack_bytes(gl.reshape(pieces, [SHAPE.chunk // 2, 4])), down, total.to(gl.float32)


@gluon.jit
def _scales(peak, BITS: gl.constexpr):
    """Powers of two that bring numbers up to `peak` below 2^(BITS + 1), and back."""
    exponent = gl.maximum((peak.to(gl.int32, bitcast=True) >> 23) - BITS, 27)
    up = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return up, (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _whole(x):
    """The nearest integer of a magnitude below 2^22: the low bits of its sum with 1.5 * 2^23."""
    return (x + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000


@gluon.jit
def _low_byte(whole):
    return ((whole + 128) & 255) - 128


@gluon.jit
def _pack_bytes(codes):
    """[N, 4] -> [N] words."""
    even, odd = gl.split(gl.reshape(codes, [codes.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (first & 255) | ((second & 255) << 8) | ((third & 255) << 16) | (fourth << 24)
