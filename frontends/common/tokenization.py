"""Tokenizing texts of any length while others are served: beside the event loop, a piece at a time.

A long text is tokenized piece by piece (`inferengine.text.token_bounds`), and all of them take turns with one
thread: memory
is that of one piece however many come at once, and a short prompt never waits for a long one. What cannot fit is
refused by its length, or as soon as there are too many tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Sequence

from inferengine.errors import InferEngineError
from inferengine.process.system import give_back
from inferengine.text import Tokenizer
from inferengine.text.token_bounds import PIECE_CHARACTERS

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
    ) -> Sequence[int]:
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
            return await self._in_turns(tokenizer, text, add_special_tokens, most, last if takes_end else None)
        finally:
            self._num_characters -= len(text)
            if not self._num_characters:
                asyncio.get_running_loop().run_in_executor(None, give_back)

    async def _in_turns(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int, last: int | None
    ) -> Sequence[int]:
        """A part at a time, until there are `last` tokens, or too many."""
        source = tokenizer.parts if last is None else tokenizer.last_parts
        parts = _packed(source(text, add_special_tokens))
        found: list[array[int]] = []
        count = 0
        while last is None or count < last:
            async with self._turn:
                part = await asyncio.to_thread(next, parts, None)
            if part is None:
                break
            found.append(part)
            count += len(part)
            if last is None and count > most:
                raise TooManyTokens(count)
        if last is not None:
            found.reverse()
        ids = array("I")
        for part in found:
            ids.extend(part)
        return ids


def _packed(parts: Iterable[list[int]]) -> Iterator[array[int]]:
    """Four bytes a token: a list takes nine times as many."""
    return (array("I", part) for part in parts)
