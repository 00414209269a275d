"""Frames as websocket messages, both ways, and what goes out on one socket, with flow control for a slow reader.

The subprotocol chooses the codec: JSON in text messages, msgpack in binary ones.

A token is a frame of some 80 bytes; a system call and uvicorn's way through ASGI for each would cost more than
everything else about it. So websocket data frames are made here, unmasked and whole (RFC 6455, 5.2), and
`FramesProtocol` sends many in one write. Handshake, pings, limits and closing stay uvicorn's.

`SendChannel`: the frames of one iteration of the event loop leave in one write, by a pump task for each socket. There
are two limits, and no queue behind either. The transport's: while the socket's buffer is full the pump waits, and with
it every stream. The client's: after `hello {window}` at most `window` output frames stay unacknowledged. A stream that
must wait is not read: its tokens merge upstream, and its next frame carries more. Output frames are counted, not
numbered. Requests are unknown here.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from asyncio.transports import BaseTransport
from collections.abc import Awaitable, Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

import msgpack
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from frontends.common import json as json_text
from frontends.common.piece_reader import PieceReader
from frontends.common.server import HttpProtocol, ProbesOnly
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.wire.messages import msgpack_problem

FRAMES = "inferengine.frames"  # the ASGI event's type; `body` holds whole frames
MOST_FRAGMENTS = 4096
TOO_BIG = 1009  # close code (RFC 6455, 7.4.1)
TEXT, BINARY = 0x81, 0x82  # the first byte of a whole message in one frame
JSON_SUBPROTOCOL = "inferengine.v1.json"
MSGPACK_SUBPROTOCOL = "inferengine.v1.msgpack"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TEXT_KEY = msgpack.packb("text")
_NO_TEXT = b"".join((msgpack.packb(0), _TEXT_KEY, msgpack.packb("")))


class Codec(Protocol):
    """Encodes and decodes the frames of one subprotocol."""

    subprotocol: str
    opcode: int  # of its websocket frames

    def decode(self, message: Mapping[str, Any]) -> Any:
        """Decode an ASGI websocket.receive event. Raises InferEngineError protocol_error and request_too_large."""

    def may_hold_half_pairs(self, message: Mapping[str, Any]) -> bool:
        """Return whether strings of the document may contain half of a surrogate pair, which is not valid text."""

    def encode(self, frame: Mapping[str, Any]) -> bytes:
        """Encode any frame as a message's payload."""

    def delta_head(self, name: str, choice: int) -> bytes:
        """Return the constant beginning of a choice's delta frames."""

    def encode_delta(self, head: bytes, cursor: int, text: str) -> bytes:
        """Encode a delta frame, nearly all of the traffic, without making a dictionary."""


class JsonCodec:
    """JSON in text messages."""

    subprotocol = JSON_SUBPROTOCOL
    opcode = TEXT

    def decode(self, message: Mapping[str, Any]) -> Any:
        """Decode a websocket.receive event. Raises InferEngineError."""
        text = message.get("text")
        if text is None:
            raise _broken("this socket speaks JSON in text messages; binary ones need the msgpack subprotocol")
        try:
            document = json_text.parse(text, parse_constant=_no_constant)
        except RecursionError:
            raise _broken("the JSON is nested too deep") from None
        except _NoJson as error:
            raise _broken(f"not valid JSON: {error}") from None
        except json.JSONDecodeError as error:
            raise _broken(f"not valid JSON at position {error.pos}: {error.msg}") from None
        except json_text.TooManyContainers as error:
            raise _too_many(error) from None
        except ValueError:
            raise _broken("not valid JSON: a number has thousands of digits") from None
        return document

    def may_hold_half_pairs(self, message: Mapping[str, Any]) -> bool:
        """Return whether an escaped surrogate is in the text."""
        return _SURROGATE.search(message.get("text") or "") is not None

    def encode(self, frame: Mapping[str, Any]) -> bytes:
        """Encode any frame."""
        return json.dumps(frame, separators=(",", ":")).encode()

    def delta_head(self, name: str, choice: int) -> bytes:
        """Return the constant beginning of a choice's delta frames."""
        return f'{{"type":"delta","id":{encode_basestring_ascii(name)},"choice":{choice},"cursor":'.encode()

    def encode_delta(self, head: bytes, cursor: int, text: str) -> bytes:
        """Encode a delta frame."""
        return b'%b%d,"text":%b}' % (head, cursor, encode_basestring_ascii(text).encode())


