"""Launch parameters by shape, found once on an H200 with benchmarks/kernels.py. Nothing is tuned at start-up.

Every table is a plain function of the shape, so that the same launch is taken every time. A launch that is not listed
falls to the nearest class; wrong speed is possible there, wrong results are not.
"""

from __future__ import annotations

from typing import NamedTuple


class DecodeTuning(NamedTuple):
    """Decode attention: tokens per tile, most programs per (row, KV head), of which one more takes part for each
    `min_tiles` of the context."""

    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1


def decode_tuning(num_rows: int, num_kv_heads: int, head_dim: int) -> DecodeTuning:
    """Few rows are split to fill the device, in programs that hold one tile and are light enough to start beside the
    product before them; many rows are split where the context is long (`min_tiles`). Found over equal and unequal
    contexts: one long row among short ones must not be what the rest waits for."""
    programs = num_rows * num_kv_heads
    if head_dim > 128:
        return DecodeTuning(32, 8, 4, 2) if programs <= 64 else DecodeTuning(32, 2, 4, 2, 16)
    if programs <= 16:
        return DecodeTuning(64, 32 if programs <= 8 else 16, 4, 1)
    if programs <= 64:
        return DecodeTuning(64, 8, 4, 2)
    if programs <= 128:
        return DecodeTuning(64, 8, 4, 2, 2)
    if programs <= 264:
        return DecodeTuning(64, 8, 2, 2, 8)
    if programs <= 528:
        return DecodeTuning(64, 8, 2, 2, 16)
    return DecodeTuning(64, 8 if programs <= 1056 else 4 if programs <= 1408 else 2, 4, 2, 16)


class GemvTuning(NamedTuple):
    """One row times a weight: weight rows and columns per tile, columns of each row fetched into L2 ahead of time."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int


class TileTuning(NamedTuple):
    """Few rows times a weight on the tensor cores. `chunks`: parts of the inner dimension that are summed apart;
    `preload`: the weight's first tile is read before the input is there, which pays when there are few tiles."""

    block_m: int
    block_n: int
    block_k: int
    chunks: int
    num_warps: int
    num_stages: int
    prefetch: int
    preload: bool = False


class WideTuning(NamedTuple):
    """Some hundred rows times a weight: tiles of rows, of outputs (twice as many weight rows when gated) and of the
    inner dimension, which `splits` programs share. `weight_left`: the weight is the tensor cores' left operand."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    weight_left: bool = False


class PrefillTuning(NamedTuple):
    """Prefill attention: rows (tokens x heads of a group) and keys per tile, by the tensor memory accelerator where the
    cache's blocks allow it."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    tma: bool = False


def prefill_tuning(head_dim: int, block_size: int) -> PrefillTuning:
    if head_dim > 128:
        return PrefillTuning(64, 32, 4, 2)
    if block_size >= 64:
        return PrefillTuning(64, 64, 4, 2, tma=True)
    if block_size == 32:
        return PrefillTuning(64, 32, 4, 4, tma=True)
    return PrefillTuning(64, 64, 4, 2)


def wide_tuning(rows: int, width: int, columns: int, gated: bool) -> WideTuning | None:
    """How to multiply with tiles by the tensor memory accelerator; None: another kernel is faster. `width` counts the
    weight's rows. Deep pipelines on one tile a multiprocessor win, and sums that need no second program."""
    if not 16 < rows <= 128 or width * columns < 12 << 20 or columns % 128:
        return None
    if rows > 64:
        return WideTuning(128, 128, 64, 1, 8, 4, True) if gated else None
    if rows > 32:
        if gated:
            return WideTuning(64, 64, 64, 1, 4, 4)
        if width > 16384:
            return WideTuning(64, 128, 64, 1, 8, 4, True)
        return WideTuning(64, 64, 64, 1, 4, 8) if width > 4096 else None
    if gated:
        return WideTuning(32, 64, 128, 1, 4, 2, True)
    splits = max(1, min(4, round(132 * 64 / width)))
    return WideTuning(32, 64, 128, splits, 4, 5, True) if width <= 16384 else None


def parts_tuning(rows: int, width: int, columns: int) -> WideTuning | None:
    """How to multiply when the norm that follows adds the parts up; None: it does not pay."""
    if not 16 < rows <= 128 or width > 8192 or width * columns < 12 << 20 or columns % 256:
        return None
    splits = max(2, min(4, round(132 * 64 / width)))
    if rows <= 32:
        return WideTuning(32, 64, 128, splits, 4, 5, True)
    return WideTuning(64 if rows <= 64 else 128, 64, 64, splits, 4, 8)


def linear_tuning(rows: int, width: int, columns: int, gated: bool) -> GemvTuning | TileTuning | None:
    """How to multiply `rows` rows by a weight [width, columns]; None: cuBLAS is faster. Measured with bf16."""
    if rows == 1:
        return _gemv_tuning(width, columns, gated)
    if rows > 64 or width % 64 or columns % 128:
        return None
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if width * columns < 12 << 20:
        return _small_tile_tuning(block_m, width, columns, gated)
    if block_m == 64 and not gated and width > 4096:
        return None
    if gated or width > 16384:
        return TileTuning(block_m, 64, 128, 1, 4, 4, 0)
    if block_m == 64:
        return TileTuning(block_m, 64, 128, 2, 4, 4, 0)
    if width > 4096:
        return TileTuning(block_m, 64, 64, 4, 4, 6, 0)
    return TileTuning(block_m, 64, 128, 4, 4, 4, 0)


def _gemv_tuning(width: int, columns: int, gated: bool) -> GemvTuning:
    if columns >= 3584:
        wide = width <= 4096 or columns >= 8192
        return GemvTuning(4, 2048, 8, 0) if wide else GemvTuning(2, 1024, 4, 0)
    if gated:
        return GemvTuning(4, 512, 2, 0)
    if columns > 2560:
        return GemvTuning(8, 1024, 4, 1024)
    if columns > 1536:
        return GemvTuning(4, 1024, 4, 1024)
    return GemvTuning(8, 1024, 4, 0) if width <= 16384 else GemvTuning(4, 1024, 4, 0)


def _small_tile_tuning(block_m: int, width: int, columns: int, gated: bool) -> TileTuning | None:
    """Weights that are read in a few microseconds: one tile each program, on its way before the input is there."""
    if block_m == 64:
        return None
    if gated:
        return TileTuning(block_m, 16, 1024 if columns <= 1024 else 512, 1, 4, 1, 0, True)
    return TileTuning(block_m, 16, 1024, max(1, -(-columns // 1024)), 4, 1, 0, True)


def deterministic_tuning(rows: int, width: int, columns: int, gated: bool) -> TileTuning:
    """A row's products are summed in steps of block_k, in chunks that the weight's shape decides: the same whatever the
    other blocks are, and whether one program sums the chunks or several."""
    chunks = 2 if not gated and columns >= 2048 and width <= 8192 else 1
    if rows <= 64:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return TileTuning(block_m, 64, 64, chunks, 4, 5 if gated else 6, 0)
    few_tiles = -(-rows // 128) * -(-width // 128) < 2 * 132
    return TileTuning(128, 64 if gated or few_tiles else 128, 64, chunks, 8, 4, 0)
