"""Write a generation as an HTTP response: one document, or Server-Sent Events. Cancel it when the client disconnects.

sse-starlette provides the headers of a stream, and nothing else: its four tasks were a quarter of the cost of a
request. Here a stream needs no task beside the request's own. `RunningCall` watches for the client's disconnect and
ends the generation, which ends the stream. A timer writes keep-alive comments. The last event and the end of the body
are one write. An event that a task yields to sse-starlette costs 14 us of CPU, one that `Relay` writes 5.5 us, reading
the token included (measured with a server that takes everything at once). The design figure is 30,000 events a second
from one core: 33 us for an event in all.

`Relay` writes a single choice without a task. A reader that is a task costs a future, a wake-up and a walk through
every coroutine between the server and the stream, for each token. Instead, reading a message of the engine collects
the streams with new output, and one callback writes them all. The request's task runs only when a socket is full, and
at the end.
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
from frontends.common.generation import (
    MOST_AS_PIECES,
    ChoiceOutput,
    Output,
    Piece,
    RequestOutput,
    Usage,
    split_delta,
)
from frontends.common.json import dumps, quote
from frontends.http.detached import StreamReader, StreamState
from frontends.http.state import HttpState, RunningCall
from frontends.http.telemetry import describe
from inferengine.client import Delta, Stream
from inferengine.client.client import wake
from inferengine.errors import InferEngineError

RouteHandler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger(__name__)

SMALL_VALUES = 2000  # so many log-probabilities are encoded in a millisecond or two


class EventTemplate(NamedTuple):
    """The encoded event of one token that does not end its choice, without the token's text and id.

    `head` comes before the text and `tail` after it. With `after_id` the event also carries the token's id: it follows
    `tail`, and `after_id` follows it.
    """

    head: bytes
    tail: bytes
    after_id: bytes | None = None

    def write(self, text: str, token_id: int) -> bytes:
        """Return the event of this token; empty if it would carry neither text nor id."""
        if self.after_id is not None:
            return b"%b%b%b%d%b" % (self.head, quote(text), self.tail, token_id, self.after_id)
        return self.head + quote(text) + self.tail if text else b""


class Format(Protocol):
    """Writes a generation in the format of one route: as a stream of events, or as one document."""

    @property
    def ends_with_usage(self) -> bool:
        """Whether the event that ends a choice carries the usage. Only such an event waits for the engine's."""

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the events of these pieces. A piece that adds nothing may have none."""

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of this choice's events; None while events differ in more than text and id.

        Called again after each event until there is one. Not used for the event that ends the choice.
        """

    def end(self, generation: RequestOutput) -> bytes:
        """Write what follows the last piece of the last choice."""

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error that ends the stream."""

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole answer as one JSON object."""


class JsonBytes(Response):
    """A JSON response in UTF-8, without escapes of non-ASCII characters."""

    media_type = "application/json"

    def __init__(self, document: object, status_code: int = 200) -> None:
        """`document`: an object, or its bytes."""
        super().__init__(document if isinstance(document, bytes) else dumps(document), status_code)


def is_large(outputs: Sequence[Output]) -> bool:
    """Return whether encoding takes long, because there are many log-probabilities."""
    values = 0
    for output in outputs:
        for rows in (output.logprobs, output.choice.prompt_logprobs):
            if rows:
                values += len(rows) * (1 + len(rows[-1].top_ids))
    return values > SMALL_VALUES


def encode(format: Format, outputs: Sequence[Output], usage: Usage) -> bytes:
    """Encode the document as JSON, one choice after the other: json.dumps lets no other thread run until it is done."""
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
    """Wait until the engine has accepted the request, so that a refusal still has its HTTP status; then answer.

    `before_end` is awaited when the document, or the last event, has been made and before it is sent.
    """
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
        if is_large(outputs):  # in a thread, so that the event loop serves other requests meanwhile
            document = await asyncio.to_thread(encode, format, outputs, usage)
        else:
            document = format.document(outputs, usage)
        if before_end is not None:
            await before_end()
        return JsonBytes(document)


EVENT_HEADERS = [  # without `connection`, which uvicorn decides
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
        """`reader` adds ids to the events of a detached stream, which can be resumed; None for other streams."""
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
        """Send the events as they arrive, and return the last one; empty if the client has disconnected."""
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
        """Send the events of all choices as they arrive. Returns the error of the first choice that fails."""
        generation, format, reader = self._generation, self._format, self._reader
        async for choice, pieces in generation.merged():
            if format.ends_with_usage and pieces[-1].is_last:
                await choice.settle()
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
    """Writes a comment every `interval_s` seconds, so that proxies do not time the stream out; 0: never."""

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
    """The part of Format that Relay uses."""

    @property
    def ends_with_usage(self) -> bool:
        """Return what Format.ends_with_usage does."""

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return a template as Format.template does."""

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: list[Piece]) -> bytes:
        """Write the events of these pieces."""


class Relay:
    """Writes the events of a request's only choice from event loop callbacks; the module's docstring says why."""

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
        self._template: EventTemplate | None = None
        self._rest: Delta | None = None  # taken, and written in the next turn: a slow socket lets much pile up
        self._last: Piece | None = None
        self._late: list[Piece] = []  # the end by a stop string that was found here, until the engine's usage is known
        self._failure: BaseException | None = None
        self._blocked: Coroutine[Any, Any, None] | None = None
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> InferEngineError | None:
        """Write until the end of the choice. Returns the error that ended it, or None."""
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
        if self._late:
            await self._choice.settle()
            body = self._format.events(self._generation, self._choice, self._late)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        return None if self._last is None else self._last.error

    def take_news(self) -> None:
        """Write new output, as much as others can wait for. Called by the coalescer."""
        if self._left:
            return
        try:
            body = self._read()
            if body and not self._write({"type": "http.response.body", "body": body, "more_body": True}):
                wake(self._waiter)  # the socket is full: `run` waits for it, and new output stays in the stream
            elif self._last is None:
                self._listen()
            else:
                wake(self._waiter)
        except Exception as error:
            self._failure = error
            wake(self._waiter)

    def _read(self) -> bytes:
        choice, template = self._choice, self._template
        delta, self._rest = self._rest or self._stream.take(), None
        if template is not None and delta.finish is None and len(delta.token_ids) == 1:
            token_id = delta.token_ids[0]
            return template.write(choice.read_plain(token_id), token_id)
        delta, self._rest = split_delta(delta, MOST_AS_PIECES)
        pieces = choice.read(delta, per_token=True, rest=self._rest)
        if pieces[-1].is_last:
            self._last = pieces[-1]
            if choice.finish is None and self._format.ends_with_usage:
                self._late, pieces = pieces[-1:], pieces[:-1]
        body = self._format.events(self._generation, choice, pieces)
        if template is None and choice.is_plain:
            self._template = self._format.template(choice)
        return body

    def _write(self, message: Message) -> bool:
        """Send an ASGI message. Returns False if the socket is full: `run` must then await `_blocked`."""
        sending = self._send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return True
        self._blocked = _resume(sending, waits_for)
        return False

    def _listen(self) -> None:
        if self._rest is not None:
            self._coalescer.add(self)
        else:
            self._stream.on_output(self._has_news)

    def _has_news(self) -> None:
        self._coalescer.add(self)


@types.coroutine
def _resume(sending: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that was started outside of a task and is waiting for `waits_for`."""
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
