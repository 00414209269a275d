"""uvicorn's websocket protocol with one more thing that an application may send: many frames in one write.

A token is a frame of some 80 bytes; a system call and uvicorn's way through ASGI for each cost more than everything
else about it. Only data frames are made here, unmasked and whole (RFC 6455, 5.2); handshake, pings, limits and closing
stay uvicorn's.
"""

from __future__ import annotations

import struct
from asyncio.transports import BaseTransport
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from frontends.common.http_protocol import HttpProtocol, ProbesOnly

FRAMES = "inferengine.frames"  # the ASGI event's type; `body` holds whole frames
TEXT, BINARY = 0x81, 0x82  # the first byte of a whole message in one frame


def frame_head(opcode: int, num_bytes: int) -> bytes:
    """What precedes a payload of so many bytes."""
    if num_bytes < 126:
        return bytes((opcode, num_bytes))
    return (
        struct.pack(">BBH", opcode, 126, num_bytes)
        if num_bytes < 65_536
        else struct.pack(">BBQ", opcode, 127, num_bytes)
    )


class FramesProtocol(WebSocketsSansIOProtocol):
    """For uvicorn's `ws` setting, behind `frontends.common.acceptor`."""

    def connection_made(self, transport: BaseTransport) -> None:
        """A connection that spoke HTTP before: it goes on being counted, as one that is answered."""
        super().connection_made(transport)
        before = transport.get_protocol()
        assert isinstance(before, HttpProtocol)
        self._connections, self._connection = before.connections_here, before.connection
        if self._connection.is_probe:
            self.app: Any = ProbesOnly(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.lost(self._connection)
        super().connection_lost(exc)

    async def send(self, message: Any) -> None:
        """As uvicorn's; returns at once unless the transport's buffer is full."""
        if message["type"] != FRAMES:
            await super().send(message)
            if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
                self.handshake_complete = self.close_sent = True  # refused, and no failure to be logged
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(message["body"])
