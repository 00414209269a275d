"""The frames that go out on one socket, and flow control for a reader that is slower than the engine.

Frames of one iteration of the event loop leave in one write, by a pump task for each socket.

Two limits, and no queue behind either. The transport's: while the socket's buffer is full the pump waits, and with it
every stream. The client's: after `hello {window}` at most `window` output frames stay unacknowledged. A stream that
must wait is not read: its tokens merge upstream, and its next frame carries more. Output frames are counted, not
numbered. Requests are unknown here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from frontends.websocket.codec import Codec, frame_head
from inferengine.errors import InferEngineError, InvalidRequest

Write = Callable[[bytes], Awaitable[None]]


class SocketGone(Exception):
    """The connection ended while something was to be sent."""


class SendChannel:
    """Encodes frames and writes them in order, with the flow control of the module's docstring."""

    def __init__(self, write: Write, codec: Codec, *, max_window: int, stall_limit_s: float) -> None:
        """`write` waits while the transport is full and raises SocketGone when it is closed. `max_window`: the largest
        window that a client gets. `stall_limit_s`: how long it may acknowledge nothing."""
        self._write = write
        self._codec = codec
        self._queued: list[bytes] = []  # heads and payloads of the next write
        self._due = asyncio.Event()
        self._free = asyncio.Event()  # the transport accepts more
        self._free.set()
        self._gone = False
        self._max_window = max_window
        self._stall_limit_s = stall_limit_s
        self._window = 0  # 0: the client acknowledges nothing
        self._num_output = 0
        self._num_acknowledged = 0
        self._room = asyncio.Event()
        self._room.set()

    async def pump(self) -> None:
        """Write queued frames forever. Every socket needs one pump."""
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                frames, self._queued = self._queued, []
                self._free.clear()
                await self._write(b"".join(frames))
                self._free.set()
        except SocketGone:
            self._gone = True
        finally:
            self._free.set()

    async def flushed(self) -> None:
        """Wait until everything so far has been written. Raises SocketGone."""
        while self._queued or not self._free.is_set():
            self._check()
            await self._free.wait()
            await asyncio.sleep(0)

    def open_window(self, window: int) -> int:
        """Expect acknowledgements from now on (0: no longer). Returns the window that is granted."""
        self._window = min(window, self._max_window)
        self._room.set()
        return self._window

    def acknowledge(self, num_frames: int) -> None:
        """Record that the client has handled `num_frames` output frames in all. Raises InvalidRequest for too many."""
        if num_frames > self._num_output:
            raise InvalidRequest("frames", f"only {self._num_output} delta and done frames were sent")
        self._num_acknowledged = max(self._num_acknowledged, num_frames)
        self._room.set()

    @property
    def is_full(self) -> bool:
        """Whether an output frame has to wait for `wait_for_room`, which also raises when there will be none."""
        window = self._window
        full = window and self._num_output - self._num_acknowledged >= window
        return bool(full) or self._gone or not self._free.is_set()

    async def wait_for_room(self) -> None:
        """Wait until an output frame may go out. Raises client_stalled and SocketGone."""
        if not self._free.is_set():
            await self._free.wait()
        self._check()
        while self._window and self._num_output - self._num_acknowledged >= self._window:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), self._stall_limit_s)
            except TimeoutError:
                raise InferEngineError(
                    "client_stalled", f"{self._window} frames were left unacknowledged for {self._stall_limit_s:g} s"
                ) from None

    def delta_head(self, name: str, choice: int) -> bytes:
        """Return the constant beginning of a choice's short delta frames."""
        return self._codec.delta_head(name, choice)

    def delta(self, head: bytes, cursor: int, text: str) -> None:
        """Send the next text of a choice. `cursor`: its tokens so far."""
        self._num_output += 1
        self._put(self._codec.encode_delta(head, cursor, text))

    def delta_with(self, name: str, choice: int, cursor: int, text: str, extra: Mapping[str, Any]) -> None:
        """Send a delta with more than text: token ids, logprobs, tool calls."""
        self._num_output += 1
        frame = {"type": "delta", "id": name, "choice": choice, "cursor": cursor, "text": text}
        self._put(self._codec.encode({**frame, **extra}))

    def done(self, frame: Mapping[str, Any]) -> None:
        """Send the last output frame of a choice."""
        self._num_output += 1
        self._put(self._codec.encode(frame))

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame that is no output of a request. Waits while the transport is full."""
        if not self._free.is_set():
            await self._free.wait()
        self._put(self._codec.encode(frame))

    def _put(self, payload: bytes) -> None:
        self._check()
        self._queued.append(frame_head(self._codec.opcode, len(payload)))
        self._queued.append(payload)
        self._due.set()

    def _check(self) -> None:
        if self._gone:
            raise SocketGone
