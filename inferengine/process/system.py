"""Calls to the operating system: freeing memory, reading files ahead, detecting pauses, notifying the supervisor.

glibc keeps memory that was freed; functions here return it to the system after large requests. Files can be read into
the page cache before they are needed.

A process does not run while it is stopped (SIGSTOP), its container is frozen or the machine is suspended. Its timeouts
for other processes must not count that time. A timer that fires late reveals it.

Notifier and Watchdog use systemd's notification protocol (sd_notify(3)): READY=1, STATUS=text, and WATCHDOG=1 as long
as the loop makes progress.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from inferengine.config import notify_socket, watchdog_interval_s

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
LARGE_BLOCK = 512 * 1024
PR_SET_PDEATHSIG = 1  # prctl(2)


PAUSE_S = 1.0  # a timer that is later than this means that the process did not run


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: those that it is bound to, less what the control groups (version 2)
    above it allow. `root`: the folder of /proc and /sys, for tests."""
    cores = float(len(os.sched_getaffinity(0)))
    top = root / "sys/fs/cgroup"
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return cores
    own = top / next((entry.removeprefix("0::").strip("/") for entry in entries if entry.startswith("0::")), "")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(top):
            break
        try:
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            cores = min(cores, int(quota) / int(period))
        except (OSError, ValueError):  # there is no limit: the word max, or no such file
            continue
    return cores


def end_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when the thread that started it ends. Only on Linux."""
    parent_death_signal(number)()


def parent_death_signal(number: int) -> Callable[[], object]:
    """Return a function that does what `end_with_parent` does by one system call, for a child between fork and exec."""
    library = _library()
    if not hasattr(library, "prctl"):
        return lambda: None
    return partial(library.prctl, PR_SET_PDEATHSIG, number, 0, 0, 0)


def return_large_blocks() -> None:
    """Make glibc return freed blocks of LARGE_BLOCK bytes or more to the system at once.

    By default glibc raises that threshold with every such block, up to 32 MB, and keeps the memory.
    """
    library = _library()
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back() -> None:
    """Return free memory to the system. Takes some milliseconds, without the interpreter's lock."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def read_ahead(paths: Iterable[Path]) -> threading.Thread:
    """Read these files into the system's page cache in the background. Returns the thread that does it.

    Files that cannot be read are skipped; the error appears where they are read for use.
    """
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
    """Return how long this process did not run, given that a timer due at `due_s` fires at `now`; 0.0 if it ran."""
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
        """Create a notifier for $NOTIFY_SOCKET."""
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
        """Send a status line, unless it is the same as the last one."""
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Watchdog:
    """Sends WATCHDOG=1 twice in each interval, as long as the loop calls `feed` at each turn."""

    def __init__(self, notifier: Notifier, interval_s: float | None, clock: Callable[[], float]) -> None:
        self._notifier = notifier
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = 0.0

    @classmethod
    def from_environment(cls, notifier: Notifier, clock: Callable[[], float]) -> Watchdog:
        """Create a watchdog with the interval of $WATCHDOG_USEC."""
        return cls(notifier, watchdog_interval_s(), clock)

    def feed(self) -> None:
        """Send WATCHDOG=1 if it is due. To be called at each turn of the loop."""
        if self._interval_s is None:
            return
        now = self._clock()
        if now >= self._due_s:
            self._due_s = now + self._interval_s / 2
            self._notifier.send("WATCHDOG=1")
