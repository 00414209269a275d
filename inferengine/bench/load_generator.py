"""Sends the requests of a load: closed loop (so many at a time) or open loop (so many a second).

Arrivals of the open loop are Poisson; a burstiness below 1 makes them clump (gamma-distributed gaps, as in vLLM's
benchmark). The HTTP client is small: one request at a time over a kept connection, and the arrival time of each event.
Parsing an event as JSON costs more than receiving it, so it looks only at what is needed: on the machine that also
runs the server, a slow client would measure itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from inferengine.bench.gpu_trace import GpuTrace, Summary
from inferengine.bench.load_options import LoadOptions
from inferengine.errors import InferEngineError


@dataclass
class LoadReply:
    """The result of one request. Times on the monotonic clock; `event_s` of the events that carry output."""

    started_s: float
    status: int = 0
    ended_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    finish_reason: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the stream ended with a finish reason and no error."""
        return self.status == 200 and not self.error and bool(self.finish_reason)


class LoadConnection(asyncio.Protocol):
    """HTTP/1.1 connection to one host. `post` may be called again once it has returned."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._reply = LoadReply(0.0)
        self._done: asyncio.Future[None] | None = None
        self._buffer = b""
        self._text = b""
        self._in_head = True
        self._chunked = False
        self._remaining: int | None = 0
        self._closes = False

    @classmethod
    async def open(cls, url: str) -> LoadConnection:
        """Connect to the host of a URL."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        _, connection = await asyncio.get_running_loop().create_connection(cls, parts.hostname or "", port, ssl=context)
        return connection

    async def post(self, host: str, path: str, body: bytes, headers: str = "") -> LoadReply:
        """Send a request and wait for the end of its reply."""
        self._done = asyncio.get_running_loop().create_future()
        self._reply = LoadReply(time.monotonic())
        self._buffer = self._text = b""
        self._in_head = True
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        await self._done
        self._reply.ended_s = time.monotonic()
        return self._reply

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent over it."""
        return not (self._closes or self._transport.is_closing())

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """End the reply under way."""
        if self._remaining is None and error is None:  # the body was to end here
            self._finish()
        if self._done is not None and not self._done.done():
            self._reply.error = self._reply.error or "the connection was closed"
            self._done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Read head, chunks and events of a reply."""
        now = time.monotonic()
        self._buffer += data
        if self._in_head:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head.lower())
            self._buffer = rest
        ended = self._dechunk() if self._chunked else self._take_plain()
        self._read_events(now)
        if ended:
            self._finish()

    def _read_head(self, head: bytes) -> None:
        self._in_head = False
        self._reply.status = int(head.split(b" ", 2)[1])
        self._chunked = b"transfer-encoding: chunked" in head
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0].strip()
        self._closes = b"connection: close" in head or head.startswith(b"http/1.0")
        self._remaining = 0 if self._chunked else int(length) if length else None  # None: until the server closes

    def _take_plain(self) -> bool:
        received, self._buffer = self._buffer, b""
        self._text += received
        if self._remaining is None:
            return False
        self._remaining -= len(received)
        return self._remaining <= 0

    def _dechunk(self) -> bool:
        """Move whole chunks to the text. True at the last one."""
        parts, buffer = [], self._buffer
        place, ended = 0, False
        while True:
            line = buffer.find(b"\r\n", place)
            if line < 0:
                break
            size = int(buffer[place:line].partition(b";")[0], 16)
            if line + size + 4 > len(buffer):
                break
            parts.append(buffer[line + 2 : line + 2 + size])
            place = line + size + 4
            if size == 0:
                ended = True
                break
        self._buffer = buffer[place:]
        self._text += b"".join(parts)
        return ended

    def _read_events(self, now: float) -> None:
        if self._reply.status != 200:
            return
        *events, self._text = self._text.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            plain = b'"finish_reason":null' in event and b'"usage":{' not in event
            if not plain:
                self._read_last(json.loads(event[6:]), now)
            elif b'"content":""' not in event and b'"text":""' not in event:
                self._reply.event_s.append(now)

    def _read_last(self, document: dict[str, Any], now: float) -> None:
        """Read an event that may carry an end, a usage or an error."""
        reply = self._reply
        if "error" in document:
            reply.error = str(document["error"].get("message", document["error"]))
        reply.usage = document.get("usage") or reply.usage
        for choice in document.get("choices", ()):
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                reply.event_s.append(now)

    def _finish(self) -> None:
        reply = self._reply
        if reply.status != 200:
            reply.error = self._text.decode(errors="replace")[:300]
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


ANSWER_TIMEOUT_S = 10.0


class Outcome(NamedTuple):
    """Every reply, the seconds from the first request to the last reply, and NVML's trace of this machine meanwhile."""

    replies: list[LoadReply]
    seconds: float
    gpu: Summary


