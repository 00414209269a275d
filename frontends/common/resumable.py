"""Requests that several connections can read, each from its own position, and resume after a reconnect.

Sent output may be lost with its connection, so the tokens of a request are kept in a log while a client can resume. A
reader that resumes reads the log from the start and drops the text that it had. The text depends on the tokens alone,
so the rest is exactly the missed text.

`Registry` has the logs of this process. A request that is not detached ends with its last reader, in whichever process;
the engine knows all readers. A detached request continues for the resume window without a reader. After that a
websocket front end cancels it (the page was closed), and an HTTP front end lets it finish (it is a background job) and
keeps it for another window.

`RequestMetadata` is stored by the engine with a request, so that any front end can resume it: the tenant and, for HTTP,
the request itself. The same request and tokens make the same events again. The engine does not read it. Any client of
the wire can write it, so it is read as untrusted input.
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
from inferengine.client.client import wake
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import MAX_NOTE_BYTES, Accept


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
    """The tokens of one choice so far. While a reader waits, new output is taken in the coalescer's callback, once for
    all readers."""

    def __init__(self, stream: TokenStream, coalescer: Coalescer) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish: Finish | None = None
        self._stream = stream
        self._coalescer = coalescer
        self._waiting: list[Callable[[], None]] = []
        self._is_listening = False

    def view(self, cursor: int, most: int) -> LogView:
        """Return a new reader. One of its deltas ends exactly at `cursor`, unless the log ends before. `most`: values
        in one delta that take the reader a few milliseconds."""
        return LogView(self, cursor, most)

    def cancel(self) -> None:
        """Cancel this choice, for all readers, without waiting for the engine."""
        self._stream.cancel()

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at a stop string that a reader found. Every reader finds the same one."""
        self._stream.stop(num_tokens, text)

    @property
    def finished(self) -> bool:
        """Whether the end has arrived, read or not."""
        return self.finish is not None or self._stream.finished

    def when_news(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the next output has been taken. It must not raise. Do not use it after the end."""
        self._waiting.append(callback)
        if not self._is_listening:
            self._is_listening = True
            self._stream.on_output(self._on_stream_output)

    def take_news(self) -> None:
        """Take new output into the log and call those who wait for it."""
        self._is_listening = False
        self.catch_up()
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def catch_up(self) -> None:
        """Take new output into the log."""
        if self.finish is None and (self._stream.num_tokens > len(self.token_ids) or self._stream.finished):
            delta = self._stream.take()
            self.token_ids += delta.token_ids
            if delta.logprobs is not None:
                self.logprobs = (self.logprobs or []) + delta.logprobs
            self.finish = delta.finish

    async def wait(self, num_tokens: int) -> None:
        """Wait until there are more than `num_tokens` tokens, or the choice has ended."""
        while len(self.token_ids) <= num_tokens and self.finish is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_news(partial(wake, waiter))
            await waiter

    async def ended(self) -> Finish:
        """Wait for the end of the choice and return it."""
        while self.finish is None:
            await self.wait(len(self.token_ids))
        return self.finish

    def _on_stream_output(self) -> None:
        self._coalescer.add(self)  # later, because the engine's message may have more


class LogView:
    """An iterator over a ChoiceLog. Each delta has all output since the last one, or the next `most` values of it,
    tokens and their log-probabilities: a reader that has a long output before it lets the event loop serve others
    between two deltas."""

    def __init__(self, log: ChoiceLog, cursor: int, most: int) -> None:
        self._log = log
        self._cursor = cursor
        self._most = most
        self._position = 0
        self._ended = False
        self._is_cut = False  # the last delta had not all output

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        if self._is_cut:
            await asyncio.sleep(0)
        if not self.has_news:
            await self._log.wait(self._wanted)
        return self.take()

    @property
    def has_news(self) -> bool:
        """Whether `take` returns something. Before the cursor it does once all tokens up to there have come."""
        return len(self._log.token_ids) > self._wanted or self._log.finish is not None

    @property
    def _wanted(self) -> int:
        return self._position if self._position >= self._cursor else self._cursor - 1

    def take(self) -> Delta:
        """Return the next output without waiting. Call only when `has_news`. Raises InferEngineError naming `cursors`
        for a cursor beyond the end."""
        log, start = self._log, self._position
        repeats, end = start < self._cursor, len(log.token_ids)
        if repeats and end < self._cursor:
            raise InferEngineError("invalid_request", f"there are only {end} tokens", field="cursors")
        rows = log.logprobs
        most = self._most if not rows else max(1, self._most // (1 + len(rows[-1].top_ids)))
        stop = min(self._cursor if repeats else end, start + most)
        self._position = stop
        self._is_cut = stop < end
        self._ended = log.finish is not None and not repeats and stop == end
        logprobs = None if rows is None else rows[start:stop]
        return Delta(log.token_ids[start:stop], "", logprobs, log.finish if self._ended else None)

    def take_one(self) -> int | None:
        """Return the new token if it is exactly one, beyond the cursor and not the end; else None, and take nothing."""
        log, position = self._log, self._position
        if len(log.token_ids) != position + 1 or position < self._cursor or log.finish is not None:
            return None
        self._position = position + 1
        return log.token_ids[position]

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice, for all readers, at the stop string `text`, after `num_tokens` tokens."""
        self._log.stop(num_tokens, text)


class RequestLog:
    """One request of the engine and the logs of its choices. `context_ids`: the end of the prompt, for decoders whose
    text depends on it. `note`: the RequestMetadata, packed."""

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
        """Wait for the engine's ACCEPT, then set `choices`. Raises InferEngineError when the request was refused."""
        accept = await self._request.accepted()
        if not self.choices:  # two readers may wait: the first one sets it
            self.choices = [ChoiceLog(stream, self._coalescer) for stream in self._request.streams]
            self.note = accept.note if accept.attached else self.note
        return accept

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return bool(self.choices) and all(choice.finished for choice in self.choices)

    def cancel(self) -> None:
        """Cancel the request without waiting for the engine. Idempotent."""
        self._request.cancel()

    def leave(self) -> None:
        """Stop reading in this process. The request ends unless another worker or front end reads it."""
        self._request.leave()


class ResumableEngine(Protocol):
    """What Registry needs of an AsyncClient or EnginePool."""

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> EngineRequest:
        """Submit one prompt, given as token ids or as one of `arguments`."""
        ...

    def attach(self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1) -> EngineRequest:
        """Resume a request from `cursors`, the number of tokens already received of each of its `n` choices."""
        ...


class Registry:
    """Request logs by id. Call `leave` once for each `submit` and `resume`."""

    def __init__(self, engine: ResumableEngine, resume_window_s: float, *, cancel_unread: bool = True) -> None:
        """`cancel_unread`: cancel a request without a reader for the resume window; false: keep it until it ends."""
        self.resume_window_s = resume_window_s
        self._cancel_unread = cancel_unread
        self._engine = engine
        self._coalescer = Coalescer()
        self._logs: dict[bytes, RequestLog] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    def __contains__(self, request_id: bytes) -> bool:
        """Return whether this process reads the request, or lately did."""
        return request_id in self._logs

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
        """Start a request, or read the one with the same id from its start."""
        log = self._logs.get(request_id) if request_id is not None else None
        if log is None:
            request = self._engine.submit(prompt_ids, params, request_id=request_id, detached=detached, **arguments)
            note = arguments.get("note", b"")
            log = RequestLog(request, self._coalescer, detached=detached, context_ids=context_ids, note=note)
        return self._read(log)

    def resume(self, request_id: bytes, n: int, *, detached: bool, context_ids: Sequence[int]) -> RequestLog:
        """Read a request that this process or another one started. `detached` is used where this process does not know
        the request; it may be changed after the client's right to read it has been checked."""
        log = self._logs.get(request_id)
        if log is None:
            log = RequestLog(
                self._engine.attach(request_id, (), n), self._coalescer, detached=detached, context_ids=context_ids
            )
        return self._read(log)

    def leave(self, log: RequestLog, *, forget: bool = False) -> None:
        """Stop reading. `forget`: the engine refused the request, so that there is nothing to resume."""
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
    """The tenant of a request, and `path`, `label` and `body` of the HTTP request, empty for others. `created`: Unix
    time in seconds. `zipped`: `body` is compressed."""

    tenant: str = ""
    path: str = ""
    label: str = ""
    created: int = 0
    body: bytes = b""
    zipped: bool = False

    def request_body(self, most_bytes: int) -> bytes:
        """Return the HTTP request's body; empty if it has more than `most_bytes` or is invalid."""
        if not self.zipped:
            return self.body if len(self.body) <= most_bytes else b""
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(self.body, most_bytes)
        except zlib.error:
            return b""
        return body if unpacker.eof else b""


def pack_metadata(metadata: RequestMetadata) -> bytes:
    """Pack metadata for the engine. A body that is too large is left out: the request can then be resumed only by
    sending it again."""
    body, zipped = metadata.body, len(metadata.body) > COMPRESS_ABOVE_BYTES
    if zipped:
        body = zlib.compress(body, 1)
    whole = msgpack.packb([VERSION, metadata.tenant, metadata.path, metadata.label, metadata.created, zipped, body])
    if len(whole) > MAX_NOTE_BYTES:
        whole = msgpack.packb([VERSION, metadata.tenant, "", metadata.label, metadata.created, False, b""])
    return bytes(whole)


def unpack_metadata(data: bytes) -> RequestMetadata:
    """Unpack metadata. Data of another version or from other programs gives empty metadata."""
    try:
        version, tenant, path, label, created, zipped, body = msgpack.unpackb(data, strict_map_key=True)
        if version != VERSION or not all(isinstance(text, str) for text in (tenant, path, label)):
            return RequestMetadata()
        return RequestMetadata(tenant, path, label, int(created), bytes(body), bool(zipped))
    except (ValueError, TypeError, msgpack.UnpackException):
        return RequestMetadata()
