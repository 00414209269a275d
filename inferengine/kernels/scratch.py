"""Memory that split reductions meet in."""

from __future__ import annotations

import torch

NUM_FLOATS = 8 << 20


class Scratch:
    """Partial sums and arrival counters of split reductions. Allocated once: graphs keep the addresses, and every
    launch leaves the counters at zero. Kernels of one stream may share it: each waits for the one before it to be
    complete."""

    def __init__(self, device: torch.device, *, num_floats: int = NUM_FLOATS, num_counters: int = 1 << 16) -> None:
        self.partial = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_counters, dtype=torch.int32, device=device)

    def splits(self, wanted: int, tiles: int, tile_floats: int) -> int:
        """Programs that may share each tile: as many as wanted, one where their parts would not find room."""
        room = wanted * tiles * tile_floats <= self.partial.numel() and tiles <= self.arrived.numel()
        return wanted if room else 1
