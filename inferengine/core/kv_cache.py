"""The KV cache's blocks: which are free, which prefix each holds, and which sequence has them. The tensors are the
executor's (executor/memory/kv_cache.py).

BlockPool: the blocks of one KV group, with reference counts and a free list in eviction order. Every operation is O(1).
A free block may still hold a cached prefix; taking it for something else evicts that prefix. Empty blocks are taken
first, so that a prefix is evicted only when nothing else is left. Which prefix: with LRU the one released longest ago,
with FIFO the one cached longest ago, however often it was used since. A policy is a class and one line in EVICTION.

PrefixCache: a full block is known by SHA-256 over (the hash of the block before it, its token ids); the chain starts
from a salt, so tenants with different salts never share a block and cannot probe for each other's prompts. The map
holds one block per hash; a second block with the same content stays private to its sequence.

With StateSnapshots (core/state_snapshots.py) a prefix is found as far as a snapshot of the model's state goes.

KVEvent: changes of the cache for cache-aware routers, in the fields that vLLM publishes.

BlockAges: how long blocks stay, and how soon they are used again, of a sample of them.

KVCacheManager: blocks for sequences, over one or several KV groups. A group is a set of layers that share a block
table: all full-attention layers, or all layers of one sliding window. Each group has its own pool. `lookup` reads and
changes nothing; `allocate` is all or nothing; `release` is the only way back.

SwapSpace: host memory where the KV of a preempted sequence waits, block by block. The device does the copying;
SwapSpace knows which host blocks are held and which copies the next plan has to request.
"""

from __future__ import annotations

import hashlib
import heapq
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

from inferengine.core.executor import BlockCopies, BlockUpdates, KVGroup, SnapshotWrite
from inferengine.core.histogram import Histogram
from inferengine.core.sequence import Request, Sequence
from inferengine.core.state_snapshots import StateSnapshots

