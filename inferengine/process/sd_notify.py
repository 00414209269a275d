"""systemd's notification protocol (sd_notify(3)), and the watchdog that a turning loop feeds."""

from __future__ import annotations

import socket
from collections.abc import Callable

from inferengine.config import notify_socket, watchdog_interval_s


class Notifier:
    """Sends READY=1, STATUS=..., WATCHDOG=1, STOPPING=1; does nothing without an address. Safe from any thread."""

    def __init__(self, address: str | None) -> None:
        self._path = None if address is None else ("\0" + address[1:] if address.startswith("@") else address)
        self._socket: socket.socket | None = None
        if self._path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._status = ""

    @classmethod
    def from_environment(cls) -> Notifier:
        """A notifier for $NOTIFY_SOCKET."""
        return cls(notify_socket())

    def send(self, *lines: str) -> None:
        """Send one datagram. A supervisor that is gone or busy is ignored."""
        if self._socket is None or self._path is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._path)
        except OSError:
            return

    def status(self, text: str) -> None:
        """Send a status line, if it is another than the last."""
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Watchdog:
    """Sends WATCHDOG=1 twice an interval, as long as `feed` is called at each turn of the loop."""

    def __init__(self, notifier: Notifier, interval_s: float | None, clock: Callable[[], float]) -> None:
        self._notifier = notifier
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = 0.0

    @classmethod
    def from_environment(cls, notifier: Notifier, clock: Callable[[], float]) -> Watchdog:
        """A watchdog with the interval of $WATCHDOG_USEC."""
        return cls(notifier, watchdog_interval_s(), clock)

    def feed(self) -> None:
        """The loop has turned: send WATCHDOG=1 if it is due."""
        if self._interval_s is None:
            return
        now = self._clock()
        if now >= self._due_s:
            self._due_s = now + self._interval_s / 2
            self._notifier.send("WATCHDOG=1")
