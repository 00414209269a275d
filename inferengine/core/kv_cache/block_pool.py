"""The blocks of one KV group: BlockPool knows which are free, PrefixCache which prefix each holds.

BlockPool: reference counts and a free list in eviction order. Every operation is O(1).

A free block may still hold a cached prefix; taking it for something else evicts that prefix. Empty blocks are taken
first, so that a prefix is evicted only when nothing else is left. Which prefix: with LRU the one released longest ago,
with FIFO the one cached longest ago, however often it was used since. A policy is a class and one line in EVICTION.

PrefixCache: a full block is known by SHA-256 over (the hash of the block before it, its token ids); the chain starts
from a salt, so tenants with different salts never share a block and cannot probe for each other's prompts. The map
holds one block per hash; a second block with the same content stays private to its sequence.

KVEvent: changes of the cache for cache-aware routers, in the fields that vLLM publishes.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol


class EvictionOrder(Protocol):
    """The free blocks with cached content, in the order in which they lose it."""

    def add(self, block_id: int) -> None:
        """Add a block with content that became free."""
        ...

    def discard(self, block_id: int) -> None:
        """Take out a block that is in use again."""
        ...

    def pop(self) -> int:
        """Take out the block to evict next."""
        ...

    def cached(self, block_id: int) -> None:
        """Note that a block in use got content."""
        ...

    def clear(self) -> list[int]:
        """Take out all blocks."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class LeastRecentlyUsed:
    """Evicts the block released longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        """Add a free block with content."""
        self._order[block_id] = None

    def discard(self, block_id: int) -> None:
        """Take out a block that is in use again."""
        del self._order[block_id]

    def pop(self) -> int:
        """Take out the block to evict next."""
        return self._order.popitem(last=False)[0]

    def cached(self, block_id: int) -> None:
        """Do nothing: only the release counts."""

    def clear(self) -> list[int]:
        """Take out all blocks."""
        blocks = list(self._order)
        self._order.clear()
        return blocks

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


class FirstInFirstOut:
    """Evicts the block cached longest ago. A heap over the moment of caching; entries of blocks in use are skipped."""

    def __init__(self) -> None:
        self._stamp = 0
        self._stamps: dict[int, int] = {}
        self._members: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def add(self, block_id: int) -> None:
        """Add a free block with content."""
        self._members.add(block_id)
        heapq.heappush(self._heap, (self._stamps[block_id], block_id))

    def discard(self, block_id: int) -> None:
        """Take out a block that is in use again."""
        self._members.discard(block_id)
        if len(self._heap) > 64 + 4 * len(self._members):  # a prefix used again and again leaves an entry each time
            self._heap = [(self._stamps[member], member) for member in self._members]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        """Take out the block to evict next."""
        while True:
            stamp, block_id = heapq.heappop(self._heap)
            if block_id in self._members and self._stamps[block_id] == stamp:
                self._members.discard(block_id)
                return block_id

    def cached(self, block_id: int) -> None:
        """Note when the block got content."""
        self._stamp += 1
        self._stamps[block_id] = self._stamp

    def clear(self) -> list[int]:
        """Take out all blocks."""
        blocks = list(self._members)
        self._members.clear()
        self._heap.clear()
        return blocks

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)


EVICTION: dict[str, Callable[[], EvictionOrder]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}


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
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._empty) - len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks that still hold a cached prefix."""
        return len(self._evictable)

    def reference_count(self, block_id: int) -> int:
        """Return the number of holders of a block."""
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
        """Add a holder to each block. A free one must hold content: it leaves the eviction order, content intact."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                self._evictable.discard(block_id)
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a holder from each block. Blocks released first are evicted first: pass a sequence's tail before its
        head, so that the shared beginning of prompts is kept longest."""
        counts = self._reference_counts
        for block_id in block_ids:
            counts[block_id] -= 1
            if counts[block_id] == 0:
                if self._is_cached[block_id]:
                    self._evictable.add(block_id)
                else:
                    self._empty.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """Note that the block's content is in the prefix cache. The caller holds the block."""
        self._is_cached[block_id] = True
        self._evictable.cached(block_id)

    def unmark_cached(self, block_id: int) -> None:
        """Note that the block's content is no longer in the prefix cache."""
        self._is_cached[block_id] = False
        if self._reference_counts[block_id] == 0:
            self._evictable.discard(block_id)
            self._empty.append(block_id)

    def forget_cached(self) -> None:
        """Note that no block's content is in the prefix cache."""
        self._is_cached = [False] * self.num_blocks
        self._empty.extend(self._evictable.clear())

    def check(self) -> None:
        """Check that every block is exactly one of held, empty and evictable. Raises RuntimeError."""
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


def root_hash(salt: bytes, adapter: int = 0) -> bytes:
    """Return the first hash of a chain. An adapter has a chain of its own, which no salt can lead to."""
    if adapter:
        return hashlib.sha256(b"inferengine prefix cache of adapter %d\0" % adapter + salt).digest()
    return hashlib.sha256(b"inferengine prefix cache\0" + salt).digest()


def block_hash(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Return the hash of a full block: of its tokens and, through `parent`, of everything before them."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


class PrefixCache:
    """Hash -> block of one KV group. Knows nothing about who holds the blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_by_hash

    def block_ids(self) -> list[int]:
        """Return every block with cached content."""
        return list(self._block_by_hash.values())

    def get(self, digest: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._block_by_hash.get(digest)

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Remember the block. False when another block already holds this content."""
        if digest in self._block_by_hash:
            return False
        self._block_by_hash[digest] = block_id
        self._hash_by_block[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Forget a block whose content is about to be overwritten. Returns the hash that is gone."""
        digest = self._hash_by_block[block_id]
        if digest is None:
            raise RuntimeError(f"block {block_id} was evicted but is not cached")
        self._hash_by_block[block_id] = None
        del self._block_by_hash[digest]
        return digest

    def clear(self) -> int:
        """Forget everything. Returns the number of blocks forgotten."""
        count = len(self._block_by_hash)
        for block_id in self._block_by_hash.values():
            self._hash_by_block[block_id] = None
        self._block_by_hash.clear()
        return count


class BlockStored(NamedTuple):
    """A block with these tokens, after `parent_block_hash` (None at the beginning), can be reused by requests with the
    same LoRA adapter (0: none)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    adapter: int = 0


class BlockRemoved(NamedTuple):
    """These blocks can no longer be reused."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """No block can be reused any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
