"""One socket: reads its frames, runs its requests concurrently, and ends everything it started when it closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from frontends.common.errors import report, scrubbed, unexpected
from frontends.common.json import LARGE, refuse_half_pairs
from frontends.websocket.codec import FRAMES, Codec
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
from frontends.websocket.send_channel import SendChannel, SocketGone
from frontends.websocket.socket_request import Caller, Services, SocketRequest
from inferengine.errors import InferEngineError

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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
            self._write,
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
        try:
            await self._error(request.frame.id, failure)
            if failure.code == "client_stalled":
                await self._channel.flushed()
                await self._send({"type": "websocket.close", "code": CLOSE_STALLED, "reason": failure.message})
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

    async def _write(self, frames: bytes) -> None:
        await self._send({"type": FRAMES, "body": frames})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        """Send an ASGI message, waiting while the transport is full. Raises SocketGone."""
        try:
            await self._asgi_send(message)
        except (OSError, RuntimeError):  # uvicorn's: after a loss, and after a close
            raise SocketGone from None

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
