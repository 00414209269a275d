"""A generation as an HTTP answer: one document, or Server-Sent Events; cancelled when the client goes away.

sse-starlette gives a stream its headers. `RunningCall` watches for the client's leaving and ends the generation, which
ends the stream; a timer writes keep-alive comments; the last event and the end are one write. So a stream needs no
tasks beside the request's own: sse-starlette's four were a quarter of what a request costs. The events go straight to
the server: yielded by a task to sse-starlette one costs 14 us of CPU, written by `Relay` 5.5 us, reading the token
included (measured with a server that takes everything at once). At the design figure, 30,000 events a second from one
core, an event may cost 33 us in all.

`Relay` writes a single choice without a task: a reader that is a task costs a future, a wake-up and the walk through
every coroutine between the server and the stream, per token. Streams that have news are noted while a message of the
engine is read, and written one after the other when it is done. A task comes in only when a socket is full, and at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from frontends.common.errors import report, unexpected
from frontends.common.event_loop import Coalescer
from frontends.common.generation import ChoiceOutput, Output, Piece, RequestOutput, Usage
from frontends.common.json import dumps, quote
from frontends.http.detached import StreamReader, StreamState
from frontends.http.state import HttpState, RunningCall
from frontends.http.telemetry import describe
from inferengine.client import Stream
from inferengine.errors import InferEngineError

RouteHandler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger(__name__)

SMALL_VALUES = 2000  # of log-probabilities, written down in a millisecond or two


class PlainEvent(NamedTuple):
    """The event of one token that does not end its choice, but for the token: what stands before its text, what after
    it, and what after its id, which follows then; None where ids are not told."""

    head: bytes
    tail: bytes
    after_id: bytes | None = None

    def write(self, text: str, token_id: int) -> bytes:
        """The event of this token; nothing for one that has nothing to say."""
        if self.after_id is not None:
            return b"%b%b%b%d%b" % (self.head, quote(text), self.tail, token_id, self.after_id)
        return self.head + quote(text) + self.tail if text else b""


class Format(Protocol):
    """How a route writes a generation: as a stream of events, or as one document."""

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """The events of these pieces, one for each that has something to say."""

    def plain(self, choice: ChoiceOutput) -> PlainEvent | None:
        """The event of one token, once events that do not end the choice differ in nothing but text and id; None where
        they do."""

    def end(self, generation: RequestOutput) -> bytes:
        """What follows the last piece of the last choice."""

    def failure(self, error: InferEngineError) -> bytes:
        """What ends a stream that cannot go on."""

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The whole answer in one."""


class JsonBytes(Response):
    """A JSON document, encoded without going through ASCII."""

    media_type = "application/json"

    def __init__(self, document: object, status_code: int = 200) -> None:
        """`document`: an object, or its bytes."""
        super().__init__(document if isinstance(document, bytes) else dumps(document), status_code)


def is_large(outputs: Sequence[Output]) -> bool:
    """Whether writing it down takes long: log-probabilities of many tokens."""
    values = 0
    for output in outputs:
        for rows in (output.logprobs, output.choice.prompt_logprobs):
            if rows:
                values += len(rows) * (1 + len(rows[-1].top_ids))
    return values > SMALL_VALUES


def encode(format: Format, outputs: Sequence[Output], usage: Usage) -> bytes:
    """Encode the document as JSON, one choice after the other: no other thread runs while the encoder is at one."""
    document = format.document(outputs, usage)
    if "choices" not in document:
        return dumps(document)
    head, tail = dumps({**document, "choices": []}).split(b'"choices":[]', 1)
    return b"".join((head, b'"choices":[', b",".join(map(dumps, document["choices"])), b"]", tail))


