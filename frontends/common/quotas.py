"""How much each key may still do, counted over all workers of a front end.

Each worker writes its own cells of one shared anonymous mapping made before the fork and reads everybody's, so limits
hold for the sum without a lock; two workers that decide in the same microsecond may let one request too many pass.
Rates are a sliding window: the share of the last minute's count that still lies within 60 s, and this minute's.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Sequence

from frontends.common.keys import ApiKey
from inferengine.errors import InferEngineError

WINDOW_S = 60.0
_IN_FLIGHT, _WINDOW, _COUNT, _COUNT_BEFORE, _CELLS = range(5)
_DOUBLE = 8


class Quotas:
    """Counts of all workers; this object writes those of `worker`."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        *,
        max_in_flight: int = 0,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_in_flight`: of all keys together, 0 for no limit. `clock` must be the same for all workers."""
        self._max_in_flight = max_in_flight
        self._num_workers = num_workers
        self._clock = clock
        self._row = (len(keys) + 1) * _CELLS  # the first key is everybody together
        self._memory = mmap.mmap(-1, num_workers * self._row * _DOUBLE)
        self._cells: memoryview[float] = memoryview(self._memory).cast("d")
        self._worker = 0

    def choose_worker(self, worker: int) -> None:
        """After the fork. What a predecessor had in flight died with it; what it counted in this minute stays."""
        self._worker = worker
        for place in range(worker * self._row, (worker + 1) * self._row, _CELLS):
            self._cells[place + _IN_FLIGHT] = 0.0

    @contextlib.contextmanager
    def request(self, key: ApiKey) -> Iterator[None]:
        """While a request of this key is answered. Raises `rate_limited`, or `overloaded` when all are too many."""
        self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    def enter(self, key: ApiKey) -> None:
        """As `request`; whoever enters must leave."""
        if self._max_in_flight and self.in_flight() >= self._max_in_flight:
            raise InferEngineError("overloaded", "The server answers as many requests as it may.", retry_after_s=1.0)
        if key.max_in_flight and self.in_flight(key) >= key.max_in_flight:
            message = f"This key has {key.max_in_flight} requests in flight, the most that it may."
            raise InferEngineError("rate_limited", message, retry_after_s=1.0)
        if key.requests_per_minute:
            excess = self.rate(key) + 1 - key.requests_per_minute
            if excess > 0:
                message = f"This key may send {key.requests_per_minute} requests a minute."
                wait_s = min(WINDOW_S, excess * WINDOW_S / key.requests_per_minute)
                raise InferEngineError("rate_limited", message, retry_after_s=wait_s)
            self._count(key)
        self._cells[self._place(self._worker, -1) + _IN_FLIGHT] += 1
        if key.index >= 0:
            self._cells[self._place(self._worker, key.index) + _IN_FLIGHT] += 1

    def leave(self, key: ApiKey) -> None:
        self._cells[self._place(self._worker, -1) + _IN_FLIGHT] -= 1
        if key.index >= 0:
            self._cells[self._place(self._worker, key.index) + _IN_FLIGHT] -= 1

    def in_flight(self, key: ApiKey | None = None) -> int:
        """Requests being answered by all workers: of a key, or of everybody."""
        index = -1 if key is None else key.index
        return int(sum(self._cells[self._place(worker, index)] for worker in range(self._num_workers)))

    def rate(self, key: ApiKey) -> float:
        """Requests of a key in the last minute."""
        window, share = divmod(self._clock() / WINDOW_S, 1.0)
        total = 0.0
        for worker in range(self._num_workers):
            place = self._place(worker, key.index)
            began, count, before = self._cells[place + _WINDOW : place + _IN_FLIGHT + _CELLS]
            if began == window:
                total += count + before * (1.0 - share)
            elif began == window - 1:
                total += count * (1.0 - share)
        return total

    def _count(self, key: ApiKey) -> None:
        window = self._clock() // WINDOW_S
        place = self._place(self._worker, key.index)
        if self._cells[place + _WINDOW] != window:
            is_next = self._cells[place + _WINDOW] == window - 1
            self._cells[place + _COUNT_BEFORE] = self._cells[place + _COUNT] if is_next else 0.0
            self._cells[place + _COUNT] = 0.0
            self._cells[place + _WINDOW] = window
        self._cells[place + _COUNT] += 1

    def _place(self, worker: int, index: int) -> int:
        return worker * self._row + (index + 1) * _CELLS