SAMPLED_BLOCKS = 1024
NEVER = sys.maxsize  # `next_hash_at` without a prefix cache
BLOCK_AGES_S = (  # vLLM's
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


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

    def longest_free_run(self) -> int:
        """Return how many free blocks lie side by side at most: a figure for reports, O(number of blocks)."""
        is_held = bytes(map(bool, self._reference_counts))
        return max(map(len, is_held.split(b"\1")))

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

    def find(self, digests: list[bytes]) -> list[int | None]:
        """Return the block with each content, or None."""
        return list(map(self._block_by_hash.get, digests))

    def insert(self, digest: bytes, block_id: int) -> bool:
        """Remember the block. False when another block already holds this content."""
        if digest in self._block_by_hash:
            return False
        self._block_by_hash[digest] = block_id
        self._hash_by_block[block_id] = digest
        return True

    def evict(self, block_id: int) -> bytes:
        """Forget a block whose content is about to be overwritten. Returns the hash that is gone. Raises RuntimeError
        for a block without cached content."""
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
    same LoRA adapter (0: none); of a model with states, as far as there are snapshots."""

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


class BlockAges:
    """Ages of the blocks of one KV group, for the histograms that vLLM calls kv_block_*: of every n-th block, so that
    at most some SAMPLED_BLOCKS are followed and a busy cache spends no time on it. The caller tells the time."""

    def __init__(self, num_blocks: int, histograms: BlockAgeHistograms) -> None:
        self._every = max(1, num_blocks // SAMPLED_BLOCKS)
        self._histograms = histograms
        self._taken_s: dict[int, float] = {}
        self._used_s: dict[int, float] = {}

    def taken(self, block_ids: Iterable[int], now: float) -> None:
        """Note that blocks were given to a sequence, to be filled."""
        every = self._every
        for block_id in block_ids:
            if not block_id % every:
                self._taken_s[block_id] = self._used_s[block_id] = now

    def reused(self, block_ids: Iterable[int], now: float) -> None:
        """Note that a prefix hit found blocks."""
        every = self._every
        for block_id in block_ids:
            if not block_id % every:
                self._histograms.reuse_gap.observe(now - self._used_s[block_id])
                self._used_s[block_id] = now

    def evicted(self, block_ids: Iterable[int], now: float) -> None:
        """Note that blocks lost their content."""
        every = self._every
        for block_id in block_ids:
            if not block_id % every:
                self._histograms.lifetime.observe(now - self._taken_s[block_id])
                self._histograms.idle.observe(now - self._used_s[block_id])


class BlockAgeHistograms:
    """Seconds that sampled blocks of all groups lived, lay idle before their eviction, and passed between two uses."""

    def __init__(self) -> None:
        self.lifetime, self.idle, self.reuse_gap = (Histogram(BLOCK_AGES_S) for _ in range(3))

    def to_map(self) -> dict[str, dict[str, Any]]:
        """Return the figures by the names that vLLM gives them, without its prefix."""
        return {
            "kv_block_lifetime_seconds": self.lifetime.to_map(),
            "kv_block_idle_before_evict_seconds": self.idle.to_map(),
            "kv_block_reuse_gap_seconds": self.reuse_gap.to_map(),
        }


class CopyList:
    """Block copies per KV group, collected until the next plan takes them."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._copies: list[BlockCopies] = []

    def add(self, group_index: int, sources: list[int], targets: list[int]) -> None:
        """Request copies in one group."""
        if not self._copies:
            self._copies = [BlockCopies([], []) for _ in range(self._num_groups)]
        self._copies[group_index].sources.extend(sources)
        self._copies[group_index].targets.extend(targets)

    def take(self) -> list[BlockCopies]:
        """Return the copies since the last call; empty if there are none."""
        copies, self._copies = self._copies, []
        return copies


class SwapSpace:
    """Host blocks of every KV group. Within one plan the device copies out before it copies in, so a host block freed
    by `load` may only be reused by a later plan: the scheduler preempts before it admits."""

    def __init__(self, groups: list[KVGroup]) -> None:
        self.pools = [BlockPool(group.num_host_blocks) for group in groups]
        self.num_blocks_out = 0
        self.num_blocks_in = 0
        self.out = CopyList(len(groups))
        self.back = CopyList(len(groups))

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether the host has room for all blocks that the sequence holds."""
        held = zip(sequence.block_tables, sequence.num_blocks_released, self.pools, strict=True)
        return all(len(table) - released <= pool.num_free for table, released, pool in held)

    def store(self, sequence: Sequence) -> None:
        """Request copies of the sequence's blocks into host blocks, which it holds from now on."""
        tables: list[list[int]] = []
        for group_index, table in enumerate(sequence.block_tables):
            released = sequence.num_blocks_released[group_index]
            targets, _ = self.pools[group_index].take(len(table) - released)
            self.out.add(group_index, table[released:], targets)
            self.num_blocks_out += len(targets)
            tables.append([-1] * released + targets)
        sequence.host_tables = tables

    def load(self, sequence: Sequence) -> None:
        """Request copies back into the device blocks of the sequence; its host blocks are free."""
        for group_index, table in enumerate(sequence.host_tables or []):
            released = sequence.num_blocks_released[group_index]
            self.back.add(group_index, table[released:], sequence.block_tables[group_index][released:])
            self.pools[group_index].release(table[released:])
            self.num_blocks_in += len(table) - released
        sequence.host_tables = None

    def drop(self, sequence: Sequence) -> None:
        """Give up the host blocks of a sequence that will not come back."""
        for pool, table in zip(self.pools, sequence.host_tables or [], strict=False):
            pool.release(block_id for block_id in table if block_id >= 0)
        sequence.host_tables = None

    def check(self) -> None:
        """Check the pools. Raises RuntimeError."""
        for pool in self.pools:
            pool.check()


class OfferedBlock(NamedTuple):
    """A block of one group that is in the prefix cache under this hash."""

    group_index: int
    block_id: int
    digest: bytes


class PrefixHit:
    """What `lookup` found: `num_tokens` need no computing; `block_ids[g]` hold them (None: left of the window). Of
    `num_matched` tokens the KV is cached."""

    __slots__ = ("block_hashes", "block_ids", "num_matched", "num_tokens")

    def __init__(
        self, num_tokens: int, block_ids: list[list[int | None]], block_hashes: list[bytes], num_matched: int = 0
    ) -> None:
        self.num_tokens = num_tokens
        self.num_matched = num_matched
        self.block_ids = block_ids
        self.block_hashes = block_hashes


def _first_missing(blocks: list[int | None]) -> int:
    return blocks.index(None) if None in blocks else len(blocks)


class KVCacheManager:
    """Owns the pools and the prefix caches; writes each change of a block table into `updates` for the next plan."""

    def __init__(
        self,
        groups: list[KVGroup],
        block_size: int,
        *,
        max_chunk: int,
        prefix_caching: bool = True,
        eviction: str = "lru",
        record_events: bool = False,
        num_snapshots: int = 0,
    ) -> None:
        """`num_snapshots`: of the model's states; 0: it has none."""
        self.block_size = block_size
        self.groups = groups
        self.max_chunk = max_chunk  # most tokens of one sequence in one step: what a window needs beyond itself
        self.prefix_caching = prefix_caching
        self.pools = [BlockPool(group.num_blocks, eviction) for group in groups]
        self.swap = SwapSpace(groups)
        self.snapshots = StateSnapshots(num_snapshots) if prefix_caching and num_snapshots else None
        self.caches = [PrefixCache(group.num_blocks) for group in groups]
        self.now_s = 0.0  # set before each plan: the time of what happens next
        self.block_ages = BlockAgeHistograms()
        self._ages = [BlockAges(group.num_blocks, self.block_ages) for group in groups]
        self.num_evictions = 0
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self.events: list[KVEvent] | None = [] if record_events else None
        self._roots: dict[tuple[bytes, int], bytes] = {}
        self._full_groups = [index for index, group in enumerate(groups) if group.window is None]
        self._updates = self._empty_updates()
        self._copies = CopyList(len(groups))

    # -- questions ---------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, group: KVGroup, num_tokens: int) -> int:
        """Return the most blocks that a sequence of this length holds at one time in this group."""
        needed = self.blocks_for(num_tokens)
        return needed if group.window is None else min(needed, self.blocks_for(group.window + self.max_chunk) + 1)

    @property
    def usage(self) -> float:
        """Share of blocks held by live sequences, of the fullest group."""
        return max(pool.num_held / pool.num_blocks if pool.num_blocks else 0.0 for pool in self.pools)

    def lookup(self, sequence: Sequence) -> PrefixHit:
        """Return the longest cached prefix that all groups can serve. Changes nothing.

        The last token is never part of it: its computation gives the next token, or the embedding.
        """
        request = sequence.request
        wants_all = request.params.prompt_logprobs is not None or request.gathers
        if not self.prefix_caching or wants_all:
            return PrefixHit(0, [[] for _ in self.groups], [])
        memo = sequence.block_hashes  # a waiting sequence is looked up at every step: hash each block once
        tokens, size = sequence.tokens, self.block_size
        most = (len(tokens) - 1) // size
        found = [cache.find(memo[:most]) for cache in self.caches]
        count = self._num_known(found)
        while count == len(found[0]) < most:
            parent = memo[count - 1] if count else self._root(request)
            memo.append(block_hash(parent, tokens[count * size : (count + 1) * size]))
            new = [cache.get(memo[count]) for cache in self.caches]
            for blocks, block_id in zip(found, new, strict=True):
                blocks.append(block_id)
            if new.count(None) < len(new) and not any(new[index] is None for index in self._full_groups):
                count += 1
        num_matched = count * size
        while count:
            shorter = min(self._usable(blocks, group, count) for blocks, group in zip(found, self.groups, strict=True))
            if self.snapshots is not None:
                shorter = self.snapshots.longest(memo, shorter)
            if shorter == count:
                break
            count = shorter
        for blocks, group in zip(found, self.groups, strict=True):
            first = self._first_needed(group, count)
            blocks[:first] = [None] * first
            del blocks[count:]
        return PrefixHit(count * size, found, memo[:count], num_matched)

    def _num_known(self, found: list[list[int | None]]) -> int:
        """Return how many of the first blocks are cached in all groups without a window; where all have windows, in
        any."""
        if self._full_groups:
            return min(_first_missing(found[index]) for index in self._full_groups)
        return next(
            (i for i, blocks in enumerate(zip(*found, strict=True)) if blocks.count(None) == len(blocks)), len(found[0])
        )

    def _first_needed(self, group: KVGroup, num_blocks: int) -> int:
        """Return the index of the first block that the token after `num_blocks` full blocks can see."""
        if group.window is None:
            return 0
        return max(0, (num_blocks * self.block_size - group.window + 1) // self.block_size)

    def _usable(self, blocks: list[int | None], group: KVGroup, count: int) -> int:
        """Return the largest number of blocks <= count with which this group could go on, of those found."""
        if group.window is None:
            return min(count, _first_missing(blocks))
        while count:
            missing = [i for i in range(self._first_needed(group, count), count) if blocks[i] is None]
            if not missing:
                return count
            count = missing[-1]
        return 0

    # -- changes -----------------------------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Give the sequence the blocks of a hit. Nothing else may have happened since `lookup`."""
        for group_index, block_ids in enumerate(hit.block_ids if hit.num_tokens else ()):  # most hits are empty
            held = [block_id for block_id in block_ids if block_id is not None]
            self.pools[group_index].share(held)
            self._ages[group_index].reused(held, self.now_s)
            released = len(block_ids) - len(held)
            sequence.block_tables[group_index] = [-1 if block_id is None else block_id for block_id in block_ids]
            sequence.num_blocks_released[group_index] = released
            self._record(group_index, sequence.slot, released, held)
        if self.snapshots is not None:
            sequence.num_matched = hit.num_matched
            sequence.snapshot = self.snapshots.use(hit.block_hashes[-1]) if hit.num_tokens else -1
        sequence.num_computed = hit.num_tokens
        sequence.capacity = hit.num_tokens
        sequence.block_hashes = list(hit.block_hashes)
        sequence.next_hash_at = hit.num_tokens + self.block_size if self.prefix_caching else NEVER
        self.num_lookup_tokens += len(sequence.tokens)
        self.num_hit_tokens += hit.num_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens in every group. False if it does not fit: no block was taken."""
        needed = -(-num_tokens // self.block_size)
        tables = sequence.block_tables
        for group_index in self._full_groups:
            if needed - len(tables[group_index]) > self.pools[group_index].num_free:
                return False
        if len(self._full_groups) < len(tables):
            self._release_left_of_window(sequence)
            for pool, table in zip(self.pools, tables, strict=True):
                if needed - len(table) > pool.num_free:
                    return False
        for group_index, table in enumerate(tables):
            missing = needed - len(table)
            if missing > 0:
                blocks, evicted = self.pools[group_index].take(missing)
                if evicted:
                    self._evict(group_index, evicted)
                self._ages[group_index].taken(blocks, self.now_s)
                self._record(group_index, sequence.slot, len(table), blocks)
                table += blocks
        sequence.capacity = needed * self.block_size
        return True

    def cache_full_blocks(self, sequence: Sequence, num_computed: int) -> list[OfferedBlock]:
        """Hash the blocks that are full with `num_computed` tokens done or under way, and offer them for reuse.

        Returns the blocks whose content was not in the cache.
        """
        offered: list[OfferedBlock] = []
        if not self.prefix_caching:
            return offered
        size = self.block_size
        hashes = sequence.block_hashes
        full = min(num_computed, len(sequence.tokens)) // size
        sequence.next_hash_at = (full + 1) * size
        known = len(hashes)
        if full <= known:
            return offered
        digest = hashes[-1] if hashes else self._root(sequence.request)
        for index in range(known, full):
            digest = block_hash(digest, sequence.tokens[index * size : (index + 1) * size])
            hashes.append(digest)
            offered += self._insert(sequence, index, digest)
        if self.snapshots is not None:
            self.snapshots.settle(sequence, size)
        return offered

    def save_states(
        self, rows: SequenceOf[Sequence], starts: list[int], counts: list[int], num_decodes: int
    ) -> list[SnapshotWrite]:
        """Return the snapshots to take of a step's rows, whose prompts `cache_full_blocks` has hashed."""
        writes: dict[int, SnapshotWrite] = {}  # by snapshot: a row may take that of a row before it
        size, snapshots = self.block_size, self.snapshots
        if snapshots is None:
            return []
        for row, (sequence, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            end, known = start + count, len(sequence.tokens)
            if row < num_decodes or start >= sequence.num_prompt:  # also what a grammar forces, which is hashed already
                last = end // size * size
                snapshot = snapshots.reserve(sequence, last) if last > start else None
                if snapshot is not None:
                    writes[snapshot] = SnapshotWrite(row, last, snapshot)
                    snapshots.settle(sequence, size)
                continue
            last = min(end, known - 1) // size * size
            for boundary in sorted({sequence.num_matched, last}):
                if start < boundary <= last:
                    is_lasting = boundary == sequence.num_matched or end >= known
                    digest = sequence.block_hashes[boundary // size - 1]
                    snapshot = snapshots.save(digest, is_lasting=is_lasting)
                    if snapshot is not None:
                        writes[snapshot] = SnapshotWrite(row, boundary, snapshot)
        return list(writes.values())

    def forget(self, sequence: Sequence, from_token: int) -> None:
        """Take the sequence's blocks and states from that token on out of the prefix cache: their content is wrong."""
        hashes = sequence.block_hashes
        if self.snapshots is not None:
            for digest in hashes[from_token // self.block_size :]:
                self.snapshots.drop(digest)
        self.withdraw(
            [
                OfferedBlock(group_index, table[index], hashes[index])
                for index in range(from_token // self.block_size, len(hashes))
                for group_index, table in enumerate(sequence.block_tables)
                if index < len(table)
            ]
        )

    def withdraw(self, offered: list[OfferedBlock]) -> None:
        """Take these blocks out of the prefix cache, as far as they still are in it under the same hash."""
        gone: list[bytes] = []
        for group_index, block_id, digest in offered:
            if self.caches[group_index].get(digest) == block_id:
                self.caches[group_index].evict(block_id)
                self.pools[group_index].unmark_cached(block_id)
                gone.append(digest)
        lost = [digest for digest in dict.fromkeys(gone) if not any(digest in cache for cache in self.caches)]
        if lost and self.events is not None:
            self.events.append(BlockRemoved(lost))

    def release(self, sequence: Sequence) -> None:
        """Give back every block of the sequence; cached content stays until it is evicted."""
        for group_index, table in enumerate(sequence.block_tables):
            released = sequence.num_blocks_released[group_index]
            self.pools[group_index].release(reversed(table[released:] if released else table))
            sequence.block_tables[group_index] = []
            sequence.num_blocks_released[group_index] = 0
        sequence.capacity = 0
        if self.snapshots is not None:
            self.snapshots.release(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> PrefixHit | None:
        """Return the full blocks of a running sequence's prompt, for a child with the same prompt. None where a window
        group has already released blocks that the child would need."""
        full = (child.num_prompt - 1) // self.block_size
        for group_index, group in enumerate(self.groups):
            if parent.num_blocks_released[group_index] > self._first_needed(group, full):
                return None
        block_ids = [
            [block if i >= self._first_needed(group, full) else None for i, block in enumerate(table[:full])]
            for group, table in zip(self.groups, parent.block_tables, strict=True)
        ]
        return PrefixHit(full * self.block_size, block_ids, parent.block_hashes[:full])

    def copy_partial(self, parent: Sequence, child: Sequence) -> int:
        """Copy the block in which the shared prompt ends (copy on write: both will write into theirs). Returns the
        number of the child's tokens that need no computing: all of the prompt but the last."""
        index = (child.num_prompt - 1) // self.block_size
        if child.num_prompt - 1 > index * self.block_size:
            for group_index, (source, target) in enumerate(zip(parent.block_tables, child.block_tables, strict=True)):
                self._copies.add(group_index, [source[index]], [target[index]])
        child.num_computed = child.num_prompt - 1
        return child.num_computed

    def swap_out(self, sequence: Sequence) -> None:
        """Move the KV of a sequence to the host and give its blocks back. The caller has asked `swap.has_room`."""
        self.swap.store(sequence)
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """Bring the KV of a sequence back. The caller has made sure that it fits."""
        for group_index, table in enumerate(sequence.host_tables or []):
            released = table.count(-1)
            targets, evicted = self.pools[group_index].take(len(table) - released)
            if evicted:
                self._evict(group_index, evicted)
            self._ages[group_index].taken(targets, self.now_s)
            sequence.block_tables[group_index] = [-1] * released + targets
            sequence.num_blocks_released[group_index] = released
            self._record(group_index, sequence.slot, released, targets)
        self.swap.load(sequence)
        sequence.capacity = len(sequence.block_tables[0]) * self.block_size

    def take_copies(self) -> list[BlockCopies]:
        """Return the block copies requested since the last call, for the next plan."""
        return self._copies.take()

    def take_events(self) -> list[KVEvent]:
        """Return the events of the prefix cache since the last call."""
        if not self.events:
            return []
        events, self.events = self.events, []
        return events

    def take_updates(self) -> list[BlockUpdates]:
        """Return the block-table entries written since the last call, for the next plan."""
        updates, self._updates = self._updates, self._empty_updates()
        return updates

    def flush(self) -> int:
        """Drop all cached prefixes. Blocks in use stay in use. Returns the number of blocks forgotten."""
        count = 0
        for pool, cache in zip(self.pools, self.caches, strict=True):
            pool.forget_cached()
            count += cache.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        return count

    def check(self) -> None:
        """Check that empty + evictable + held = total in every pool, and that evictable blocks are cached ones. Raises
        RuntimeError."""
        self.swap.check()
        if self.snapshots is not None:
            self.snapshots.check()
        for pool, cache in zip(self.pools, self.caches, strict=True):
            pool.check()
            cached_free = sum(1 for block in cache.block_ids() if pool.reference_count(block) == 0)
            if cached_free != pool.num_evictable:
                raise RuntimeError(f"{cached_free} cached free blocks, pool counts {pool.num_evictable}")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _insert(self, sequence: Sequence, index: int, digest: bytes) -> list[OfferedBlock]:
        stored: list[OfferedBlock] = []
        for group_index, table in enumerate(sequence.block_tables):
            block_id = table[index]
            if block_id >= 0 and self.caches[group_index].insert(digest, block_id):
                self.pools[group_index].mark_cached(block_id)
                stored.append(OfferedBlock(group_index, block_id, digest))
        if stored and self.events is not None:
            size = self.block_size
            parent = sequence.block_hashes[index - 1] if index else None
            token_ids = sequence.tokens[index * size : (index + 1) * size]
            self.events.append(BlockStored([digest], parent, token_ids, size, sequence.request.adapter))
        return stored

    def _evict(self, group_index: int, block_ids: list[int]) -> None:
        digests = [self.caches[group_index].evict(block_id) for block_id in block_ids]
        self.num_evictions += len(block_ids)
        self._ages[group_index].evicted(block_ids, self.now_s)
        if self.events is not None:
            gone = [digest for digest in digests if not any(digest in cache for cache in self.caches)]
            if gone:
                self.events.append(BlockRemoved(gone))

    def _release_left_of_window(self, sequence: Sequence) -> None:
        for group_index, group in enumerate(self.groups):
            if group.window is None:
                continue
            table = sequence.block_tables[group_index]
            first = min(max(0, (sequence.num_computed - group.window + 1) // self.block_size), len(table))
            begin = sequence.num_blocks_released[group_index]
            if first > begin:
                self.pools[group_index].release(reversed(table[begin:first]))
                table[begin:first] = [-1] * (first - begin)
                sequence.num_blocks_released[group_index] = first

    def _record(self, group_index: int, slot: int, first_index: int, block_ids: list[int]) -> None:
        slots, indices, blocks = self._updates[group_index]
        if len(block_ids) == 1:  # what a decode needs
            slots.append(slot)
            indices.append(first_index)
            blocks.append(block_ids[0])
            return
        slots.extend([slot] * len(block_ids))
        indices.extend(range(first_index, first_index + len(block_ids)))
        blocks.extend(block_ids)

    def _root(self, request: Request) -> bytes:
        salt = (request.cache_salt, request.adapter)
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= 4096:  # clients choose the salts: the memo must stay bounded
                self._roots.clear()
            root = self._roots[salt] = root_hash(*salt)
        return root

    def _empty_updates(self) -> list[BlockUpdates]:
        return [BlockUpdates([], [], []) for _ in self.groups]
