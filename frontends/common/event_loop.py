"""How requests and streams share the event loop of a front end.

`Coalescer` batches the wake-ups of all streams into one loop callback per message of the engine. `AdmissionThrottle`
lets a few requests begin in each round of the loop, in the order of their arrival. Beginning costs more than anything
later (a template, a prompt to tokenize, a stream to open), and a thousand requests that come at once would otherwise
hold up every stream and health check for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE_S = 0.005


class Reader(Protocol):
    """Something whose news waits to be taken."""

    def take_news(self) -> None:
        """Take the news. Raises nothing."""


class Coalescer:
    """While a message of the engine is read, streams are noted; when it is done, each has its turn. A turn in which
    much is to be said is cut: connections, requests and figures come in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._is_planned = False

    def add(self, reader: Reader) -> None:
        """Have `reader.take_news` called once, in a later turn of the event loop."""
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


MOST_PER_ROUND = 4


class AdmissionThrottle:
    """Requests wait in it for their beginning."""

    def __init__(self, most_per_round: int = MOST_PER_ROUND) -> None:
        self._most = most_per_round
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_planned = False

    async def wait(self) -> None:
        """Return when it is this request's turn; at once where there is no crowd."""
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
            if not waiter.done():  # else its client has gone
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            self._plan()
