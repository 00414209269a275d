"""One socket: reads its frames, runs its answers side by side, and leaves nothing behind when it closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from frontends.common.errors import report, scrubbed, unexpected
from frontends.common.json import LARGE, refuse_half_pairs
from frontends.websocket.codec import FRAMES, Codec
from frontends.websocket.engine_state import EngineView
from frontends.websocket.frames import (
    PROTOCOL,
    Ack,
    Cancel,
    Frame,
    Generate,
    Hello,
    Ping,
    Resume,
    Stats,
    id_of,
    read_frame,
)
from frontends.websocket.request import Answer, Caller, Desk
from frontends.websocket.send_channel import Channel, SocketGone
from inferengine.config import Config
from inferengine.errors import InferEngineError

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLOSE_STALLED = 1008
PROTOCOL_REMEDY = "Send frames as docs/websocket.md says."


class Connection:
    """`run()` returns when the socket has closed and everything it started has ended."""

    def __init__(
        self, receive: Receive, send: Send, codec: Codec, desk: Desk, view: EngineView, config: Config, caller: Caller
    ) -> None:
        self._caller = caller
        self._receive, self._asgi_send, self._codec = receive, send, codec
        self._desk, self._view, self._config = desk, view, config
        self._channel = Channel(
            self._write,
            codec,
            most_window=config.ws.send_queue_messages,
            stall_limit_s=config.wire.stall_limit_s,
        )
        self._answers: dict[str, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats: asyncio.Task[None] | None = None
        self._told: dict[str, Any] = {}
        self.draining = False

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    async def run(self) -> None:
        """Serve the socket, which has been accepted."""
        self._spawn(self._channel.pump())
        try:
            self._told = self._view.facts()
            await self._channel.plain({"type": "hello", "protocol": PROTOCOL, **self._told})
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._on_message(message)
        except SocketGone:
            pass
        finally:
            await self._end_tasks()

    def tell(self, facts: dict[str, Any]) -> None:
        """What is true of the engine now: sent when this socket was told something else."""
        if facts != self._told:
            self._told = facts
            self._spawn(self._send_state(facts))

    async def _send_state(self, facts: dict[str, Any]) -> None:
        try:
            await self._channel.plain({"type": "state", **facts})
        except SocketGone:
            return

    # -- frames of the client ----------------------------------------------------------------------------------------

    async def _on_message(self, message: MutableMapping[str, Any]) -> None:
        document: Any = None
        size = len(message.get("text") or message.get("bytes") or b"")
        try:
            document = await self._desk.off_loop.run(size, self._codec.decode, message)
            if isinstance(document, dict) and self._codec.may_hold_half_pairs(message):
                await self._desk.off_loop.run(size, refuse_half_pairs, document)
            await self._on_frame(read_frame(document))
        except InferEngineError as error:
            name = id_of(document)
            await self._error(None if name in self._answers else name, error)
        if size >= LARGE:
            self._desk.off_loop.give_back_soon()

    async def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Generate() | Resume():
                self._start(frame)
            case Cancel():
                if (answer := self._answers.get(frame.id)) is not None:
                    answer.cancel()
            case Ack():
                self._channel.acknowledge(frame.frames)
            case Ping():
                await self._channel.plain({"type": "pong", "nonce": frame.nonce})
            case Stats():
                self._subscribe(frame)
            case Hello():
                window = self._channel.open_window(frame.window)
                await self._channel.plain({"type": "window", "window": window})

    def _start(self, frame: Generate | Resume) -> None:
        if frame.id in self._answers:
            raise InferEngineError("conflict", "a request with this id is open on this socket", field="id")
        if len(self._answers) >= self._config.ws.max_requests:
            raise InferEngineError(
                "rate_limited",
                f"this socket has {len(self._answers)} open requests, the most it may",
                retry_after_s=1.0,
            )
        if self.draining and isinstance(frame, Generate):
            raise InferEngineError("draining", "This server is about to stop.", retry_after_s=1.0)
        counted = contextlib.ExitStack()
        counted.enter_context(self._caller.quotas.request(self._caller.key))
        answer = self._answers[frame.id] = Answer(frame, self._channel, self._desk, self._caller, counted.close)
        task = self._spawn(self._run_answer(answer))
        task.add_done_callback(lambda _: counted.close())  # even if it never ran

    async def _run_answer(self, answer: Answer) -> None:
        failure: InferEngineError | None = None
        try:
            await answer.run()
        except InferEngineError as error:
            report(error, answer.request_id)
            failure = error
        except SocketGone:
            pass
        except Exception:
            logger.exception("an answer failed")
            failure = unexpected()
        finally:
            del self._answers[answer.frame.id]
        if failure is None:
            return
        answer.before_last_frame()
        try:
            await self._error(answer.frame.id, failure)
            if failure.code == "client_stalled":
                await self._channel.flushed()
                await self._send({"type": "websocket.close", "code": CLOSE_STALLED, "reason": failure.message})
        except SocketGone:
            return

    def _subscribe(self, frame: Stats) -> None:
        if self._stats is not None:
            self._stats.cancel()
            self._stats = None
        if frame.subscribe:
            self._stats = self._spawn(self._send_stats(frame.interval_s))

    async def _send_stats(self, interval_s: float) -> None:
        try:
            while True:
                await self._channel.plain(self._view.stats())
                await asyncio.sleep(interval_s)
        except SocketGone:
            return

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _error(self, name: str | None, error: InferEngineError) -> None:
        await self._channel.plain({"type": "error", "id": name, "error": error_frame(error)})

    async def _write(self, frames: bytes) -> None:
        await self._send({"type": FRAMES, "body": frames})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        """Waits while the transport is full. The server raises OSError after a loss and RuntimeError after a close."""
        try:
            await self._asgi_send(message)
        except (OSError, RuntimeError):
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
    """The `error` of an error frame: what is wrong, with which field, and what somebody can do about it."""
    return {
        "code": error.code,
        "message": scrubbed(error.message),
        "field": error.field,
        "retryable": error.kind.retryable,
        "retry_after_s": error.retry_after_s,
        "remedy": PROTOCOL_REMEDY if error.code == "protocol_error" else scrubbed(error.kind.remedy),
    }
