"""What has news, taken together when the event loop comes round: one callback of the loop instead of one for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

SLICE_S = 0.005


class Reader(Protocol):
    """Something whose news waits to be taken."""

    def take_turn(self) -> None:
        """Take the news. Raises nothing."""


class Turn:
    """While a message of the engine is read, streams are noted; when it is done, each has its turn. A turn in which
    much is to be said is cut: connections, requests and figures come in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._is_planned = False

    def add(self, reader: Reader) -> None:
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
            reader.take_turn()
            if clock() > end_s and number < len(readers):
                self._readers = readers[number:] + self._readers
                self._plan()
                return
