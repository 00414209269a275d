"""Split-K reduction: programs that each hold a part of a tile's sum store it in scratch memory, and the last one to
arrive adds the parts up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_FLOATS = 8 << 20  # of a Scratch


@triton.jit
def store_part(part, parts_at, arrived_at, split, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Store part number `split` of SPLITS among the tile's parts, SIZE floats apart. True for the program that is the
    last to arrive: it resets the counter to zero."""
    tl.store(parts_at + split * SIZE, part)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_at, 1, sem="acq_rel", scope="gpu")
    last = before == SPLITS - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived_at, 0)
    return last


@triton.jit
def sum_parts(parts_at, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the sum of all parts of a tile, added in order whichever program came last."""
    total = tl.load(parts_at, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_at + split * SIZE, cache_modifier=".cg")
    return total


class Scratch:
    """Partial sums and arrival counters of split reductions. Allocated once: graphs keep the addresses, and every
    launch leaves the counters at zero. Kernels of one stream may share it: each waits for the one before it to be
    complete."""

    def __init__(self, device: torch.device, *, num_floats: int = NUM_FLOATS, num_counters: int = 1 << 16) -> None:
        self.partial = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_counters, dtype=torch.int32, device=device)

    def behind(self, num_floats: int) -> Scratch:
        """Return the same memory without its first floats, and the same counters."""
        rest = Scratch.__new__(Scratch)
        rest.partial, rest.arrived = self.partial[num_floats:], self.arrived
        return rest

    def splits(self, wanted: int, tiles: int, tile_floats: int) -> int:
        """Return how many programs may share each tile: as many as wanted, one where their parts have no room."""
        room = wanted * tiles * tile_floats <= self.partial.numel() and tiles <= self.arrived.numel()
        return wanted if room else 1
