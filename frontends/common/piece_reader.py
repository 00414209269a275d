"""Gives what a client sends to a parser in pieces, between which the event loop serves others.

A read may bring 256 KiB. As whole requests or prompts they are parsed in a moment; as 43,000 empty websocket frames,
50,000 header lines or 8,000 requests one behind the other they take 0.2 to 0.8 s, in which this worker serves nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PIECE = 4096  # bytes: of the smallest frames or header lines 1 to 5 ms
TURN_S = 0.001  # beyond which the next piece waits for another turn of the event loop


class PieceReader:
    """What a connection has received and its parser has not had yet. While something is left nothing is read."""

    def __init__(self, parse: Callable[[bytes], None], may_parse: Callable[[], bool]) -> None:
        """`parse` takes a piece. `may_parse`: whether there is room for what the next one may bring; where that changes
        to yes, `go_on` has to be called."""
        self._parse, self._may_parse = parse, may_parse
        self._transport: asyncio.Transport | None = None
        self._data, self._place = b"", 0  # what has come, and where its rest begins
        self._is_due = False  # whether the next piece will be parsed

    def begin(self, transport: asyncio.Transport) -> None:
        """Read from this transport."""
        self._transport = transport

    def take(self, data: bytes) -> None:
        """Parse what has come, or the first pieces of it."""
        if self._data:  # of a read that was on its way
            self._data, self._place = self._data[self._place :] + data, 0
        else:
            self._data = data
            self._take_pieces()

    def go_on(self) -> None:
        """Parse the next pieces soon, or read, if there is room."""
        if self._transport is None or self._transport.is_closing() or not self._may_parse():
            return
        if not self._data:
            self._transport.resume_reading()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def end(self) -> None:
        """Parse no more, and refer to nothing: a cycle would be memory that only the collector frees."""
        self._data, self._place, self._transport = b"", 0, None
        self._parse, self._may_parse = _ignore, _never

    def _take_turn(self) -> None:
        self._is_due = False
        if self._data and self._may_parse():
            self._take_pieces()
            if not self._data:
                self.go_on()

    def _take_pieces(self) -> None:
        """Parse pieces until the turn is over, or there is no room."""
        end = time.perf_counter() + TURN_S
        while self._data:
            piece = self._data[self._place : self._place + PIECE]
            self._place += PIECE
            if self._place >= len(self._data):
                self._data, self._place = b"", 0
            self._parse(piece)
            if self._transport is None or self._transport.is_closing():
                self._data, self._place = b"", 0
            elif self._data and (time.perf_counter() >= end or not self._may_parse()):
                break
        if self._data and self._transport is not None:
            self._transport.pause_reading()
            self.go_on()


def _ignore(_: bytes) -> None:
    """Parse nothing."""


def _never() -> bool:
    return False