class LoadClient:
    """A pool of connections, as many as are needed at a time. `ended` is called after each reply."""

    def __init__(self, options: LoadOptions, ended: Callable[[], None]) -> None:
        self._url = options.url
        self._host = urlsplit(options.url).netloc
        self._path = f"{options.base_path}/v1/{'chat/completions' if options.chat else 'completions'}"
        self._headers = f"Authorization: Bearer {options.api_key}\r\n" if options.api_key else ""
        self._idle: list[LoadConnection] = []
        self._ended = ended

    async def send(self, body: bytes) -> LoadReply:
        """Send one request; an error of the connection is part of the reply."""
        reply = await self._send(body)
        self._ended()
        return reply

    async def _send(self, body: bytes) -> LoadReply:
        started = time.monotonic()
        try:
            connection = self._take_idle() or await LoadConnection.open(self._url)
            reply = await connection.post(self._host, self._path, body, self._headers)
        except OSError as error:
            return LoadReply(started, ended_s=time.monotonic(), error=str(error))
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        reply.started_s = started  # the connection's own time belongs to the first token's
        return reply

    def _take_idle(self) -> LoadConnection | None:
        """Return the idle connection used last, unless the server has closed it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()


async def run(
    options: LoadOptions, bodies: list[bytes], gpus: GpuTrace, *, ended: Callable[[], None] = lambda: None
) -> Outcome:
    """Warm up, then send everything. A request that fails is a reply with an error; `ended` counts replies."""
    if options.warm_up:
        warming = LoadClient(options, lambda: None)
        await closed_loop(warming, bodies[: options.warm_up], options.warm_up)
        warming.close()
    load = LoadClient(options, ended)
    gpus.lap()
    started = time.monotonic()
    if options.rate:
        replies = await open_loop(load, bodies, options.rate, options.burstiness, options.seed)
    else:
        replies = await closed_loop(load, bodies, options.concurrency)
    outcome = Outcome(replies, time.monotonic() - started, gpus.lap())
    load.close()
    return outcome


async def closed_loop(load: LoadClient, bodies: list[bytes], concurrency: int) -> list[LoadReply]:
    """Keep `concurrency` requests in flight until none is left."""
    waiting = iter(bodies)

    async def one() -> list[LoadReply]:
        return [await load.send(body) for body in waiting]

    return [reply for replies in await asyncio.gather(*(one() for _ in range(concurrency))) for reply in replies]


async def open_loop(
    load: LoadClient, bodies: list[bytes], rate: float, burstiness: float, seed: int
) -> list[LoadReply]:
    """Send `rate` requests per second, whether or not earlier ones have ended."""

    async def arrivals() -> AsyncIterator[bytes]:
        generator, due = random.Random(seed), time.monotonic()
        for body in bodies:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield body
            due += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))

    return await asyncio.gather(*[asyncio.create_task(load.send(body)) async for body in arrivals()])


def asker(
    options: LoadOptions,
) -> tuple[Callable[[dict[str, Any]], tuple[int, dict[str, Any]]], Callable[[dict[str, Any]], str], str]:
    """Return what asks the server one completion (status and JSON), one streamed (its text), and the model's name."""
    address = f"{options.url.rstrip('/').removesuffix('/v1')}/v1/completions"
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"

    def send(body: dict[str, Any]) -> tuple[int, bytes]:
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60.0) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, content = send(body)
        try:
            return status, json.loads(content)
        except ValueError:
            return status, {}

    def streamed(body: dict[str, Any]) -> str:
        _, content = send({**body, "stream": True})
        lines = (line for line in content.splitlines() if line.startswith(b"data: {"))
        choices = (choice for line in lines for choice in json.loads(line[6:]).get("choices", ()))
        return "".join(choice.get("text") or "" for choice in choices)

    return ask, streamed, served_model(options).name


class ListedModel(NamedTuple):
    """What a server says of a model. `context`: its `max_model_len`; 0 where it has none."""

    name: str
    context: int = 0


def served_model(options: LoadOptions) -> ListedModel:
    """Return the model to request: the named one, else the first of /v1/models, which is read in both cases.

    Raises engine_unavailable, unauthorized or model_not_found, with the address and the remedy.
    """
    parts = urlsplit(options.url)
    address = f"{parts.scheme}://{parts.netloc}{options.base_path}/v1/models"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            listed = json.load(answer)["data"]
            found = next((entry for entry in listed if entry["id"] == options.model), listed[0])
            return ListedModel(options.model or str(found["id"]), int(found.get("max_model_len") or 0))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            message = f"{address} answers {error.code}: give a valid key with --api-key"
            raise InferEngineError("unauthorized", message) from None
        if options.model:
            return ListedModel(options.model)  # not every server has that route
        message = (
            f"{address} answers {error.code}: name an OpenAI-compatible server with --url, or a model with --model"
        )
        raise InferEngineError("engine_unavailable", message) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        message = f"no server answers at {options.url} ({reason}): start one there, or name its address with --url"
        raise InferEngineError("engine_unavailable", message) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        if options.model:
            return ListedModel(options.model)
        message = f"{address} lists no model: name an OpenAI-compatible server with --url, or a model with --model"
        raise InferEngineError("model_not_found", message) from None
