"""Limit the requests of each API key, counted over all workers of a front end.

The counters are in shared memory that is mapped before the fork. Each worker writes its own rows and reads those of all
workers, so limits hold for the sum without a lock. Two workers that decide at the same moment may admit one request too
many. A row is found by the key's name, because keys change while the workers run.

The rate is a sliding window: requests are counted by the second, and each count is dropped after 60 seconds. So the
Retry-After of a refused request is exact and at most 60 s; SDKs ignore a longer one and give up. Several refused
requests get different seconds, one for each place that becomes free.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import time
from collections.abc import Callable, Iterator, Sequence

from frontends.common.auth import ApiKey
from inferengine.errors import InferEngineError

WINDOW_S = 60
MIN_ROWS = 256
# The cells of a row: mark of the key, requests in flight, second of the last entry, then by second (60 cells each)
# admitted requests and promised places.
_MARK, _IN_FLIGHT, _LATEST, _ADMITTED = range(4)
_PROMISED = _ADMITTED + WINDOW_S
_CELLS = _PROMISED + WINDOW_S
_LONG_AGO = -2.0 * WINDOW_S
_DOUBLE = 8


class Quotas:
    """The counters of all workers. Each worker writes only its own."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        *,
        max_in_flight: int = 0,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: the keys known now; there is room for four times as many. `max_in_flight`: limit for all keys
        together, 0 for none. `clock` must be the same for all workers."""
        self._max_in_flight = max_in_flight
        self._num_workers = num_workers
        self._clock = clock
        self._slab = (1 + max(MIN_ROWS, 4 * len(keys))) * _CELLS  # the first row counts all keys together
        self._memory = mmap.mmap(-1, num_workers * self._slab * _DOUBLE)
        self._cells: memoryview[float] = memoryview(self._memory).cast("d")
        self._worker = 0
        self._places: dict[tuple[int, float], int] = {}  # by worker and mark: the row found last

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork. Sets its requests in flight to 0, because those of a
        predecessor ended with it; rates continue."""
        self._worker = worker
        for place in range(worker * self._slab, (worker + 1) * self._slab, _CELLS):
            self._cells[place + _IN_FLIGHT] = 0.0

    @contextlib.contextmanager
    def request(self, key: ApiKey) -> Iterator[None]:
        """Count a request of this key while it is answered. Raises `rate_limited` for the limits of the key, and
        `overloaded` for `max_in_flight`."""
        self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    def enter(self, key: ApiKey) -> None:
        """Begin to count a request, as `request` does. Call `leave` once for each."""
        if self._max_in_flight and self.in_flight() >= self._max_in_flight:
            raise InferEngineError("overloaded", "The server answers as many requests as it may.", retry_after_s=1.0)
        if key.max_in_flight and self.in_flight(key) >= key.max_in_flight:
            message = f"This key has {key.max_in_flight} requests in flight, the most that it may."
            raise InferEngineError("rate_limited", message, retry_after_s=1.0)
        if key.requests_per_minute:
            now_s = self._clock()
            if self.rate(key) >= key.requests_per_minute:
                message = f"This key may send {key.requests_per_minute} requests a minute."
                wait_s = self._promise(key, int(now_s)) - now_s
                raise InferEngineError("rate_limited", message, retry_after_s=wait_s)
            self._admit(key, int(now_s))
        self._cells[self._worker * self._slab + _IN_FLIGHT] += 1
        if key.name:
            self._cells[self._own_row(key) + _IN_FLIGHT] += 1

    def try_charge(self, key: ApiKey) -> bool:
        """Count a request that can wait, a batch's line, towards the rate of its key, and not as one in flight. False:
        nothing is counted, because the last tenth of each minute's requests is left to those that cannot wait."""
        most = key.requests_per_minute - key.requests_per_minute // 10
        if not key.requests_per_minute:
            return True
        if self.rate(key) >= most:
            return False
        self._admit(key, int(self._clock()))
        return True

    def _admit(self, key: ApiKey, now: int) -> None:
        row = self._current_row(key, now)
        self._cells[row + _ADMITTED + now % WINDOW_S] += 1

    def leave(self, key: ApiKey) -> None:
        """Count one request fewer in flight, for this key and in total. Call once for each `enter`."""
        self._cells[self._worker * self._slab + _IN_FLIGHT] -= 1
        if key.name:
            self._cells[self._own_row(key) + _IN_FLIGHT] -= 1

    def in_flight(self, key: ApiKey | None = None) -> int:
        """Return the number of requests being answered by all workers, of one key or of all."""
        if key is None:
            rows = [worker * self._slab for worker in range(self._num_workers)]
        else:
            rows = self._rows(key)
        return int(sum(self._cells[row + _IN_FLIGHT] for row in rows))

    def rate(self, key: ApiKey) -> int:
        """Return the number of admitted requests of a key in the last minute."""
        now = int(self._clock())
        total = 0.0
        for row in self._rows(key):
            latest = int(self._cells[row + _LATEST])
            if now - latest < WINDOW_S:
                total += sum(self._cells[row + _ADMITTED : row + _PROMISED])
                total -= sum(self._cells[row + _ADMITTED + second % WINDOW_S] for second in range(latest + 1, now + 1))
        return int(total)

    def _promise(self, key: ApiKey, now: int) -> int:
        """Return the first second with a free place that was not promised yet, or the last second of the window. A
        promise reserves nothing, it only delays the next promise: the first request to come is admitted."""
        admitted = [0.0] * WINDOW_S  # by the second at which they no longer count, from the next second on
        promised = [0.0] * WINDOW_S
        for row in self._rows(key):
            latest = int(self._cells[row + _LATEST])
            for ahead in range(WINDOW_S):
                second = now + 1 + ahead
                if second - WINDOW_S <= latest:
                    admitted[ahead] += self._cells[row + _ADMITTED + second % WINDOW_S]
                if second <= latest + WINDOW_S:
                    promised[ahead] += self._cells[row + _PROMISED + second % WINDOW_S]
        free = key.requests_per_minute - sum(admitted)
        places = zip(itertools.accumulate(admitted), itertools.accumulate(promised), strict=True)
        ahead = next((index for index, (left, taken) in enumerate(places) if free + left > taken), WINDOW_S - 1)
        second = now + 1 + ahead
        self._cells[self._current_row(key, now) + _PROMISED + second % WINDOW_S] += 1
        return second

    def _current_row(self, key: ApiKey, now: int) -> int:
        """Return this worker's row of the key after dropping counts older than the window."""
        row = self._own_row(key)
        latest = int(self._cells[row + _LATEST])
        for second in range(max(latest + 1, now - WINDOW_S + 1), now + 1):
            self._cells[row + _ADMITTED + second % WINDOW_S] = 0.0
            self._cells[row + _PROMISED + second % WINDOW_S] = 0.0
        self._cells[row + _LATEST] = max(latest, now)
        return row

    def _rows(self, key: ApiKey) -> list[int]:
        """Return the key's rows of all workers that have one."""
        mark = _mark(key.name)
        rows = [self._find(worker, mark) for worker in range(self._num_workers)]
        return [row for row in rows if row is not None]

    def _own_row(self, key: ApiKey) -> int:
        """Return this worker's row of the key. A new one replaces a row that counts nothing any more."""
        mark = _mark(key.name)
        if (found := self._find(self._worker, mark)) is not None:
            return found
        now = int(self._clock())
        for row in self._slab_rows(self._worker):
            cells = self._cells
            if not cells[row + _MARK] or (not cells[row + _IN_FLIGHT] and cells[row + _LATEST] <= now - WINDOW_S):
                for place in range(row + _IN_FLIGHT, row + _CELLS):
                    cells[place] = 0.0
                cells[row + _LATEST] = _LONG_AGO
                cells[row + _MARK] = mark
                return row
        raise InferEngineError("overloaded", "More keys are in use than this server counts.", retry_after_s=WINDOW_S)

    def _find(self, worker: int, mark: float) -> int | None:
        """Return a worker's row with this mark, or None. Rows are filled in order: an unused one ends the search."""
        known = self._places.get((worker, mark))
        if known is not None and self._cells[known + _MARK] == mark:
            return known
        for row in self._slab_rows(worker):
            if self._cells[row + _MARK] == mark:
                self._places[worker, mark] = row
                return row
            if not self._cells[row + _MARK]:
                break
        return None

    def _slab_rows(self, worker: int) -> range:
        return range(worker * self._slab + _CELLS, (worker + 1) * self._slab, _CELLS)


def _mark(name: str) -> float:
    """Return a hash of a name that a float holds exactly (at most 2^48), never 0."""
    return float(1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))
