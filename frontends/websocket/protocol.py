"""uvicorn's websocket protocol with one more thing that an application may send: many frames in one write.

A token is a frame of some 80 bytes; a system call and uvicorn's way through ASGI for each cost more than everything
else about it. Only data frames are made here, unmasked and whole (RFC 6455, 5.2); handshake, pings, limits and closing
stay uvicorn's.
"""

from __future__ import annotations

import struct
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

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
    """For uvicorn's `ws` setting."""

    async def send(self, message: Any) -> None:
        """As uvicorn's; returns at once unless the transport's buffer is full."""
        if message["type"] != FRAMES:
            await super().send(message)
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(message["body"])
