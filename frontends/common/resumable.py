"""Requests that any number of connections read, each from its own place, and that can be read on after a reconnect.

What a connection has sent may be lost with it, so the tokens of a request are kept in a log until nobody can ask for
them again. A reader that comes back reads the log from the start and drops the text it had: tokens alone make the text,
so what follows is exactly what was missed.

`Registry` knows the logs of this process and how long one stays that nobody reads. A request that is not detached ends
with its last reader, those of other processes included: the engine knows them. A detached one goes on for the resume
window, in which its client may come back. Then the front end decides: a page closed for good must not keep the engine
busy, while a job sent over HTTP runs to its end and is kept for the resume window from there.

`RequestMetadata` is what a front end has the engine keep with a request, so that any other front end can read it on:
whose request it is and, for HTTP, the request itself. Replayed, it makes the same events from the same tokens. The
engine never looks inside. Any client of the wire could have written it, so reading it trusts nothing.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgpack

from frontends.common.event_loop import Coalescer
from inferengine.client import Delta, Finish, TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.codec import MAX_NOTE_BYTES
from inferengine.wire.messages import Accept


class TokenStream(Protocol):
    """What a log needs of a client's Stream."""

    def on_output(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when there is something to take; at once if there is."""
        ...

    def take(self) -> Delta:
        """Return all unread output without waiting."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens received so far."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the end has arrived, read or not."""
        ...

    def cancel(self) -> None:
        """Cancel this choice without waiting for the engine."""
        ...

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at the stop string `text`, after `num_tokens` tokens."""
        ...


class EngineRequest(Protocol):
    """What a log needs of a Submission or a PooledAttachment."""

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes."""
        ...

    @property
    def streams(self) -> Sequence[TokenStream]:
        """One stream for each choice; read it after `accepted`."""
        ...

    async def accepted(self) -> Accept:
        """Wait for the engine's ACCEPT. Raises InferEngineError when the request was refused."""
        ...

    def cancel(self) -> None:
        """Cancel every choice without waiting for the engine."""
        ...

    def leave(self) -> None:
        """Stop reading; the request ends unless another client reads it."""
        ...


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
        """Cancel this choice, for all readers, without waiting for the engine."""
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
        """End the choice, for all readers, at the stop string `text`, after `num_tokens` tokens."""
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


class ResumableEngine(Protocol):
    """What the registry needs of an AsyncClient or EnginePool."""

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> EngineRequest:
        """Submit one prompt, given as token ids or as one of `arguments`."""
        ...

    def attach(self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1) -> EngineRequest:
        """Read a request on from `cursors`, the tokens already held of each of its `n` choices."""
        ...


class Registry:
    """Request logs by id. Whoever opens one reads it, and must leave it."""

    def __init__(self, engine: ResumableEngine, resume_window_s: float, *, cancel_unread: bool = True) -> None:
        """`cancel_unread`: what nobody reads for the resume window is cancelled, not only forgotten once it ended."""
        self.resume_window_s = resume_window_s
        self._cancel_unread = cancel_unread
        self._engine = engine
        self._coalescer = Coalescer()
        self._logs: dict[bytes, RequestLog] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: bytes | None,
        detached: bool,
        context_ids: Sequence[int],
        **arguments: Any,
    ) -> RequestLog:
        """Start a request; an id that is known already is read from its start instead."""
        log = self._logs.get(request_id) if request_id is not None else None
        if log is None:
            request = self._engine.submit(prompt_ids, params, request_id=request_id, detached=detached, **arguments)
            note = arguments.get("note", b"")
            log = RequestLog(request, self._coalescer, detached=detached, context_ids=context_ids, note=note)
        return self._read(log)

    def resume(self, request_id: bytes, n: int, *, detached: bool, context_ids: Sequence[int]) -> RequestLog:
        """Read a request that this process, another one or another client started. `detached` holds where it was not
        known here: whoever may read it can change it afterwards."""
        log = self._logs.get(request_id)
        if log is None:
            log = RequestLog(
                self._engine.attach(request_id, (), n), self._coalescer, detached=detached, context_ids=context_ids
            )
        return self._read(log)

    def leave(self, log: RequestLog, *, forget: bool = False) -> None:
        """One reader fewer. `forget`: the engine refused it, so nobody can read it."""
        log.num_readers -= 1
        if log.num_readers:
            return
        if forget or not log.detached:
            self._end(log)
        else:
            self._end_later(log)

    def close(self) -> None:
        """Cancel the timers that end unread requests. The requests themselves go on."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _read(self, log: RequestLog) -> RequestLog:
        self._logs[log.id] = log
        log.num_readers += 1
        if (timer := self._timers.pop(log.id, None)) is not None:
            timer.cancel()
        return log

    def _end_later(self, log: RequestLog) -> None:
        self._timers[log.id] = asyncio.get_running_loop().call_later(self.resume_window_s, self._end_unread, log)

    def _end_unread(self, log: RequestLog) -> None:
        if self._cancel_unread or log.finished:
            self._end(log)
        else:
            self._end_later(log)

    def _end(self, log: RequestLog) -> None:
        self._timers.pop(log.id, None)
        self._logs.pop(log.id, None)
        try:
            log.leave()  # without effect on what has finished
        except InferEngineError:  # the client was closed meanwhile
            return


VERSION = 1
COMPRESS_ABOVE_BYTES = 1024


class RequestMetadata(NamedTuple):
    """`path`, `label` and `body` of the HTTP request; empty where there was none. `created`: Unix time in seconds.
    `zipped`: `body` is compressed, as it travels."""

    tenant: str = ""
    path: str = ""
    label: str = ""
    created: int = 0
    body: bytes = b""
    zipped: bool = False

    def request_body(self, most_bytes: int) -> bytes:
        """The HTTP request's body; empty where it has more than `most_bytes` or is broken."""
        if not self.zipped:
            return self.body if len(self.body) <= most_bytes else b""
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(self.body, most_bytes)
        except zlib.error:
            return b""
        return body if unpacker.eof else b""


def pack_metadata(note: RequestMetadata) -> bytes:
    """As bytes for the engine. A body too large to be kept is left out: the request can then be read on only by
    sending it again."""
    body, zipped = note.body, len(note.body) > COMPRESS_ABOVE_BYTES
    if zipped:
        body = zlib.compress(body, 1)
    whole = msgpack.packb([VERSION, note.tenant, note.path, note.label, note.created, zipped, body])
    if len(whole) > MAX_NOTE_BYTES:
        whole = msgpack.packb([VERSION, note.tenant, "", note.label, note.created, False, b""])
    return bytes(whole)


def unpack_metadata(data: bytes) -> RequestMetadata:
    """The inverse. What no front end of this version wrote is an empty note."""
    try:
        version, tenant, path, label, created, zipped, body = msgpack.unpackb(data, strict_map_key=True)
        if version != VERSION or not all(isinstance(text, str) for text in (tenant, path, label)):
            return RequestMetadata()
        return RequestMetadata(tenant, path, label, int(created), bytes(body), bool(zipped))
    except (ValueError, TypeError, msgpack.UnpackException):
        return RequestMetadata()
