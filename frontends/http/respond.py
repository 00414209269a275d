"""A generation as an HTTP answer: one document, or Server-Sent Events; cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontends.common.errors import report, unexpected
from frontends.common.generation import Generation, Output, Usage
from frontends.common.json import dumps
from frontends.http.detached import StreamReader, StreamState
from frontends.http.event_writer import Relay
from frontends.http.openai.format import Format
from frontends.http.spans import describe
from frontends.http.state import HttpState, RunningCall
from inferengine.client import Stream
from inferengine.errors import InferEngineError

logger = logging.getLogger(__name__)

SMALL_VALUES = 2000  # of log-probabilities, written down in a millisecond or two


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
    """The document as JSON, choice by choice: the encoder lets nobody else run while it is at one."""
    document = format.document(outputs, usage)
    if "choices" not in document:
        return dumps(document)
    head, tail = dumps({**document, "choices": []}).split(b'"choices":[]', 1)
    return b"".join((head, b'"choices":[', b",".join(map(dumps, document["choices"])), b"]", tail))


async def answer(
    service: HttpState,
    request: Request,
    generation: Generation,
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


class EventStream(Response):
    """The ASGI application that relays a generation as events."""

    def __init__(
        self,
        service: HttpState,
        generation: Generation,
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
        with self._resources:
            response = EventSourceResponse(
                self._relay(scope.get("plain_send", send), scope["request_id"]),
                ping=self._service.config.http.keep_alive_s,
                ping_message_factory=_keep_alive,
                sep="\n",
            )
            await response(scope, receive, send)
            if self._call.client_gone and not self._complete:
                scope["status"] = 499

    async def _relay(self, send: Send, request_id: str) -> AsyncIterator[bytes]:
        """Gives the response nothing and sends by itself: a chunk through sse-starlette costs 20 us more than this.
        The library does the rest: headers, keep-alive comments, the client's leaving, the end."""
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
        if self._before_end is not None:
            await self._before_end()
        self._complete = not self._call.client_gone
        yield last

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


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
