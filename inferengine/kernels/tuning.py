"""Launch parameters by shape, found once on an H200 with benchmarks/kernels.py. Nothing is tuned at start-up.

Every table is a plain function of the shape, so that the same launch is taken every time. A launch that is not listed
falls to the nearest class; wrong speed is possible there, wrong results are not.
"""

from __future__ import annotations

from typing import NamedTuple

TARGET_PROGRAMS = 264  # two programs on each of 132 multiprocessors


class DecodeTuning(NamedTuple):
    """Decode attention: tokens per tile, programs per (row, KV head)."""

    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int


def decode_tuning(num_rows: int, num_kv_heads: int, head_dim: int) -> DecodeTuning:
    splits = 1
    while splits < 32 and num_rows * num_kv_heads * splits < TARGET_PROGRAMS:
        splits *= 2
    if head_dim > 128:
        return DecodeTuning(32, splits, 4, 2)
    return DecodeTuning(64, splits, 4, 3)


class GemvTuning(NamedTuple):
    """One row times a weight: weight rows and columns per tile, columns of each row fetched into L2 ahead of time."""

    block_n: int
    block_k: int
    num_warps: int
    prefetch: int


class TileTuning(NamedTuple):
    """Few rows times a weight on the tensor cores. `chunks`: parts of the inner dimension that are summed apart."""

    block_m: int
    block_n: int
    block_k: int
    chunks: int
    num_warps: int
    num_stages: int
    prefetch: int


class PrefillTuning(NamedTuple):
    """Prefill attention: rows (tokens x heads of a group) and keys per tile, by the tensor memory accelerator where the
    cache's blocks allow it."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    tma: bool = False


def prefill_tuning(head_dim: int, max_count: int, group: int, block_size: int) -> PrefillTuning:
    if head_dim > 128:
        return PrefillTuning(64, 32, 4, 2)
    return PrefillTuning(64, 64, 4, 2 if block_size >= 64 else 3, tma=block_size >= 64)


def linear_tuning(rows: int, width: int, columns: int, gated: bool) -> GemvTuning | TileTuning | None:
    """How to multiply `rows` rows by a weight [width, columns]; None: cuBLAS is faster. Measured with bf16."""
    if rows == 1:
        return _gemv_tuning(width, columns)
    return None


def _gemv_tuning(width: int, columns: int) -> GemvTuning:
    if columns >= 8192:
        return GemvTuning(4, 2048, 8, 0)
    if columns >= 3072:
        return GemvTuning(4, 2048, 8, 0) if width <= 4096 else GemvTuning(2, 1024, 4, 0)
    return GemvTuning(4, 1024, 4, 0)


def deterministic_tuning(rows: int, width: int, columns: int, gated: bool) -> TileTuning:
    """The order in which a row's products are summed depends on block_k and chunks: those by the weight's shape only."""
    chunks = 1
    while not gated and chunks < 4 and width // 64 * chunks < TARGET_PROGRAMS and columns // (chunks * 2) >= 512:
        chunks *= 2
    if rows <= 64:
        return TileTuning(16 if rows <= 16 else 64, 64, 64, chunks, 4, 4, 0)
    return TileTuning(128, 64 if gated else 128, 64, chunks, 8, 3, 0)
