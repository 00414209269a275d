"""The output of a request as a log that any number of sockets read, each from its own place.

What a socket has sent may be lost with the connection, so tokens are kept here until nobody can ask for them again.
A reader that comes back reads the log from the start and drops the text it had: tokens alone make the text, so what
follows is exactly what was missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Protocol

from frontends.common.event_loop import Coalescer
from inferengine.client import Delta, Finish, TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Accept


class TokenStream(Protocol):
    """What a log needs of a client's Stream."""

    def on_output(self, callback: Callable[[], None]) -> None: ...

    def take(self) -> Delta: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def cancel(self) -> None: ...

    def stop(self, num_tokens: int, text: str) -> None: ...


class EngineRequest(Protocol):
    """What a log needs of a Submission or a PooledAttachment."""

    @property
    def id(self) -> bytes: ...

    @property
    def streams(self) -> Sequence[TokenStream]: ...

    async def accepted(self) -> Accept: ...

    def cancel(self) -> None: ...

    def leave(self) -> None: ...


class ChoiceLog:
    """The tokens of one choice so far. While some reader waits, what arrives is taken in the turn, for all of them."""

    def __init__(self, stream: TokenStream, coalescer: Coalescer) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish: Finish | None = None
        self._stream = stream
        self._coalescer = coalescer
        self._waiting: list[Callable[[], None]] = []
        self._is_listening = False

    def view(self, cursor: int) -> LogView:
        """A reader of its own. Its first delta ends at `cursor` exactly, unless the log ends before."""
        return LogView(self, cursor)

    def cancel(self) -> None:
        self._stream.cancel()

    def stop(self, num_tokens: int, text: str) -> None:
        """A reader found a stop string: every reader finds the same one."""
        self._stream.stop(num_tokens, text)

    @property
    def finished(self) -> bool:
        """Its end has arrived, read or not."""
        return self.finish is not None or self._stream.finished

    def when_news(self, callback: Callable[[], None]) -> None:
        """Have it called once, in the turn that takes the next news. It raises nothing. Not after the end."""
        self._waiting.append(callback)
        if not self._is_listening:
            self._is_listening = True
            self._stream.on_output(self._noted)

    def take_news(self) -> None:
        """What a stream brought becomes part of the log, and whoever waits for it is called."""
        self._is_listening = False
        self.catch_up()
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def catch_up(self) -> None:
        """Take what has arrived since."""
        if self.finish is None and (self._stream.num_tokens > len(self.token_ids) or self._stream.finished):
            delta = self._stream.take()
            self.token_ids += delta.token_ids
            if delta.logprobs is not None:
                self.logprobs = (self.logprobs or []) + delta.logprobs
            self.finish = delta.finish

    async def wait(self, num_tokens: int) -> None:
        """Until there are more than `num_tokens` tokens, or the last one is there."""
        while len(self.token_ids) <= num_tokens and self.finish is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_news(partial(_wake, waiter))
            await waiter

    async def ended(self) -> Finish:
        """How it ended, once it has."""
        while self.finish is None:
            await self.wait(len(self.token_ids))
        return self.finish

    def _noted(self) -> None:
        self._coalescer.add(self)  # the message of the engine that is being read may have more


class LogView:
    """An iterator over a ChoiceLog: each delta holds all that was added while its reader was busy."""

    def __init__(self, log: ChoiceLog, cursor: int) -> None:
        self._log = log
        self._cursor = cursor
        self._position = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        if not self.has_news:
            await self._log.wait(self._wanted)
        return self.take()

    @property
    def has_news(self) -> bool:
        """`take` gives something. Tokens up to the cursor come all at once."""
        return len(self._log.token_ids) > self._wanted or self._log.finish is not None

    @property
    def _wanted(self) -> int:
        return self._position if self._position >= self._cursor else self._cursor - 1

    def take(self) -> Delta:
        """All that is new, without waiting. Only when there is news."""
        log, start = self._log, self._position
        stop = self._cursor if start < self._cursor <= len(log.token_ids) else len(log.token_ids)
        self._position = stop
        repeats = start < self._cursor
        self._ended = log.finish is not None and not repeats
        if repeats and len(log.token_ids) < self._cursor:
            raise InferEngineError("invalid_request", f"there are only {stop} tokens", field="cursors")
        logprobs = None if log.logprobs is None else log.logprobs[start:stop]
        return Delta(log.token_ids[start:stop], "", logprobs, log.finish if self._ended else None)

    def take_one(self) -> int | None:
        """The token that is new, where it is exactly one beyond the cursor, and not the end; else None, and nothing
        was taken."""
        log, position = self._log, self._position
        if len(log.token_ids) != position + 1 or position < self._cursor or log.finish is not None:
            return None
        self._position = position + 1
        return log.token_ids[position]

    def stop(self, num_tokens: int, text: str) -> None:
        self._log.stop(num_tokens, text)


class RequestLog:
    """One request of the engine and the logs of its choices. `context_ids`: the end of the prompt, for decoders that
    look at what precedes a text. `note`: what its first reader had the engine keep with it."""

    def __init__(
        self,
        request: EngineRequest,
        coalescer: Coalescer,
        *,
        detached: bool,
        context_ids: Sequence[int] = (),
        note: bytes = b"",
    ) -> None:
        self.id = request.id
        self.note = note
        self.detached = detached
        self.context_ids = context_ids
        self.choices: list[ChoiceLog] = []
        self.num_readers = 0
        self._request = request
        self._coalescer = coalescer

    async def accepted(self) -> Accept:
        """The engine's answer; `choices` is filled afterwards. Raises InferEngineError when it was refused."""
        accept = await self._request.accepted()
        if not self.choices:  # of two that waited, the first fills it
            self.choices = [ChoiceLog(stream, self._coalescer) for stream in self._request.streams]
            self.note = accept.note if accept.attached else self.note
        return accept

    @property
    def finished(self) -> bool:
        """All choices have ended."""
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    def cancel(self) -> None:
        """Fire and forget, any number of times."""
        self._request.cancel()

    def leave(self) -> None:
        """Nobody reads it here any more. It ends unless somebody elsewhere does: another worker, another front end."""
        self._request.leave()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
