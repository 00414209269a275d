"""One socket: the handshake, which decides who may open it; then its frames, read one after the other, and its
requests, run concurrently. Everything it started ends when it closes.

Programs send the API key in a header. Browsers cannot, and send it as a subprotocol: a page offers
`inferengine.v1.json` and `inferengine.key.<KEY>`, and the answer names the first only. Keys consist of the characters
of a token (RFC 6455). A subprotocol appears in no log and no address bar, unlike a query.

Browsers let any page of any site open a socket, and name the page's site in `Origin`. A page is accepted when this
server served it (same host and port) under a name that nobody else's DNS can point to this machine: an IP address,
localhost, or a name that ws.allowed_hosts lists. Every other origin must be listed in ws.origins. Programs send no
Origin, and are accepted.

The metrics of sockets have vLLM's names.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Address, Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from frontends.common.auth import KeyRing, Quotas, is_named, read_names, read_origins
from frontends.common.connection_limits import RefusalMetrics
from frontends.common.engine_stats import NUM_CELLS, ResumeCells
from frontends.common.errors import report, scrubbed, unexpected
from frontends.common.json import LARGE, refuse_half_pairs
from frontends.websocket.channel import (
    FRAMES,
    JSON_SUBPROTOCOL,
    MSGPACK_SUBPROTOCOL,
    Codec,
    SendChannel,
    SocketGone,
    choose_codec,
)
from frontends.websocket.engine_state import EngineState
from frontends.websocket.frames import (
    PROTOCOL,
    AckFrame,
    CancelFrame,
    Frame,
    GenerateFrame,
    HelloFrame,
    PingFrame,
    ResumeFrame,
    StatsFrame,
    id_of,
    read_frame,
)
from frontends.websocket.socket_request import Caller, Services, SocketRequest
from inferengine.errors import InferEngineError
from inferengine.process.workers import WorkerCells

logger = logging.getLogger(__name__)


CLOSE_STALLED = 1008
PROTOCOL_REMEDY = "Send frames as docs/websocket.md says."


class SocketConnection:
    """One accepted socket. `run()` returns when it has closed and everything it started has ended."""

    def __init__(
        self, receive: Receive, send: Send, codec: Codec, services: Services, engine_state: EngineState, caller: Caller
    ) -> None:
        """`receive` and `send`: the ASGI channels of the socket."""
        config = services.config
        self._caller = caller
        self._receive, self._asgi_send, self._codec = receive, send, codec
        self._services, self._engine_state = services, engine_state
        self._max_requests = config.ws.max_requests
        self._channel = SendChannel(
            partial(_write, send),  # no method of this object, which has the channel: that would be a cycle
            codec,
            max_window=config.ws.send_queue_messages,
            stall_limit_s=config.wire.stall_limit_s,
        )
        self._requests: dict[str, SocketRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats: asyncio.Task[None] | None = None
        self._sent_state: dict[str, Any] = {}  # as in the last hello or state frame

    @property
    def num_requests(self) -> int:
        """Open requests of this socket."""
        return len(self._requests)

    async def run(self) -> None:
        """Serve the socket, which has been accepted."""
        self._spawn(self._channel.pump())
        try:
            self._sent_state = self._engine_state.describe()
            await self._channel.send({"type": "hello", "protocol": PROTOCOL, **self._sent_state})
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._on_message(message)
        except SocketGone:
            pass
        finally:
            await self._end_tasks()

    def update_state(self, state: dict[str, Any]) -> None:
        """Send a state frame if `state` differs from the last one sent."""
        if state != self._sent_state:
            self._sent_state = state
            self._spawn(self._send_state(state))

    async def _send_state(self, state: dict[str, Any]) -> None:
        try:
            await self._channel.send({"type": "state", **state})
        except SocketGone:
            return

    # -- frames of the client ----------------------------------------------------------------------------------------

    async def _on_message(self, message: MutableMapping[str, Any]) -> None:
        document: Any = None
        size = len(message.get("text") or message.get("bytes") or b"")
        try:
            document = await self._services.off_loop.run(size, self._codec.decode, message)
            if isinstance(document, dict) and self._codec.may_hold_half_pairs(message):
                await self._services.off_loop.run(size, refuse_half_pairs, document)
            await self._on_frame(read_frame(document))
        except InferEngineError as error:
            name = id_of(document)
            await self._error(None if name in self._requests else name, error)
        if size >= LARGE:
            self._services.off_loop.give_back_soon()

    async def _on_frame(self, frame: Frame) -> None:
        match frame:
            case GenerateFrame() | ResumeFrame():
                self._start(frame)
            case CancelFrame():
                if (request := self._requests.get(frame.id)) is not None:
                    request.cancel()
            case AckFrame():
                self._channel.acknowledge(frame.frames)
            case PingFrame():
                await self._channel.send({"type": "pong", "nonce": frame.nonce})
            case StatsFrame():
                self._subscribe(frame)
            case HelloFrame():
                window = self._channel.open_window(frame.window)
                await self._channel.send({"type": "window", "window": window})

    def _start(self, frame: GenerateFrame | ResumeFrame) -> None:
        if frame.id in self._requests:
            raise InferEngineError("conflict", "a request with this id is open on this socket", field="id")
        if len(self._requests) >= self._max_requests:
            raise InferEngineError(
                "rate_limited",
                f"this socket has {len(self._requests)} open requests, the most it may",
                retry_after_s=1.0,
            )
        if self._engine_state.draining and isinstance(frame, GenerateFrame):
            raise InferEngineError("draining", "This server is about to stop.", retry_after_s=1.0)
        quota = contextlib.ExitStack()
        quota.enter_context(self._caller.quotas.request(self._caller.key))
        request = SocketRequest(frame, self._channel, self._services, self._caller, quota.close)
        self._requests[frame.id] = request
        task = self._spawn(self._run_request(request))
        task.add_done_callback(lambda _: quota.close())  # even if it never ran

    async def _run_request(self, request: SocketRequest) -> None:
        failure: InferEngineError | None = None
        try:
            await request.run()
        except InferEngineError as error:
            report(error, request.request_id)
            failure = error
        except SocketGone:
            pass
        except Exception:
            logger.exception("a request failed")
            failure = unexpected()
        finally:
            del self._requests[request.frame.id]
        if failure is None:
            return
        request.before_last_frame()
        failure.__traceback__ = None  # it has this frame, which has the error
        try:
            await self._error(request.frame.id, failure)
            if failure.code == "client_stalled":
                await self._channel.flushed()
                await _send(
                    self._asgi_send, {"type": "websocket.close", "code": CLOSE_STALLED, "reason": failure.message}
                )
        except SocketGone:
            return

    def _subscribe(self, frame: StatsFrame) -> None:
        if self._stats is not None:
            self._stats.cancel()
            self._stats = None
        if frame.subscribe:
            self._stats = self._spawn(self._send_stats(frame.interval_s))

    async def _send_stats(self, interval_s: float) -> None:
        try:
            while True:
                await self._channel.send(self._engine_state.stats())
                await asyncio.sleep(interval_s)
        except SocketGone:
            return

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _error(self, name: str | None, error: InferEngineError) -> None:
        await self._channel.send({"type": "error", "id": name, "error": error_frame(error)})

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        self._stats = None  # a cancelled task keeps its error, and with it the frame that has this object
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write(send: Send, frames: bytes) -> None:
    """Write whole websocket frames. Raises SocketGone."""
    await _send(send, {"type": FRAMES, "body": frames})


async def _send(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send an ASGI message, waiting while the transport is full. Raises SocketGone."""
    try:
        await send(message)
    except (OSError, RuntimeError):  # uvicorn's: after a loss, and after a close
        raise SocketGone from None


