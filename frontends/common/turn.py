"""What has news, taken together when the event loop comes round: one callback of the loop instead of one for each."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Reader(Protocol):
    """Something whose news waits to be taken."""

    def take_turn(self) -> None:
        """Take the news. Raises nothing."""


class Turn:
    """While a message of the engine is read, streams are noted; when it is done, each has its turn."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def add(self, reader: Reader) -> None:
        if not self._readers:
            asyncio.get_running_loop().call_soon(self._run)
        self._readers.append(reader)

    def _run(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.take_turn()
