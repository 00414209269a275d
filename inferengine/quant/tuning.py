"""Launch parameters of the quantized products by shape, found on an H200 with benchmarks/quantized.py.

Plain functions of the shape. A shape that was not measured takes its class's values: that may be slow, never wrong.
`rows` None: parameters that must not depend on the number of rows (deterministic mode).
"""

from __future__ import annotations

from inferengine.kernels.quantized import BlockTuning, VectorTuning

MOST_TILE_ROWS = 64
TARGET_PROGRAMS = 264  # two programs on each of 132 multiprocessors


def byte_vector(width: int, columns: int, gated: bool, *, blocks: bool) -> VectorTuning:
    """One row, 8-bit codes [width, columns]."""
    if columns <= 1024:
        return VectorTuning(8, 1024, 4)
    return VectorTuning(4, 2048, 4)


def nibble_vector(width: int, columns: int, gated: bool) -> VectorTuning:
    """One row, 4-bit codes; block_k counts words of eight."""
    if columns <= 2048:
        return VectorTuning(8, 256, 4)
    return VectorTuning(4, 512, 4)


def byte_tile(rows: int | None, width: int, columns: int, item_bytes: int) -> BlockTuning:
    """A few rows, 8-bit codes."""
    return _tile(rows, width, columns, item_bytes, 128)


def nibble_tile(rows: int | None, width: int, columns: int, item_bytes: int) -> BlockTuning:
    """A few rows, 4-bit codes; block_k counts words of eight."""
    tuned = _tile(rows, width, columns, item_bytes, 64)
    return tuned._replace(num_stages=min(3, tuned.num_stages))


def _tile(rows: int | None, width: int, columns: int, item_bytes: int, block_k: int) -> BlockTuning:
    if rows is None:
        return BlockTuning(64, 64, block_k, 1, 4, 2 if item_bytes > 2 else 3)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    chunks = 1
    while chunks < 8 and width // 64 * chunks < TARGET_PROGRAMS and columns // (chunks * 2) >= 512:
        chunks *= 2
    return BlockTuning(block_m, 64, block_k, chunks, 4, 2 if item_bytes > 2 else 4)