class MsgpackCodec:
    """msgpack in binary messages."""

    subprotocol = MSGPACK_SUBPROTOCOL
    opcode = BINARY

    def decode(self, message: Mapping[str, Any]) -> Any:
        """Decode a websocket.receive event. Raises InferEngineError."""
        body = message.get("bytes")
        if body is None:
            raise _broken("this socket speaks msgpack in binary messages")
        try:
            count = json_text.Containers() if len(body) >= json_text.LARGE else None
            return msgpack.unpackb(
                body, raw=False, strict_map_key=True, ext_hook=_no_extension, list_hook=count, object_hook=count
            )
        except json_text.TooManyContainers as error:
            raise _too_many(error) from None
        except (ValueError, RecursionError, msgpack.UnpackException) as error:
            raise _broken(f"not valid msgpack: {msgpack_problem(error)}") from None

    def may_hold_half_pairs(self, message: Mapping[str, Any]) -> bool:
        """Return False: msgpack strings are valid UTF-8."""
        return False

    def encode(self, frame: Mapping[str, Any]) -> bytes:
        """Encode any frame."""
        return bytes(msgpack.packb(frame))

    def delta_head(self, name: str, choice: int) -> bytes:
        """Return the constant beginning of a choice's delta frames."""
        whole: bytes = msgpack.packb({"type": "delta", "id": name, "choice": choice, "cursor": 0, "text": ""})
        return whole.removesuffix(_NO_TEXT)

    def encode_delta(self, head: bytes, cursor: int, text: str) -> bytes:
        """Encode a delta frame."""
        return b"".join((head, msgpack.packb(cursor), _TEXT_KEY, msgpack.packb(text)))


def choose_codec(offered: list[str]) -> Codec | None:
    """Return the codec of the first known subprotocol offered; JSON where none is offered, None where none is known."""
    for name in offered:
        if name == JSON_SUBPROTOCOL:
            return JsonCodec()
        if name == MSGPACK_SUBPROTOCOL:
            return MsgpackCodec()
    return None if offered else JsonCodec()


def frame_head(opcode: int, num_bytes: int) -> bytes:
    """Return the header of an unmasked websocket frame with a payload of `num_bytes`."""
    if num_bytes < 126:
        return bytes((opcode, num_bytes))
    return (
        struct.pack(">BBH", opcode, 126, num_bytes)
        if num_bytes < 65_536
        else struct.pack(">BBQ", opcode, 127, num_bytes)
    )


class FramesProtocol(WebSocketsSansIOProtocol):
    """uvicorn's websocket protocol with an ASGI event FRAMES that writes whole frames. For uvicorn's `ws` setting.

    What a client sends is parsed in pieces (frontends/common/piece_reader.py), and not while messages wait to be
    received, nor while the client takes nothing: its pings would be answered into memory. A message has at most
    MOST_FRAGMENTS fragments, because empty ones count for nothing in its size."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pieces = PieceReader(super().data_received, lambda: not self.read_paused and self.writable.is_set())

    def connection_made(self, transport: BaseTransport) -> None:
        """Take over a connection from HTTP. It stays counted, as one that is answered."""
        super().connection_made(transport)
        self._pieces.begin(self.transport)
        before = transport.get_protocol()
        assert isinstance(before, HttpProtocol)
        self._connections, self._connection = before.tracker, before.connection
        before.release()
        if self._connection.is_probe:
            self.app: Any = ProbesOnly(self.app)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, or a first piece of it."""
        self._pieces.take(data)

    def pause_writing(self) -> None:
        """Stop reading too, as the transport's buffer is full."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._pieces.go_on()

    async def receive(self) -> Any:
        """Return the next ASGI event. Once the last one that waits is taken, more is parsed, or read."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._pieces.go_on()
        return message

    def handle_cont(self, event: Any) -> None:
        """Take in a further fragment of a message; close the connection at one too many."""
        if self.close_sent:
            return
        if len(self.frames) >= MOST_FRAGMENTS:
            self.frames = []
            self.conn.send_close(TOO_BIG, f"a message has more than {MOST_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counted ones."""
        self._pieces.end()
        self._connections.lost(self._connection)
        super().connection_lost(exc)
        self.conn.parser.close()  # a generator that refers to `conn`, which refers to it

    async def send(self, message: Any) -> None:
        """Send an ASGI event. FRAMES returns at once unless the transport's buffer is full. Raises
        ClientDisconnected."""
        if message["type"] != FRAMES:
            await super().send(message)
            self._pieces.go_on()  # after a close uvicorn waits for the peer's
            if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
                self.handshake_complete = self.close_sent = True  # refused: uvicorn is not to log a failure
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(message["body"])


class _NoJson(ValueError):
    """A number that Python reads and JSON does not have: NaN, Infinity."""


def _broken(message: str) -> InferEngineError:
    return InferEngineError("protocol_error", message)


def _too_many(error: json_text.TooManyContainers) -> InferEngineError:
    return InferEngineError("request_too_large", f"the frame has {error}")


def _no_constant(name: str) -> Any:
    raise _NoJson(f"{name} is not a number that JSON has")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError("extension types are refused")


Write = Callable[[bytes], Awaitable[None]]


# -- sending -----------------------------------------------------------------------------------------------------------


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
