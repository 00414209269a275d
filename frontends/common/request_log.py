"""The output of a request as a log that any number of sockets read, each from its own place.

What a socket has sent may be lost with the connection, so tokens are kept here until nobody can ask for them again.
A reader that comes back reads the log from the start and drops the text it had: tokens alone make the text, so what
follows is exactly what was missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from inferengine.client import Delta, Finish, TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Accept

Brake = Callable[[], Awaitable[None] | None]  # None: go on at once


class TokenStream(Protocol):
    """What a log needs of a client's Stream."""

    async def __anext__(self) -> Delta: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def cancel(self) -> None: ...


class EngineRequest(Protocol):
    """What a log needs of a Submission or a PooledAttachment."""

    @property
    def id(self) -> bytes: ...

    @property
    def streams(self) -> Sequence[TokenStream]: ...

    async def accepted(self) -> Accept: ...

    def cancel(self) -> None: ...


class ChoiceLog:
    """The tokens of one choice so far. The reader that finds nothing new reads the stream for all of them."""

    def __init__(self, stream: TokenStream) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish: Finish | None = None
        self._stream = stream
        self._being_read = False
        self._was_read: asyncio.Event | None = None  # for further readers, while there are any

    def view(self, cursor: int, brake: Brake) -> LogView:
        """A reader of its own. Its first delta ends at `cursor` exactly, unless the log ends before. `brake` is
        asked between news and reading it, so that a reader who is held up gets all that came meanwhile."""
        return LogView(self, cursor, brake)

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def finished(self) -> bool:
        """Its end has arrived, read or not."""
        return self.finish is not None or self._stream.finished

    async def wait(self, num_tokens: int) -> None:
        """Until there are more than `num_tokens` tokens, or the last one is there."""
        while len(self.token_ids) <= num_tokens and self.finish is None:
            if self._being_read:
                if self._was_read is None:
                    self._was_read = asyncio.Event()
                await self._was_read.wait()
                continue
            self._being_read = True
            try:
                self._append(await self._stream.__anext__())
            finally:  # a reader whose socket has gone leaves the stream to the next
                self._being_read = False
                if self._was_read is not None:
                    self._was_read.set()
                    self._was_read = None

    async def catch_up(self) -> None:
        """Take what has arrived since. Does not wait."""
        stream = self._stream
        has_news = stream.num_tokens > len(self.token_ids) or stream.finished
        if has_news and not self._being_read and self.finish is None:
            self._append(await stream.__anext__())

    async def ended(self) -> Finish:
        """How it ended, once it has."""
        while self.finish is None:
            await self.wait(len(self.token_ids))
        return self.finish

    def _append(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish = delta.finish


class LogView:
    """An iterator over a ChoiceLog: each delta holds all that was added while its reader was busy."""

    def __init__(self, log: ChoiceLog, cursor: int, brake: Brake) -> None:
        self._log = log
        self._cursor = cursor
        self._brake = brake
        self._position = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        log, start = self._log, self._position
        if self._ended:
            raise StopAsyncIteration
        wanted = start if start >= self._cursor else self._cursor - 1
        if len(log.token_ids) <= wanted and log.finish is None:
            await log.wait(wanted)
        held = self._brake()
        if held is not None:
            await held
            await log.catch_up()
        stop = self._cursor if start < self._cursor <= len(log.token_ids) else len(log.token_ids)
        self._position = stop
        repeats = start < self._cursor
        self._ended = log.finish is not None and not repeats
        if repeats and len(log.token_ids) < self._cursor:
            raise InferEngineError("invalid_request", f"there are only {stop} tokens", field="cursors")
        logprobs = None if log.logprobs is None else log.logprobs[start:stop]
        return Delta(log.token_ids[start:stop], "", logprobs, log.finish if self._ended else None)

    def cancel(self) -> None:
        self._log.cancel()


class RequestLog:
    """One request of the engine and the logs of its choices. `context_ids`: the end of the prompt, for decoders that
    look at what precedes a text. `note`: what its first reader had the engine keep with it."""

    def __init__(
        self, request: EngineRequest, *, detached: bool, context_ids: Sequence[int] = (), note: bytes = b""
    ) -> None:
        self.id = request.id
        self.note = note
        self.detached = detached
        self.context_ids = context_ids
        self.choices: list[ChoiceLog] = []
        self.num_readers = 0
        self._request = request

    async def accepted(self) -> Accept:
        """The engine's answer; `choices` is filled afterwards. Raises InferEngineError when it was refused."""
        accept = await self._request.accepted()
        if not self.choices:  # of two that waited, the first fills it
            self.choices = [ChoiceLog(stream) for stream in self._request.streams]
            self.note = accept.note if accept.attached else self.note
        return accept

    @property
    def finished(self) -> bool:
        """All choices have ended."""
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    def cancel(self) -> None:
        """Fire and forget, any number of times."""
        self._request.cancel()
