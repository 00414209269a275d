"""systemd's notification protocol (sd_notify(3)) in one function. Knows nothing of asyncio."""

from __future__ import annotations

import socket

from inferengine.config import notify_socket


def notify(message: str) -> bool:
    """Send `READY=1`, `STOPPING=1`, `WATCHDOG=1`, `STATUS=...`. False when nobody listens."""
    address = notify_socket()
    if not address:
        return False
    path = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(message.encode(), path)
        except OSError:
            return False
    return True