async def answer(
    service: HttpState,
    request: Request,
    generation: RequestOutput,
    format: Format,
    *,
    stream: bool,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Wait until the engine has taken the request, so that a refusal still has its HTTP status; then answer.
    `before_end` is awaited between the making of the document, or of the last events, and their leaving."""
    with contextlib.ExitStack() as stack:
        stack.callback(describe, request.scope, generation)
        call = stack.enter_context(service.call(generation, request.receive))
        await generation.accepted()
        if stream:
            state: StreamState | None = request.scope.get("stream")
            reader = None if state is None else StreamReader(state, len(generation.choices))
            return EventStream(service, generation, format, call, stack.pop_all(), reader, before_end)
        outputs = await generation.collect()
        await generation.settle()
        usage = generation.usage()
        document: object
        if is_large(outputs):  # in a thread: others are answered while log-probabilities are written down
            document = await asyncio.to_thread(encode, format, outputs, usage)
        else:
            document = format.document(outputs, usage)
        if before_end is not None:
            await before_end()
        return JsonBytes(document)


EVENT_HEADERS = [  # whether the connection is kept is uvicorn's to say
    (name, value) for name, value in EventSourceResponse(iter(())).raw_headers if name != b"connection"
]


class EventStream(Response):
    """The ASGI application that relays a generation as events."""

    def __init__(
        self,
        service: HttpState,
        generation: RequestOutput,
        format: Format,
        call: RunningCall,
        resources: contextlib.ExitStack,
        reader: StreamReader | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`reader` puts ids on the events of a stream that can be read on."""
        self._service = service
        self._generation = generation
        self._format = format
        self._call = call
        self._resources = resources
        self._reader = reader
        self._before_end = before_end
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as Server-Sent Events."""
        with self._resources:
            await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
            plain_send = scope.get("plain_send", send)
            with KeepAlive(plain_send, self._service.config.http.keep_alive_s):
                last = await self._relay(plain_send, scope["request_id"])
            await plain_send({"type": "http.response.body", "body": last, "more_body": False})
            if self._call.client_gone and not self._complete:
                scope["status"] = 499

    async def _relay(self, send: Send, request_id: str) -> bytes:
        """Send the events as they come, and return the last one; none to a client that has left."""
        generation, format = self._generation, self._format
        try:
            source = generation.choices[0].source
            if len(generation.choices) == 1 and self._reader is None and isinstance(source, Stream):
                choice, coalescer = generation.choices[0], self._service.coalescer
                error = await Relay(generation, choice, source, format, send, coalescer).run()
            else:
                error = await self._send_merged(send)
            if error is None:
                await generation.settle()
            last = format.end(generation) if error is None else format.failure(generation.error or error)
            if error is not None:
                report(generation.error or error, request_id)
        except InferEngineError as error:
            report(error, request_id)
            last = format.failure(error)
        except Exception:
            logger.exception("a stream failed")
            last = format.failure(unexpected())
        if self._call.client_gone:
            return b""
        if self._before_end is not None:
            await self._before_end()
        self._complete = not self._call.client_gone
        return last

    async def _send_merged(self, send: Send) -> InferEngineError | None:
        """All choices as they come; the error of one that failed ends it."""
        generation, format, reader = self._generation, self._format, self._reader
        async for choice, pieces in generation.merged():
            if reader is None:
                body = format.events(generation, choice, pieces)
            else:
                body = reader.events(format, generation, choice, pieces)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if (error := pieces[-1].error) is not None:
                return error
        return None


class KeepAlive:
    """Writes a comment every `interval_s` seconds, so that nobody on the way takes the stream for dead; 0: never."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def __enter__(self) -> KeepAlive:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()

    def _write(self) -> None:
        if self._writing is None or self._writing.done():  # else the socket is full
            self._writing = asyncio.ensure_future(self._comment())
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)

    async def _comment(self) -> None:
        await self._send({"type": "http.response.body", "body": keep_alive().encode(), "more_body": True})


def keep_alive() -> ServerSentEvent:
    """Return the comment that keeps an idle stream's connection open."""
    return ServerSentEvent(comment="keep-alive", sep="\n")


class EventFormat(Protocol):
    """What a relay needs of a Format."""

    def plain(self, choice: ChoiceOutput) -> PlainEvent | None:
        """A token's event, once nothing but its text and id differs; else None."""

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: list[Piece]) -> bytes:
        """Write the events of these pieces."""


class Relay:
    """Writes one choice's events into its response. `run` returns the error that ended it, or None."""

    def __init__(
        self,
        generation: RequestOutput,
        choice: ChoiceOutput,
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
        self._plain: PlainEvent | None = None
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
        choice, delta, plain = self._choice, self._stream.take(), self._plain
        if plain is not None and delta.finish is None and len(delta.token_ids) == 1:
            token_id = delta.token_ids[0]
            return plain.write(choice.read_plain(token_id), token_id)
        pieces = choice.read(delta, per_token=True)
        if pieces[-1].is_last:
            self._last = pieces[-1]
        body = self._format.events(self._generation, choice, pieces)
        if plain is None and choice.is_plain:
            self._plain = self._format.plain(choice)
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
