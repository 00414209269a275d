"""BlockPool: who holds which KV block. Reference counts and a free list in eviction order, everything O(1).

A free block may still hold a cached prefix; taking it for something else evicts that prefix. Empty blocks are taken
first, so that a prefix is evicted only when nothing else is left. Which prefix: with LRU the one released longest ago,
with FIFO the one cached longest ago, however often it was used since.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferengine.core.eviction import EVICTION, EvictionOrder


class BlockPool:
    """Blocks 0 … num_blocks - 1 of one KV group. Knows nothing about sequences, hashes or devices."""

    def __init__(self, num_blocks: int, eviction: str = "lru") -> None:
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, without content
        self._evictable: EvictionOrder = EVICTION[eviction]()  # free, with content

    @property
    def num_free(self) -> int:
        """Blocks that `take` could return: empty ones and evictable ones."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks that still hold a cached prefix."""
        return len(self._evictable)

    def reference_count(self, block_id: int) -> int:
        return self._reference_counts[block_id]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Take `count` free blocks. Returns (blocks, those of them whose cached content is lost).

        The caller has checked `num_free`.
        """
        empty, counts = self._empty, self._reference_counts
        first = max(0, len(empty) - count)
        blocks = empty[first:]
        del empty[first:]
        blocks.reverse()
        evicted: list[int] = []
        while len(blocks) < count:
            block_id = self._evictable.pop()
            self._is_cached[block_id] = False
            evicted.append(block_id)
            blocks.append(block_id)
        for block_id in blocks:
            counts[block_id] = 1
        return blocks, evicted

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; a free one leaves the eviction order with its content intact. A block that is
        free holds content: an empty one cannot be shared."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                self._evictable.discard(block_id)
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less for each block. Blocks released first are evicted first: pass a sequence's tail before its
        head, so that the shared beginning of prompts survives longest."""
        counts = self._reference_counts
        for block_id in block_ids:
            counts[block_id] -= 1
            if counts[block_id] == 0:
                if self._is_cached[block_id]:
                    self._evictable.add(block_id)
                else:
                    self._empty.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The block's content is in the prefix cache. The caller holds the block."""
        self._is_cached[block_id] = True
        self._evictable.cached(block_id)

    def unmark_cached(self, block_id: int) -> None:
        """The block's content is in the prefix cache no more."""
        self._is_cached[block_id] = False
        if self._reference_counts[block_id] == 0:
            self._evictable.discard(block_id)
            self._empty.append(block_id)

    def forget_cached(self) -> None:
        """No block is cached any more."""
        self._is_cached = [False] * self.num_blocks
        self._empty.extend(self._evictable.clear())

    def check(self) -> None:
        """Every block is held, empty or evictable, and exactly one of these. Raises RuntimeError otherwise."""
        if min(self._reference_counts, default=0) < 0:
            raise RuntimeError("a block was released more often than it was taken")
        held = self.num_blocks - self._reference_counts.count(0)
        if held + self.num_free != self.num_blocks:
            raise RuntimeError(f"{held} held + {self.num_free} free != {self.num_blocks} blocks")
        if len(set(self._empty)) != len(self._empty):
            raise RuntimeError("a block is twice in the free list")
        for block_id in self._empty:
            if self._reference_counts[block_id] or self._is_cached[block_id]:
                raise RuntimeError(f"block {block_id} is in the free list and not empty")
        for block_id in self._evictable:
            if self._reference_counts[block_id] or not self._is_cached[block_id]:
                raise RuntimeError(f"block {block_id} is evictable but held, or without content")
