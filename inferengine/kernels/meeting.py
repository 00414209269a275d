"""Where programs that each hold a part of a tile's sum meet: the last to arrive adds the parts up, in their order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave_part(part, parts_at, arrived_at, split, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Put part number `split` of SPLITS where the tile's parts lie, SIZE floats apart. True for the program that is the
    last to arrive: it leaves the counter at zero."""
    tl.store(parts_at + split * SIZE, part)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_at, 1, sem="acq_rel", scope="gpu")
    last = before == SPLITS - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived_at, 0)
    return last


@triton.jit
def sum_of_parts(parts_at, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """All parts of a tile, added in order whoever came last."""
    total = tl.load(parts_at, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_at + split * SIZE, cache_modifier=".cg")
    return total
