"""Tokenizing texts of any length while others are served: beside the event loop, a piece at a time.

A long text is tokenized piece by piece (`inferengine.text.extent`), and all of them take turns with one thread: memory
is that of one piece however many come at once, and a short prompt never waits for a long one. What cannot fit is
refused by its length, or as soon as there are too many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from inferengine.errors import InferEngineError
from inferengine.heap import give_back
from inferengine.text import Tokenizer
from inferengine.text.extent import PIECE_CHARACTERS

MEDIUM_AT_ONCE = 4  # texts of one piece
MOST_WAITING_CHARACTERS = 64 * 1024 * 1024
BUSY_S = 5.0


class TooManyTokens(Exception):
    """More than were asked for."""

    def __init__(self, least: int) -> None:
        """`least`: how many there are at least."""
        super().__init__(f"at least {least} tokens")
        self.least = least


class LongTexts:
    """Those of one event loop."""

    def __init__(self) -> None:
        self._medium = asyncio.Semaphore(MEDIUM_AT_ONCE)
        self._turn = asyncio.Lock()
        self._num_characters = 0

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, *, most: int, last: int | None = None
    ) -> list[int]:
        """Token ids of a text; with `last` at least so many from its end, where there are more. Raises TooManyTokens
        when these are more than `most`, and `overloaded`."""
        takes_end = last is not None and last <= most
        if not takes_end and (least := tokenizer.least_tokens(text)) > most:
            raise TooManyTokens(least)
        if len(text) <= PIECE_CHARACTERS:
            async with self._medium:
                ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
            if len(ids) > most and not takes_end:
                raise TooManyTokens(len(ids))
            return ids
        if self._num_characters and self._num_characters + len(text) > MOST_WAITING_CHARACTERS:
            raise InferEngineError("overloaded", "Too many long texts are being tokenized.", retry_after_s=BUSY_S)
        self._num_characters += len(text)
        try:
            if takes_end:
                parts = await self._collect(tokenizer.last_parts(text, add_special_tokens), stop_at=last)
                parts.reverse()
            else:
                parts = await self._collect(tokenizer.parts(text, add_special_tokens), most=most)
        finally:
            self._num_characters -= len(text)
        ids = [token_id for part in parts for token_id in part]
        del parts
        if not self._num_characters:
            await asyncio.to_thread(give_back)
        return ids

    async def _collect(
        self, parts: Iterator[list[int]], *, stop_at: int | None = None, most: int | None = None
    ) -> list[list[int]]:
        found: list[list[int]] = []
        count = 0
        while stop_at is None or count < stop_at:
            async with self._turn:
                part = await asyncio.to_thread(next, parts, None)
            if part is None:
                break
            found.append(part)
            count += len(part)
            if most is not None and count > most:
                raise TooManyTokens(count)
        return found
