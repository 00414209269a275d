"""BlockPool: who holds which KV block. Reference counts and a free list in eviction order, everything O(1).

A free block may still hold a cached prefix; taking it for something else evicts that prefix. Blocks without content go
to the front of the free list, so that a cached one is evicted only when nothing else is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 … num_blocks - 1 of one KV group. Knows nothing about sequences, hashes or devices."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached_free = 0

    @property
    def num_free(self) -> int:
        """Blocks that `take` could return: empty ones and evictable ones."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_evictable(self) -> int:
        """Free blocks that still hold a cached prefix."""
        return self._num_cached_free

    def reference_count(self, block_id: int) -> int:
        return self._reference_counts[block_id]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Take `count` free blocks, in eviction order. Returns (blocks, those of them whose cached content is lost).

        The caller has checked `num_free`.
        """
        free, cached = self._free, self._is_cached
        blocks: list[int] = []
        evicted: list[int] = []
        for _ in range(count):
            block_id, _ = free.popitem(last=False)
            if cached[block_id]:
                cached[block_id] = False
                self._num_cached_free -= 1
                evicted.append(block_id)
            self._reference_counts[block_id] = 1
            blocks.append(block_id)
        return blocks, evicted

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; a free one leaves the free list with its content intact."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                del self._free[block_id]
                if self._is_cached[block_id]:
                    self._num_cached_free -= 1
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less for each block. Blocks released first are evicted first: pass a sequence's tail before its
        head, so that the shared beginning of prompts survives longest."""
        counts = self._reference_counts
        for block_id in block_ids:
            counts[block_id] -= 1
            if counts[block_id] == 0:
                self._free[block_id] = None
                if self._is_cached[block_id]:
                    self._num_cached_free += 1
                else:
                    self._free.move_to_end(block_id, last=False)

    def mark_cached(self, block_id: int) -> None:
        """The block's content is in the prefix cache. The caller holds the block."""
        self._is_cached[block_id] = True

    def forget_cached(self) -> None:
        """No block is cached any more; the order of the free list no longer matters."""
        self._is_cached = [False] * self.num_blocks
        self._num_cached_free = 0

    def check(self) -> None:
        """Every block is either held or free, and the counters say the same. Raises RuntimeError otherwise."""
        held = sum(1 for count in self._reference_counts if count > 0)
        if held + len(self._free) != self.num_blocks:
            raise RuntimeError(f"{held} held + {len(self._free)} free != {self.num_blocks} blocks")
        if any(count < 0 for count in self._reference_counts):
            raise RuntimeError("a block was released more often than it was taken")
        if any(self._reference_counts[block_id] for block_id in self._free):
            raise RuntimeError("a held block is in the free list")
        evictable = sum(1 for block_id in self._free if self._is_cached[block_id])
        if evictable != self._num_cached_free:
            raise RuntimeError(f"{evictable} evictable blocks, counted {self._num_cached_free}")
