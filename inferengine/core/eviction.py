"""Which cached prefix goes first when blocks run out. A policy is a class and one line in EVICTION."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionOrder(Protocol):
    """The free blocks with cached content, in the order in which they lose it."""

    def add(self, block_id: int) -> None:
        """A block with content became free."""
        ...

    def discard(self, block_id: int) -> None:
        """A block that is in here is in use again."""
        ...

    def pop(self) -> int:
        """Take out the block to evict next."""
        ...

    def cached(self, block_id: int) -> None:
        """The block, which is in use, got content."""
        ...

    def clear(self) -> list[int]:
        """Take out all."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class LeastRecentlyUsed:
    """Released longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        self._order[block_id] = None

    def discard(self, block_id: int) -> None:
        del self._order[block_id]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def cached(self, block_id: int) -> None:
        """Only use counts."""

    def clear(self) -> list[int]:
        blocks = list(self._order)
        self._order.clear()
        return blocks

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


class FirstInFirstOut:
    """Cached longest ago goes first. A heap over the moment of caching; entries of blocks in use are skipped."""

    def __init__(self) -> None:
        self._stamp = 0
        self._stamps: dict[int, int] = {}
        self._members: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def add(self, block_id: int) -> None:
        self._members.add(block_id)
        heapq.heappush(self._heap, (self._stamps[block_id], block_id))

    def discard(self, block_id: int) -> None:
        self._members.discard(block_id)
        if len(self._heap) > 64 + 4 * len(self._members):  # a prefix used again and again leaves an entry each time
            self._heap = [(self._stamps[member], member) for member in self._members]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            stamp, block_id = heapq.heappop(self._heap)
            if block_id in self._members and self._stamps[block_id] == stamp:
                self._members.discard(block_id)
                return block_id

    def cached(self, block_id: int) -> None:
        self._stamp += 1
        self._stamps[block_id] = self._stamp

    def clear(self) -> list[int]:
        blocks = list(self._members)
        self._members.clear()
        self._heap.clear()
        return blocks

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)


EVICTION: dict[str, Callable[[], EvictionOrder]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}
