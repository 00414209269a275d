"""A process and its system: memory, the cache of files, pauses, and what a service tells its supervisor.

glibc keeps memory that was freed; what rare large requests needed is given back to the system. Files that will be read
can be asked for before.

A process does not run while it is stopped (SIGSTOP), its container is frozen or the machine is suspended. Timeouts of
others must not count that time. It shows as a timer that comes late.

Notifier and Watchdog speak systemd's notification protocol (sd_notify(3)): READY=1, STATUS=text, and WATCHDOG=1 as long
as the loop turns.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from inferengine.config import notify_socket, watchdog_interval_s

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
LARGE_BLOCK = 512 * 1024
PR_SET_PDEATHSIG = 1


PAUSE_S = 1.0  # no timer of a process that runs comes so late


def end_with_parent(number: int) -> None:
    """From now on the kernel sends this process the signal when the thread that started it ends. Linux alone has
    this."""
    library = _library()
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def return_large_blocks() -> None:
    """From now on a freed block of LARGE_BLOCK bytes or more goes back to the system at once. By default glibc raises
    that size with every such block, up to 32 MB, and keeps them."""
    library = _library()
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back() -> None:
    """Return free memory to the system: some milliseconds, without the interpreter's lock."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def read_ahead(paths: Iterable[Path]) -> threading.Thread:
    """Have the system read these files into its cache beside whatever this process does next. What cannot be read is
    left to whoever reads it. Returns the thread that asks."""
    thread = threading.Thread(target=_read_ahead, args=(list(paths),), name="inferengine-read-ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: list[Path]) -> None:
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:  # not every file system can
            pass
        finally:
            os.close(file)


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


def missed_s(now: float, due_s: float) -> float:
    """How long this process has not run, where a timer that was due at `due_s` comes now; 0.0 if it has run."""
    late_s = now - due_s
    return late_s if late_s > PAUSE_S else 0.0


# -- sd_notify ---------------------------------------------------------------------------------------------------------


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
