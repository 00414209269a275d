"""One row times a quantized weight on Hopper, the weight streaming without a pause: x [1, K] @ weight [N, K]^T.

Decoding one sequence is bound by reading weights, so memory must never be idle. One program stays on each
multiprocessor and takes tiles of 16 or four weight rows, one after the other, through a ring in shared memory that
asynchronous copies keep full. The ring does not end where an input begins: it is filled before the program waits for
the kernel that writes x, while that one still computes. Two kernels have room on a multiprocessor at once, so the
weight of a product is on its way during the attention, or the product, before it.

With the ring full, time is arithmetic, so there is little of it. The tensor cores multiply 16 groups of codes by
eight columns of x. The order of the inner columns is free, so rows are read in 16-byte pieces as they lie, and the
groups may be of 16 rows or, with four ranges of x as columns, of four rows: what is read together then lies together.
FP8 codes become fp16 numbers by one instruction for a pair. Integer codes stay what they are: x becomes integers of
15 bits, by group, whose high and low bytes are two columns, so that a word of INT4 is two masks and a shift. The norm
before a product is taken on the way, its gain when x is put into shared memory, its factor at the end. Sums over the
warps are taken once, at the end, for all tiles.

A kernel of which two programs share a multiprocessor while another has none would take twice as long. Where programs
go is decided by the shared memory that they take: the sizes below leave one place for each.

Written in Gluon, Triton's lower level. Other cards, shapes and numbers of rows take w8.py and w4_small_m.py.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
import triton

from inferengine.kernels.cuda.gemm.gemv_hopper.kernel import E4M3, INT8, NIBBLES, Shape, stream_kernel
from inferengine.kernels.cuda.gemm.hopper import is_hopper, num_multiprocessors
from inferengine.kernels.cuda.gemm.w4_layout import NibbleWeight
from inferengine.kernels.cuda.gemm.w8 import ByteWeight
from inferengine.kernels.cuda.pdl import launch_options, supports_pdl

# Two of these kernels fit on a multiprocessor of 228 KiB, but never two programs of one that adds to a residual.
# Every second kernel of a decoder is such a one, and beside it there is room for one program of the next.
MOST_ADDING_BYTES, FEWEST_ADDING_BYTES, MOST_OTHER_BYTES = 116 << 10, 114 << 10, 110 << 10
FEWEST_STAGES, MOST_STAGES, MOST_SUMS = 4, 12, 128
# Warps, units of a warp in a stage, ranges: the first that fits is taken. INT4 lies together as it is stored.
WAYS = ((8, 2, 4), (8, 1, 4), (8, 2, 1), (8, 1, 1), (4, 2, 1), (4, 1, 1))


def stream_shape(
    x: torch.Tensor, weight: ByteWeight | NibbleWeight, *, gated: bool = False, adds: bool = False
) -> Shape | None:
    """Return how to multiply x [1, K] by the weight, adding to a residual or not; None where the kernel cannot."""
    if x.shape[0] != 1 or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    multiprocessors = num_multiprocessors(x.device)
    if isinstance(weight, NibbleWeight):
        if weight.parts != 1:
            return None
        return find_shape(NIBBLES, weight.rows, weight.columns, gated, adds, multiprocessors)
    if weight.block_rows:
        return None
    kind = INT8 if weight.codes.dtype == torch.int8 else E4M3
    return find_shape(kind, *weight.codes.shape, gated, adds, multiprocessors)


def stream_product(
    x: torch.Tensor,
    weight: Any,  # ByteWeight or NibbleWeight
    shape: Shape,
    *,
    bias: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """Multiply x [1, K] -> [1, N], or [1, N / 2] when gated by an activation of activation.py. `gain` [K]: x is
    RMS-normed first. `residual` [1, N]: added in place and returned."""
    out = x.new_empty(1, shape.width) if residual is None else residual
    nibbles = isinstance(weight, NibbleWeight)
    stream_kernel[(min(shape.tiles, num_multiprocessors(x.device)),)](
        x,
        x if gain is None else gain,
        weight.words if nibbles else weight.codes.view(torch.int32),
        weight.points if nibbles else weight.scales,
        weight.points if nibbles else weight.scales,
        x if bias is None else bias,
        out,
        eps,
        SHAPE=shape,
        NORM=gain is not None,
        ADD=residual is not None,
        BIAS=bias is not None,
        ACTIVATION=gated or 0,
        num_warps=shape.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@lru_cache(maxsize=1024)
def find_shape(kind: int, rows: int, columns: int, gated: bool, adds: bool, multiprocessors: int) -> Shape | None:
    """Return how to share out a weight [rows, columns]; None where nothing divides evenly or the ring is too short."""
    if rows % 32 or columns % 128:
        return None
    room = MOST_ADDING_BYTES if adds else MOST_OTHER_BYTES
    for num_warps, units, ranges in WAYS:
        if ranges > 1 and kind == NIBBLES:
            continue
        shape = Shape(kind, rows // 2 if gated else rows, columns, gated, num_warps, units, ranges, 0, 0)
        rounds = triton.cdiv(shape.tiles, multiprocessors)
        kept = max(2, min(MOST_SUMS // shape.half_rows, triton.next_power_of_2(rounds)))
        shape = dataclasses.replace(shape, kept_tiles=kept)
        stages = min(MOST_STAGES, (room - shape.fixed_bytes) // shape.stage_bytes)
        if stages < FEWEST_STAGES or columns % (shape.unit_columns * num_warps * units):
            continue
        used = shape.fixed_bytes + stages * shape.stage_bytes
        spare = triton.cdiv(FEWEST_ADDING_BYTES - used, 128 * num_warps) if adds else 0
        return dataclasses.replace(shape, stages=stages, spare=max(0, spare))
    return None