def error_frame(error: InferEngineError) -> dict[str, Any]:
    """Return the `error` of an error frame: what is wrong, with which field, and the remedy."""
    return {
        "code": error.code,
        "message": scrubbed(error.message),
        "field": error.field,
        "retryable": error.kind.retryable,
        "retry_after_s": error.retry_after_s,
        "remedy": PROTOCOL_REMEDY if error.code == "protocol_error" else scrubbed(error.kind.remedy),
    }


# -- metrics -----------------------------------------------------------------------------------------------------------


BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
_OPEN, _OPENED, _REFUSED, _SECONDS, _FIRST_BUCKET = range(5)
_NUM_BUCKETS = len(BUCKETS_S) + 1


class SocketMetrics(Collector):
    """Counts sockets. Each worker writes its own cells on its event loop; `collect` sums over all workers."""

    def __init__(self, num_workers: int = 1) -> None:
        self.refusals = RefusalMetrics("inferengine_websocket", num_workers)
        self.cells = WorkerCells(_FIRST_BUCKET + _NUM_BUCKETS + NUM_CELLS, num_workers)
        self.resumed = ResumeCells(self.cells, _FIRST_BUCKET + _NUM_BUCKETS)

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork. A restarted worker continues the counters of the one before
        it; open sockets start at 0, because they died with that worker."""
        self.cells.choose_worker(worker)
        self.refusals.choose_worker(worker)
        self.cells.own[_OPEN] = 0.0

    @property
    def num_open(self) -> int:
        """Open sockets of all workers."""
        return int(self.cells.total(_OPEN))

    def refused(self) -> None:
        """Count a socket that was not accepted."""
        self.cells.own[_REFUSED] += 1

    def opened(self) -> float:
        """Count an accepted socket. Pass the returned time to `closed`."""
        self.cells.own[_OPEN] += 1
        self.cells.own[_OPENED] += 1
        return time.monotonic()

    def closed(self, opened_s: float) -> None:
        """Count the end of a socket, with its duration since `opened_s`."""
        own, seconds = self.cells.own, time.monotonic() - opened_s
        own[_OPEN] -= 1
        own[_FIRST_BUCKET + bisect.bisect_left(BUCKETS_S, seconds)] += 1
        own[_SECONDS] += seconds

    def collect(self) -> Iterable[Metric]:
        """Yield the sums over all workers, for prometheus-client."""
        total = [self.cells.total(place) for place in range(self.cells.num_cells)]
        yield GaugeMetricFamily("vllm:websocket_connections_active", "Sockets that are open.", value=total[_OPEN])
        yield CounterMetricFamily("vllm:websocket_connections", "Sockets opened.", value=total[_OPENED])
        yield CounterMetricFamily("inferengine_websocket_refused", "Sockets refused.", value=total[_REFUSED])
        yield from self.refusals.collect()
        running, buckets = 0.0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), total[_FIRST_BUCKET : _FIRST_BUCKET + _NUM_BUCKETS], strict=True):
            running += count
            buckets.append((str(bound), running))
        text = "From a socket's opening to its end."
        yield HistogramMetricFamily(
            "vllm:websocket_connection_duration_seconds", text, buckets=buckets, sum_value=total[_SECONDS]
        )
        yield from self.resumed.collect()


# -- handshake ---------------------------------------------------------------------------------------------------------


SOCKET_PATH = "/v1/ws"
KEY_SUBPROTOCOL = "inferengine.key."
ANY = "*"
_ORIGIN = re.compile(r"https?://[\w.:\[\]-]+", re.ASCII)


class SocketEndpoint:
    """The ASGI endpoint of the socket: checks the handshake, then runs a SocketConnection until it closes."""

    def __init__(
        self, services: Services, engine_state: EngineState, keys: KeyRing, quotas: Quotas, metrics: SocketMetrics
    ) -> None:
        config = services.config
        self.connections: set[SocketConnection] = set()
        self._services = services
        self._engine_state = engine_state
        self._keys, self._quotas, self._metrics = keys, quotas, metrics
        self._max_sockets = config.ws.max_sockets
        self._origins = read_origins("ws.origins", config.ws.origins)
        self._host_names = read_names("ws", config.ws.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket."""
        websocket = WebSocket(scope, receive, send)
        checked = self._check(websocket.headers, scope["subprotocols"], websocket.client)
        if isinstance(checked, Response):
            await websocket.send_denial_response(checked)
            return
        codec, caller = checked
        await websocket.accept(subprotocol=codec.subprotocol if scope["subprotocols"] else None)
        # The server's own channels: Starlette's would check every message.
        connection = SocketConnection(receive, send, codec, self._services, self._engine_state, caller)
        self.connections.add(connection)
        opened_s = self._metrics.opened()
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)
            self._metrics.closed(opened_s)

    async def explain(self, request: Request) -> Response:
        """Answer a POST to the socket's path with why a page's socket is refused: browsers hide that from the page."""
        checked = self._check(request.headers, (JSON_SUBPROTOCOL,), request.client)
        if not isinstance(checked, Response):
            return JSONResponse({"may_connect": True, "reason": ""})
        reason = bytes(checked.body).decode()
        return JSONResponse({"may_connect": False, "reason": reason}, checked.status_code)

    def _check(
        self, headers: Headers, subprotocols: Sequence[str], client: Address | None
    ) -> Response | tuple[Codec, Caller]:
        """Return the refusal, or how the accepted socket is served."""
        origin = headers.get("origin")
        if not may_connect(origin, headers.get("host"), self._origins, self._host_names):
            return PlainTextResponse(_refused_origin(origin or ""), 403)
        try:
            key = self._keys.identify(presented_key(headers, subprotocols))
        except InferEngineError as error:
            self._metrics.refused()
            return PlainTextResponse(error.message, error.http_status)
        if self._metrics.num_open >= self._max_sockets:
            self._metrics.refused()
            text = f"{self._metrics.num_open} sockets are open, the most that may be."
            return PlainTextResponse(text, 503, {"Retry-After": "1"})
        codec = choose_codec(without_key_subprotocols(subprotocols))
        if codec is None:
            text = f"Speak one of the subprotocols {JSON_SUBPROTOCOL} and {MSGPACK_SUBPROTOCOL}, or name none for JSON."
            return PlainTextResponse(text, 400)
        address = None if client is None else client.host
        return codec, Caller(
            key, self._quotas, SOCKET_PATH, address, headers.get("traceparent", ""), name=secrets.token_hex(8)
        )


