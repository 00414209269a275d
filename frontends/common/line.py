"""Requests that begin: a few in each round of the event loop, in the order of their coming.

Beginning costs more than anything later (a template, a prompt to tokenize, a stream to open). A thousand requests that
come at once would have the loop to themselves for seconds; like this the streams, the figures and whoever asks
whether the process is alive come in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST_PER_ROUND = 4


class Line:
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
