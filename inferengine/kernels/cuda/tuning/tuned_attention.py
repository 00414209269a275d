"""Which configurations of decode attention are tried for a model's heads, at which numbers of rows and contexts.

A case is the mean length of the rows' contexts. Contexts that the cache of the card cannot hold are left out, and so
are those far beyond a window. Several rows have different lengths, from a quarter to seven quarters of the mean: a
configuration must not let the other rows wait for a long one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from inferengine.kernels.cuda.attention.decode import MAX_SPLITS, fitting_splits
from inferengine.kernels.cuda.dispatch import AttentionKey, DecodeConfig, decode_rule
from inferengine.kernels.cuda.split_k import NUM_FLOATS
from inferengine.kernels.cuda.tuning.limits import SHARED_BYTES
from inferengine.kernels.cuda.tuning.measured_table import ROWS

CONTEXTS = (1024, 4096, 256, 16384, 65536)  # most important first
STAGES = ((64,), (1, 16), (256, 8), (32, 128))  # small: some 12 kernels a number of rows are compiled at once
OTHERS = (4, 2, 24, 96, 48, 192, 512, 384, 320, 448)
LEAST_TOKENS, MOST_TOKENS = 16, 128  # of a tile
MOST_WARPS = 8
MOST_STAGES = 4
MOST_TILES = 64  # of a context for each program that takes part
SPREAD = 0.75  # of the mean context: how much shorter or longer rows are


class TunedAttention(NamedTuple):
    """The decode attention of a model's layers with equal heads and windows. `uses`: how many layers; `last_row`: the
    most rows of a step; `longest`: the most tokens of a row; `room`: the most tokens of all rows."""

    key: AttentionKey
    uses: int
    last_row: int
    longest: int
    room: int

    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of rows at which variations are tried."""
        return tuple(tuple(rows for rows in stage if self._reaches(rows)) for stage in STAGES)

    def others(self) -> tuple[int, ...]:
        """Return the other numbers of rows that are measured."""
        return tuple(rows for rows in OTHERS if self._reaches(rows))

    def cases(self, rows: int) -> tuple[str, ...]:
        """Return the mean contexts."""
        fitting = [each for each in CONTEXTS if each <= self.longest and each * rows <= self.room]
        if self.key.window:  # one context beyond the window stands for all
            beyond = [each for each in fitting if each >= self.key.window]
            fitting = [each for each in fitting if each <= min(beyond, default=each)]
        return tuple(str(each) for each in fitting or (min(CONTEXTS[2], self.longest),))

    def rule(self, rows: int) -> DecodeConfig:
        """Return the choice without a measurement."""
        return decode_rule(rows, self.key.num_kv_heads, self.key.head_dim)

    def variations(self, rows: int, choice: DecodeConfig) -> Iterator[DecodeConfig]:
        """Return the configurations that differ in one number and that the kernel takes."""
        changed: tuple[dict[str, Any], ...] = (
            *({"block_tokens": each} for each in (choice.block_tokens * 2, choice.block_tokens // 2)),
            *({"num_splits": self._splits(rows, each)} for each in _around(choice.num_splits, MAX_SPLITS)),
            {"num_splits": self._splits(rows, min(4 * choice.num_splits, MAX_SPLITS))},
            *({"num_warps": each} for each in _around(choice.num_warps, MOST_WARPS)),
            *({"num_stages": choice.num_stages + step} for step in (1, -1)),
            *({"min_tiles": each} for each in _around(choice.min_tiles, MOST_TILES, 4) if choice.num_splits > 1),
            {"fused": not choice.fused},
        )
        found = dict.fromkeys(choice._replace(**fields) for fields in changed)
        yield from (each for each in found if each != choice and self._takes(each))

    def read_bytes(self, rows: int, context: int) -> int:
        """Return the bytes of keys and values that one layer reads."""
        tokens = rows * min(context, self.key.window or context)
        return tokens * 2 * self.key.num_kv_heads * self.key.head_dim * self.key.cache_bits // 8

    def _reaches(self, rows: int) -> bool:
        """Whether steps have so many rows, or fewer for which the measurement stands."""
        return max((each for each in ROWS if each < rows), default=0) < self.last_row

    def _splits(self, rows: int, wanted: int) -> int:
        """As many splits as wanted, or as the scratch memory has room for."""
        return fitting_splits(wanted, rows * self.key.num_heads * (self.key.head_dim + 1), NUM_FLOATS)

    def _takes(self, config: DecodeConfig) -> bool:
        key, tokens = self.key, config.block_tokens
        tile_bytes = 2 * tokens * key.head_dim * key.cache_bits // 8
        return (
            LEAST_TOKENS <= tokens <= MOST_TOKENS
            and (key.block_size % tokens == 0 or tokens % key.block_size == 0)
            and 1 <= config.num_stages <= MOST_STAGES
            and tile_bytes * config.num_stages <= SHARED_BYTES
        )


def _around(value: int, most: int, factor: int = 2) -> Iterator[int]:
    """Larger and smaller numbers than `value`, from 1 to `most`."""
    for each in (value * factor, value // factor):
        if 1 <= each <= most:
            yield each


def row_blocks(rows: int, context: int, block_size: int, longest: int) -> list[int]:
    """Return how many blocks each row's context has: about `context` tokens on average, spread for several rows."""
    most = max(1, longest // block_size)
    if rows == 1:
        return [max(1, min(most, context // block_size))]
    places = random.Random(rows).sample(range(rows), rows)  # long rows first would be easier to schedule
    shares = [1 + SPREAD * (2 * place / (rows - 1) - 1) for place in places]
    return [max(1, min(most, round(share * context / block_size))) for share in shares]
