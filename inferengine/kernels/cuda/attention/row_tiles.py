"""Which row a tile of queries belongs to, found on the device: the grid is bounded by host integers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(query_start_ptr, first_row, num_rows, tile, TILE_TOKENS: tl.constexpr):
    """The row that a tile belongs to: the last one whose first tile is not after it. Row r begins at tile
    (query_start[r] - query_start[first]) // TILE_TOKENS + (r - first), which leaves at least cdiv(count) tiles each."""
    base = tl.load(query_start_ptr + first_row)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + first_row + middle) - base) // TILE_TOKENS + middle
        if start <= tile:
            low = middle
        else:
            high = middle
    first_tile = (tl.load(query_start_ptr + first_row + low) - base) // TILE_TOKENS + low
    return first_row + low, tile - first_tile
