"""What goes out on one socket, and the brakes for a reader that is slower than the engine.

Two brakes, and no queue behind either. The transport's: the server's send waits while the socket's buffer is full. The
client's own: after `hello {window}` at most `window` output frames stay unacknowledged. A stream that must wait is
simply not read; the tokens merge upstream and the next frame carries more. Output frames are counted, not numbered:
what two requests send while the transport is full may leave in either order. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from frontends.websocket.codec import Codec
from inferengine.errors import InferEngineError, InvalidRequest

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Channel:
    """`most_window` bounds what a client may ask for; `stall_limit_s` how long it may acknowledge nothing."""

    def __init__(self, send: Send, codec: Codec, *, most_window: int, stall_limit_s: float) -> None:
        self._send = send
        self._codec = codec
        self._most_window = most_window
        self._stall_limit_s = stall_limit_s
        self._window = 0  # 0: the client does not acknowledge
        self._num_output = 0
        self._num_acknowledged = 0
        self._room = asyncio.Event()
        self._room.set()

    def open_window(self, window: int) -> int:
        """Acknowledge from now on (0: no longer). Returns the window granted."""
        self._window = min(window, self._most_window)
        self._room.set()
        return self._window

    def acknowledge(self, num_frames: int) -> None:
        """So many output frames of this socket were handled, in all. Raises InvalidRequest for more than were sent."""
        if num_frames > self._num_output:
            raise InvalidRequest("frames", f"only {self._num_output} delta and done frames were sent")
        self._num_acknowledged = max(self._num_acknowledged, num_frames)
        self._room.set()

    async def room(self) -> None:
        """Return when an output frame may go out. Raises client_stalled."""
        while self._window and self._num_output - self._num_acknowledged >= self._window:
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), self._stall_limit_s)
            except TimeoutError:
                raise InferEngineError(
                    "client_stalled", f"{self._window} frames were left unacknowledged for {self._stall_limit_s:g} s"
                ) from None

    async def delta(self, name: str, choice: int, cursor: int, text: str, extra: Mapping[str, Any] | None) -> None:
        """The next text of a choice; `cursor` counts its tokens so far, `extra` has token ids and logprobs."""
        self._num_output += 1
        if extra is None:
            await self._send(self._codec.encode_delta(name, choice, cursor, text))
        else:
            frame = {"type": "delta", "id": name, "choice": choice, "cursor": cursor, "text": text}
            await self._send(self._codec.encode({**frame, **extra}))

    async def done(self, frame: Mapping[str, Any]) -> None:
        """The last output frame of a choice."""
        self._num_output += 1
        await self._send(self._codec.encode(frame))

    async def plain(self, frame: Mapping[str, Any]) -> None:
        """Any frame that is no output of a request."""
        await self._send(self._codec.encode(frame))
