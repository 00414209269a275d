"""SwapSpace: host memory where the KV of a preempted sequence waits, block by block.

The device does the copying; SwapSpace knows which host blocks are held and which copies the next plan has to request.
"""

from __future__ import annotations

from inferengine.core.executor import KVGroup
from inferengine.core.kv_cache.block_pool import BlockPool
from inferengine.core.sequence import Sequence
from inferengine.core.step_plan import BlockCopies


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
        """Whether the host has room for all blocks that the sequence holds."""
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
