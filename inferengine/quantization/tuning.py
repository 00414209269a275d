"""Launch parameters of the quantized products by shape: measured on an H200 with the 8B's shapes, among candidates
chosen by counting the instructions of each as compiled for Hopper; benchmarks/quantized.py times them one by one.

Plain functions of the shape. A shape that was not looked at takes its class's values: that may be slow, never wrong.
`rows` None: parameters that must not depend on the number of rows (deterministic mode).
"""

from __future__ import annotations

import torch

from inferengine.kernels.cuda.gemm.w4_small_m import FragmentTuning
from inferengine.kernels.cuda.gemm.w4_tiles import NibbleTuning
from inferengine.kernels.cuda.gemm.w8 import BlockTuning, VectorTuning
from inferengine.kernels.cuda.gemm.w8a8_stream_hopper import StreamTuning

MOST_TILE_ROWS = 256  # beyond, the weight is made into numbers for each product
MOST_NIBBLE_ROWS = 128  # likewise, of 4-bit weights
MOST_FRAGMENT_ROWS = 96  # of those that the tiles cannot take
MOST_EXACT_ROWS = {torch.float8_e4m3fn: 1, torch.int8: 64}  # beyond, inputs are rounded where the scheme says so
TARGET_PROGRAMS = 264  # two programs on each of 132 multiprocessors


def byte_vector(width: int, columns: int, gated: bool, *, blocks: bool) -> VectorTuning:
    """One row, 8-bit codes [width, columns]. Eight columns for each thread, all warps side by side."""
    if columns < 1024:
        return VectorTuning(8, 512, 2)
    if gated:
        return VectorTuning(2, 512, 2)
    return VectorTuning(8, 512, 2) if width > columns else VectorTuning(8, 1024, 4)


def fragments(rows: int | None, width: int, columns: int, gated: bool) -> FragmentTuning:
    """4-bit codes straight from registers."""
    if rows is None:
        return FragmentTuning(1, 4, 2)
    if rows > 16:
        return FragmentTuning(2, 4, 1, 2 if width > columns else 4)
    if rows > 8:
        if width > 16384:
            return FragmentTuning(2, 4, 1, 2)
        return FragmentTuning(1, 4, 2, 2) if width > columns else FragmentTuning(1, 8, 1, 2)
    if rows > 1:
        return FragmentTuning(2, 4, 2) if width > 16384 else FragmentTuning(1, 8, 4)
    if gated:
        return FragmentTuning(2, 2, 1)
    return FragmentTuning(1, 4, 4) if width > columns else FragmentTuning(1, 8, 2)


def nibble_tile(rows: int, width: int, columns: int) -> NibbleTuning | None:
    """4-bit codes, up to MOST_NIBBLE_ROWS rows. None: straight from registers is faster."""
    if rows <= 16:
        return None
    block_m = 32 if rows <= 32 else 64 if rows <= 64 else 128
    if width > 16384 and block_m == 64:
        return NibbleTuning(block_m, 128, 1, 8, 3)
    if width > 16384:
        return NibbleTuning(block_m, 64, 2 if block_m == 32 else 1, 4, 3)
    if block_m == 128 and width > columns:
        return NibbleTuning(block_m, 64, 1, 4, 4)
    return NibbleTuning(block_m, 64, 8 if block_m == 32 and columns > 8192 else 4, 4, 3)


def byte_tile(rows: int | None, width: int, columns: int, item_bytes: int) -> BlockTuning:
    """A few rows, 8-bit codes."""
    return _tile(rows, width, columns, item_bytes, 128)


def code_tile(rows: int, width: int, columns: int) -> BlockTuning | None:
    """A few rows of FP8 codes times FP8 codes. None where torch's scaled matmul is faster."""
    if rows > 64:
        narrow = rows <= 128 and width <= 6144
        return BlockTuning(64, 64, 256 if width <= 4096 else 128, 1, 4, 4) if narrow else None
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if width > 16384:
        return BlockTuning(block_m, 64, 128, 1, 4, 3 if block_m == 16 else 5)
    chunks = 4 if block_m < 64 else 2 if columns > 8192 else 1
    return BlockTuning(block_m, 64, 256, chunks, 4, 4)


def stream(rows: int, width: int, columns: int) -> StreamTuning | None:
    """2 to 128 rows of FP8 codes, streamed. None: other kernels are faster. What is left of shared memory is where the
    next product's ring begins to fill."""
    block_m = _stream_rows(rows, width, columns)
    if block_m is None or width <= 4096:
        return None
    return StreamTuning(block_m, 64, 256, 1, 4, 7 if block_m < 32 else 5 if block_m == 32 else 4)


def stream_parts(rows: int, width: int, columns: int) -> StreamTuning | None:
    """Likewise, where the norm that follows adds the parts up."""
    block_m = _stream_rows(rows, width, columns)
    if block_m is None or block_m > 64 or width > 8192:
        return None
    stages = 5 if block_m < 32 else 4 if block_m == 32 else 3
    return StreamTuning(block_m, 64, 256, 4 if columns > 8192 else 2, 4, stages)


def stream_gated(rows: int, width: int, columns: int) -> StreamTuning | None:
    """Likewise, of a gated product, `width` counting gate and up. With 128 of each in a tile it hands on codes, from
    which few rows gain."""
    block_m = _stream_rows(rows, width, columns)
    if block_m is None or width <= 16384:
        return None
    if block_m == 8:
        return StreamTuning(block_m, 128, 256, 1, 8, 3)
    if block_m == 16:
        return StreamTuning(block_m, 128, 128, 1, 4, 5)
    if block_m == 64:
        return StreamTuning(block_m, 64, 256, 1, 4, 2)
    return StreamTuning(block_m, 64, 128, 1, 4, 5 if block_m == 32 else 3)


def _stream_rows(rows: int, width: int, columns: int) -> int | None:
    """Rows of a tile; None where nothing was measured."""
    if not 2 <= rows <= 128 or width * columns < 12 << 20:
        return None
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


def _tile(rows: int | None, width: int, columns: int, item_bytes: int, block_k: int) -> BlockTuning:
    if rows is None:
        return BlockTuning(64, 64, block_k, 1, 4, 2 if item_bytes > 2 else 3)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    chunks = 1
    while chunks < 8 and width // 64 * chunks < TARGET_PROGRAMS and columns // (chunks * 2) >= 512:
        chunks *= 2
    return BlockTuning(block_m, 64, block_k, chunks, 4, 2 if item_bytes > 2 else 4)
