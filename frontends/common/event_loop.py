"""A fair use of one worker's event loop.

`Coalescer` batches the wake-ups of all streams into one loop callback per message of the engine. `AdmissionThrottle`
starts a few requests in each round of the loop, in the order of their arrival. The start of a request is its most
expensive part (chat template, tokenization, opening a stream): without a limit a thousand simultaneous requests would
block all streams and health checks for seconds.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

# Of the garbage collector. Tokens make short-lived objects: the default would collect 30 times as often. What waits for
# the collector is at most three times the first number of objects, not ten times as with the default of the second.
GC_THRESHOLDS = (20_000, 2, 4)
SLICE_S = 0.005  # the longest that one callback of the coalescer may take
MOST_PER_ROUND = 4  # requests that start in one round


def collect_garbage_rarely() -> None:
    """Set the garbage collector for a server. Call it when everything that stays has been loaded.

    The objects of connections and requests are no cycles, so that the collector has little to find."""
    gc.collect()
    gc.freeze()  # what was loaded stays: no need to look through it again
    gc.collect()  # the next full one waits until a quarter of what this one leaves has been added
    gc.set_threshold(*GC_THRESHOLDS)


class NewsReader(Protocol):
    """A reader of new output."""

    def take_news(self) -> None:
        """Read the new output. Raises nothing."""


class Coalescer:
    """Collects the readers with new output and calls all in one callback of the loop, or in several of SLICE_S, so that
    connections and requests are served in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._readers: list[NewsReader] = []
        self._is_planned = False

    def add(self, reader: NewsReader) -> None:
        """Call `reader.take_news` once, in a later callback of the event loop."""
        self._readers.append(reader)
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_planned = False
        readers, self._readers = self._readers, []
        clock = self._clock
        end_s = clock() + SLICE_S
        for number, reader in enumerate(readers, 1):
            reader.take_news()
            if clock() > end_s and number < len(readers):
                self._readers = readers[number:] + self._readers
                self._plan()
                return


class AdmissionThrottle:
    """Lets at most `most_per_round` requests start in one round of the event loop."""

    def __init__(self, most_per_round: int = MOST_PER_ROUND) -> None:
        self._most = most_per_round
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_planned = False

    async def wait(self) -> None:
        """Wait until this request may start: not at all where few requests come at once."""
        self._plan()
        if self._num_begun < self._most and not self._waiting:
            self._num_begun += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._num_begun = 0
        while self._waiting and self._num_begun < self._most:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise its client has disconnected
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            self._plan()
