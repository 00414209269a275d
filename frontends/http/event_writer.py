"""The way of a token through a worker: from the engine's news to a socket, without a task's turn for each one.

A reader that is a task costs a future, a wake-up and the walk through every coroutine between the server and the
stream, per token: a quarter of what an event costs. So the streams that have news are noted while a message of the
engine is read, and written one after the other when it is done; a task comes in only when a socket is full, and at the
end. What a token becomes is the format's business, as everywhere.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol

from starlette.types import Message

from frontends.common.event_loop import Coalescer
from frontends.common.generation import Choice, Generation, Piece
from frontends.common.json import quote
from inferengine.client import Stream
from inferengine.errors import InferEngineError

Send = Callable[[Message], Awaitable[None]]


class EventFormat(Protocol):
    """What a relay needs of a Format."""

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after a token's text in its event, once nothing but the text differs; else None."""

    def events(self, generation: Generation, choice: Choice, pieces: list[Piece]) -> bytes: ...


class Relay:
    """Writes one choice's events into its response. `run` returns the error that ended it, or None."""

    def __init__(
        self,
        generation: Generation,
        choice: Choice,
        stream: Stream,
        format: EventFormat,
        send: Send,
        coalescer: Coalescer,
    ) -> None:
        self._generation = generation
        self._choice = choice
        self._stream = stream
        self._format = format
        self._send = send
        self._coalescer = coalescer
        self._around: tuple[bytes, bytes] | None = None
        self._last: Piece | None = None
        self._failure: BaseException | None = None
        self._blocked: Coroutine[Any, Any, None] | None = None
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> InferEngineError | None:
        """Until the choice's last piece has been written."""
        loop = asyncio.get_running_loop()
        try:
            self._listen()
            while self._last is None and self._failure is None:
                self._waiter = loop.create_future()
                await self._waiter
                if self._blocked is not None:
                    blocked, self._blocked = self._blocked, None
                    await blocked
                    if self._last is None:
                        self._listen()
        finally:
            self._left = True
        if self._failure is not None:
            raise self._failure
        return None if self._last is None else self._last.error

    def take_news(self) -> None:
        """All that has come since the last time."""
        if self._left:
            return
        try:
            body = self._read()
            if body and not self._write({"type": "http.response.body", "body": body, "more_body": True}):
                self._wake()  # the socket is full: what comes meanwhile waits in the stream
            elif self._last is None:
                self._listen()
            else:
                self._wake()
        except Exception as error:
            self._failure = error
            self._wake()

    def _read(self) -> bytes:
        choice, delta, around = self._choice, self._stream.take(), self._around
        if around is not None and delta.finish is None and len(delta.token_ids) == 1:
            text = choice.read_plain(delta.token_ids[0])
            return around[0] + quote(text) + around[1] if text else b""
        pieces = choice.read(delta, per_token=True)
        if pieces[-1].is_last:
            self._last = pieces[-1]
        body = self._format.events(self._generation, choice, pieces)
        if around is None and choice.is_plain:
            self._around = self._format.plain(choice)
        return body

    def _write(self, message: Message) -> bool:
        """Hand it to the server. False: it has to wait, and a task must see it through."""
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return True
        self._blocked = _go_on(sending, waits_for)
        return False

    def _listen(self) -> None:
        self._stream.on_output(self._has_news)

    def _has_news(self) -> None:
        self._coalescer.add(self)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


@types.coroutine
def _go_on(sending: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was begun outside of a task and now waits for something."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as error:
            try:
                waits_for = sending.throw(error)
            except StopIteration:
                return
        else:
            try:
                waits_for = sending.send(answer)
            except StopIteration:
                return