def presented_key(headers: Mapping[str, str], subprotocols: Sequence[str]) -> str | None:
    """Return the API key that the client sends, if any."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if "x-api-key" in headers:
        return headers["x-api-key"]
    return next((name.removeprefix(KEY_SUBPROTOCOL) for name in subprotocols if name.startswith(KEY_SUBPROTOCOL)), None)


def without_key_subprotocols(subprotocols: Sequence[str]) -> list[str]:
    """Return the subprotocols that name a protocol."""
    return [name for name in subprotocols if not name.startswith(KEY_SUBPROTOCOL)]


def may_connect(origin: str | None, host: str | None, listed: Sequence[str], names: Sequence[str] = ()) -> bool:
    """Return whether a page may open the socket. `origin` and `host`: the request's headers, None where absent.
    `listed`: the origins of ws.origins. `names`: further names of this server."""
    if origin is None or ANY in listed or origin.lower() in listed:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or name is None or host is None:
        return False
    return parts.netloc.lower() == host.lower() and (is_named(name, names) or _is_local_name(name))


def _refused_origin(origin: str) -> str:
    shown = origin[:200] if _ORIGIN.fullmatch(origin) else "of this page"
    return (
        f"The origin {shown} may not open this server's socket. Open the page under an IP address or localhost, or "
        f"start the server with --ws.origins {shown} (for the server's own host names also --ws.allowed_hosts)."
    )


def _is_local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
