"""Detached requests: they outlive their connection, and any front end can resume their streams.

A stream has an id of 128 bits, that of its (first) request in the engine. Each event carries `id: <stream>:<position>`,
where the position has the number of tokens of every choice up to and including that event. To resume, the front end
runs the request's format over the engine's log from the first token on, which makes the same events again, and sends
only those that the client does not have.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from frontends.common.auth import ApiKey
from frontends.common.generation import MOST_AS_PIECES, ChoiceOutput, Piece, RequestOutput
from frontends.common.resumable import LogView, Registry, RequestLog, RequestMetadata, pack_metadata, unpack_metadata
from inferengine.client import Delta, Finish
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import ID_BYTES, Accept

_POSITION = re.compile(r"([0-9a-f]{32}):(\d{1,9}e?(?:,\d{1,9}e?)*)")
_END = "e"  # after a choice's number of tokens: the client has its end, too


class Position(NamedTuple):
    """What a client has received of a stream: the number of tokens of each choice, and which choices' ends."""

    tokens: tuple[int, ...] = ()
    ended: tuple[bool, ...] = ()

    def of(self, choice: int) -> tuple[int, bool]:
        """Return how many tokens of a choice the client has, and whether it has the choice's end."""
        return (self.tokens[choice], self.ended[choice]) if choice < len(self.tokens) else (0, False)


class StreamState:
    """The stream that a request starts or resumes. Kept in the ASGI scope while the request is answered."""

    def __init__(self, stream_id: bytes, position: Position) -> None:
        self.id = stream_id
        self.position = position

    def request_id(self, prompt: int) -> bytes:
        """Return the engine's id of a prompt's request: the stream's id for prompt 0, else an id derived from it."""
        if prompt == 0:
            return self.id
        return hashlib.sha256(self.id + prompt.to_bytes(4, "big")).digest()[:ID_BYTES]


def new_stream(chosen: str | None, last_event_id: str | None) -> StreamState:
    """Make the state of a new or resumed stream. `chosen`: the client's own id, 32 hexadecimal digits; None: random."""
    if chosen is None:
        return StreamState(secrets.token_bytes(ID_BYTES), Position())
    return StreamState(read_stream_id(chosen), read_position(last_event_id, chosen))


def read_stream_id(text: str) -> bytes:
    """Return the bytes of a stream id given in hexadecimal. Raises InvalidRequest naming `x-stream-id`."""
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise InvalidRequest("x-stream-id", "must be 32 hexadecimal digits in lower case, chosen at random")
    return bytes.fromhex(text)


def read_position(last_event_id: str | None, stream_id: str) -> Position:
    """Read the position in a Last-Event-ID header; without one it is the beginning of the stream. Raises InvalidRequest
    for an id of another stream or of none."""
    if not last_event_id:
        return Position()
    found = _POSITION.fullmatch(last_event_id)
    if found is None:
        raise InvalidRequest("Last-Event-ID", "must be the id of an event of this stream")
    if found[1] != stream_id:
        raise InvalidRequest("Last-Event-ID", "is an event of another stream")
    marks = found[2].split(",")
    return Position(tuple(int(mark.rstrip(_END)) for mark in marks), tuple(mark.endswith(_END) for mark in marks))


