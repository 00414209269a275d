"""One supervised process, started with a listening socket and a notification socket, as systemd starts it.

The child uses systemd's notification protocol (sd_notify(3)): READY=1, STATUS=text, WATCHDOG=1. So engine and front
ends need the same code under `inferengine up` and under the systemd units.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from inferengine.process.system import parent_death_signal

MAX_LINE_BYTES = 64 * 1024
LEAVE_S = 0.5  # how long a child that has given up may take to exit; a call into a device may block it
FIRST_INHERITED_DESCRIPTOR = 3
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that a supervisor sends to its children


class ChildSpec(NamedTuple):
    """What to run.

    `listener` is passed as descriptor 3. `watchdog_s`: seconds without a sign of life after which the child counts as
    frozen; 0: it is not watched. `dies_by`: the signal that the kernel sends when the starting thread has ended.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    listener: socket.socket | None = None
    watchdog_s: float = 0.0
    dies_by: int = signal.SIGTERM


class Notification(NamedTuple):
    """One datagram of sd_notify; `status` is None where it has none."""

    ready: bool
    alive: bool
    status: str | None
    gives_up: bool = False  # WATCHDOG=trigger: the child has found by itself that it no longer works


class Child:
    """One run of a ChildSpec, from start to exit. Knows nothing about restarts, which the supervisor decides."""

    def __init__(self, spec: ChildSpec, folder: Path, now: float) -> None:
        self.spec = spec
        self.started_at = now
        self.last_sign_at: float | None = None
        self.gone_by: float | None = None  # when a child that has given up will be killed
        self.ready = False
        self._pending = b""
        self._notify_path = folder / f"{spec.name}.notify"
        self._notify_path.unlink(missing_ok=True)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.notify.bind(str(self._notify_path))
        self.output, writer = os.pipe()
        os.set_blocking(self.output, False)
        self.pid = self._spawn(writer)
        os.close(writer)

    def _spawn(self, writer: int) -> int:
        parent = os.getpid()
        environment = dict(self.spec.environment)
        for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"):
            environment.pop(name, None)
        environment["NOTIFY_SOCKET"] = str(self._notify_path)
        if self.spec.watchdog_s:
            environment["WATCHDOG_USEC"] = str(int(self.spec.watchdog_s * 1e6))
        tie_to_parent = parent_death_signal(self.spec.dies_by)
        # Until exec the child has this process's signal handlers and wake-up descriptor. A signal to the child would be
        # read here, as a signal to the supervisor, and the child would miss it. So signals are blocked until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        try:  # the child: nothing but system calls until exec
            os.setpgid(0, 0)  # a terminal's Ctrl-C goes only to the supervisor, which passes it on
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the child installs its own handler
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            tie_to_parent()
            if os.getppid() != parent:
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            if self.spec.listener is not None:
                _hand_over(self.spec.listener.fileno())
                environment["LISTEN_PID"] = str(os.getpid())
                environment["LISTEN_FDS"] = "1"
            os.execve(self.spec.command[0], list(self.spec.command), environment)
        finally:
            os._exit(127)

    def read_lines(self) -> list[str] | None:
        """Return the whole lines that the child has written since the last call; None at the end of its output."""
        chunks: list[bytes] = []
        ended = False
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.output, 65536):
                chunks.append(chunk)
                if len(chunks) >= 16:
                    break
            else:
                ended = True
        *lines, self._pending = (self._pending + b"".join(chunks)).split(b"\n")
        if ended and not lines and not self._pending:
            return None
        if ended or len(self._pending) > MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines if line]

    def read_notifications(self, now: float) -> list[Notification]:
        """Return the child's notifications since the last call, oldest first."""
        notifications: list[Notification] = []
        with contextlib.suppress(BlockingIOError):
            while datagram := self.notify.recv(8192):
                notifications.append(parse_notification(datagram))
        for notification in notifications:
            self.ready = self.ready or notification.ready
            if notification.alive or notification.ready:  # as for systemd: it may freeze before its first WATCHDOG=1
                self.last_sign_at = now
            if notification.gives_up:
                self.gone_by = now + LEAVE_S
        return notifications

    def watchdog_expires_at(self) -> float | None:
        """Return when this child will count as frozen without a further sign of life; None before it is ready."""
        if self.gone_by is not None:
            return self.gone_by
        if not self.spec.watchdog_s or not self.ready or self.last_sign_at is None:
            return None
        return self.last_sign_at + self.spec.watchdog_s

    def extend_watchdog(self, paused_s: float, now: float) -> None:
        """Extend the watchdog's time by a pause in which the supervisor itself did not run."""
        if self.last_sign_at is not None:
            self.last_sign_at = min(now, self.last_sign_at + paused_s)

    def kill(self, number: int) -> None:
        """Send a signal. Does nothing if the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self) -> None:
        """Release the descriptors after the child has been reaped."""
        os.close(self.output)
        self.notify.close()
        self._notify_path.unlink(missing_ok=True)


def parse_notification(datagram: bytes) -> Notification:
    """Read one sd_notify datagram: lines of NAME=value; unknown names are ignored."""
    fields = dict(line.partition("=")[::2] for line in datagram.decode("utf-8", "replace").splitlines())
    watchdog = fields.get("WATCHDOG")
    return Notification(fields.get("READY") == "1", watchdog == "1", fields.get("STATUS"), watchdog == "trigger")


def _hand_over(descriptor: int) -> None:
    if descriptor == FIRST_INHERITED_DESCRIPTOR:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(descriptor, FIRST_INHERITED_DESCRIPTOR)
