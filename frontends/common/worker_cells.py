"""Numbers that the workers of one front end share: each writes its own, and reads everybody's.

One anonymous mapping made before the fork, so that any worker can answer for all of them without a lock.
"""

from __future__ import annotations

import mmap

_DOUBLE = 8


class WorkerCells:
    """`num_cells` doubles for each worker, all 0.0 at first; `own` are those of `worker`."""

    def __init__(self, num_cells: int, num_workers: int = 1) -> None:
        self.num_cells = num_cells
        self.num_workers = num_workers
        self._size = num_cells + 1  # the last: when the worker's event loop turned
        self._memory = mmap.mmap(-1, num_workers * self._size * _DOUBLE)
        self._all: memoryview[float] = memoryview(self._memory).cast("d")
        self.worker = 0
        self.own = self.of(0)

    def choose_worker(self, worker: int) -> None:
        """After the fork: write into this worker's cells from now on. A restarted worker finds what its predecessor
        left, and has not turned yet."""
        self.worker = worker
        self.own = self.of(worker)
        self._all[(worker + 1) * self._size - 1] = 0.0

    def of(self, worker: int) -> memoryview[float]:
        """That worker's cells."""
        start = worker * self._size
        return self._all[start : start + self.num_cells]

    def total(self, place: int) -> float:
        """The sum of one cell over the workers."""
        return sum(self._all[place + worker * self._size] for worker in range(self.num_workers))

    def beat(self, now: float) -> None:
        """This worker's event loop turned at `now` (monotonic)."""
        self._all[(self.worker + 1) * self._size - 1] = now

    def last_beat(self, worker: int) -> float:
        """When that worker's loop last turned; 0.0 before it ever did."""
        return self._all[(worker + 1) * self._size - 1]