class Events(Protocol):
    """The part of Format that StreamReader uses."""

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces."""


class StreamReader:
    """Adds ids to a stream's events, and leaves out the events that the client has."""

    def __init__(self, state: StreamState, num_choices: int) -> None:
        self._seen = state.position
        self._head = f"id: {state.id.hex()}:".encode()
        self._marks = [_mark(*self._seen.of(choice)) for choice in range(num_choices)]

    def events(self, format: Events, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Return the events to send for these pieces.

        The format gets all pieces, also those that the client has: it may hold text back until a later piece.
        """
        parts = []
        num_seen, end_seen = self._seen.of(choice.index)
        for piece in pieces:
            body = format.events(generation, choice, [piece])
            if end_seen or (piece.num_tokens <= num_seen and not piece.is_last):
                continue
            self._marks[choice.index] = _mark(piece.num_tokens, piece.is_last)
            if body:
                parts.append(self._with_id(body))
        return b"".join(parts)

    def _with_id(self, body: bytes) -> bytes:
        """Add the id to the last event only: a client that is cut off before it gets the whole piece again."""
        start = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
        return b"".join((body[:start], self._head, b",".join(self._marks), b"\n", body[start:]))


class LoggedStream:
    """An iterator over one choice's log, which other connections may read, too."""

    def __init__(self, submission: LoggedSubmission, choice: int, cursor: int) -> None:
        self._submission: LoggedSubmission = weakref.proxy(submission)  # it holds this stream, and outlives it
        self._choice = choice
        self._cursor = cursor
        self._view: LogView | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._is_abandoned = False  # and the end has been returned

    def __aiter__(self) -> LoggedStream:
        return self

    async def __anext__(self) -> Delta:
        if (error := self._submission.abandoned) is not None:
            return self._end(error)
        if self._view is None:
            await self._submission.accepted()
            self._view = self._submission.log.choices[self._choice].view(self._cursor, MOST_AS_PIECES)
        self._reader = asyncio.current_task()
        try:
            return await self._view.__anext__()
        except asyncio.CancelledError:
            error = self._submission.abandoned
            if error is None or self._reader is None or self._reader.uncancel() > 0:
                raise
            return self._end(error)
        finally:
            self._reader = None

    def _end(self, error: InferEngineError) -> Delta:
        """Return the end of an abandoned submission. Only once: an endless iterator would block the event loop."""
        if self._is_abandoned:
            raise StopAsyncIteration
        self._is_abandoned = True
        return Delta([], "", None, Finish("error", [error.code, error.message], 0, 0, 0, 0.0, 0.0, 0.0))

    def interrupt(self) -> None:
        """Wake a reader that waits, because the submission was abandoned."""
        if self._reader is not None:
            self._reader.cancel()

    def stop(self, num_tokens: int, text: str) -> None:
        """End the choice at a stop string that a reader found. Every reader finds the same one."""
        log = self._submission.log
        if self._choice < len(log.choices):
            log.choices[self._choice].stop(num_tokens, text)


class LoggedSubmission:
    """Reads a detached request for one connection. Abandoning it leaves the request running."""

    def __init__(
        self, registry: Registry, log: RequestLog, state: StreamState, first: int, n: int, tenant: str
    ) -> None:
        """`first`: index of the request's first choice in the stream. `n`: its number of choices."""
        self.log = log
        self.abandoned: InferEngineError | None = None
        self.streams = [LoggedStream(self, place, state.position.of(first + place)[0]) for place in range(n)]
        self._registry = registry
        self._tenant = tenant
        self._left = False

    @property
    def id(self) -> bytes:
        """The engine's id of the request."""
        return self.log.id

    async def accepted(self) -> Accept:
        """Wait for the engine's ACCEPT. Raises its refusal, and not_found for a request of another tenant."""
        try:
            accept = await self.log.accepted()
        except InferEngineError:
            self._leave(forget=True)
            raise
        if unpack_metadata(self.log.note).tenant != self._tenant:
            self.abandoned = InferEngineError("not_found", "There is no such stream.")
            self._leave()
        if self.abandoned is not None:
            raise self.abandoned
        return accept

    def cancel(self) -> None:
        """Cancel the request in the engine, unless only this connection was lost."""
        if self.abandoned is None:
            self.log.cancel()
        self._leave()

    def abandon(self, error: InferEngineError) -> None:
        """Stop reading; the request goes on. This reader's streams end with `error`."""
        if self.abandoned is None:
            self.abandoned = error
            for stream in self.streams:
                stream.interrupt()
        self._leave()

    def _leave(self, *, forget: bool = False) -> None:
        if not self._left:
            self._left = True
            self._registry.leave(self.log, forget=forget)


def _mark(num_tokens: int, ended: bool) -> bytes:
    return b"%de" % num_tokens if ended else b"%d" % num_tokens


class LogSubmitter:
    """Submits the prompts of a detached request, or resumes it, through logs that other connections may read, too."""

    def __init__(
        self,
        registry: Registry,
        state: StreamState,
        key: ApiKey,
        metadata: RequestMetadata | None,
        adapter: str,
        *,
        session: str = "",
        share: tuple[str, ...] = (),
    ) -> None:
        """`metadata`: what to store with the request; None: resume a request that exists. `session`: for requests
        without one. `share`: see `frontends.common.shares`."""
        self._registry = registry
        self._state = state
        self._key = key
        self._metadata = metadata
        self._adapter = adapter
        self._session = session
        self._share = share
        self._num_prompts = self._num_choices = 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **arguments: Any) -> LoggedSubmission:
        """Submit, or resume, the next prompt of the request."""
        arguments |= {"session": arguments.get("session") or self._session, "share": self._share}
        request_id, n = self._state.request_id(self._num_prompts), params.n
        if self._metadata is None:
            log = self._registry.resume(request_id, n, detached=True, context_ids=())
        else:
            log = self._registry.submit(
                prompt_ids,
                params,
                request_id=request_id,
                detached=True,
                context_ids=(),
                note=pack_metadata(self._metadata),
                **self._key.restrict(arguments, self._adapter),
            )
        submission = LoggedSubmission(self._registry, log, self._state, self._num_choices, n, self._key.tenant)
        self._num_prompts += 1
        self._num_choices += n
        return submission
