"""Standard output and error of a service: writing to them never fails and never waits.

A log must not stop the service. A line that cannot be written now waits in bounded memory (a pipe or terminal that is
not read) or is dropped and counted (a full disk, a reader that is gone). Writing is tried again with each line and each
`retry`. When it works again, a notice tells first how many lines were lost.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime

MOST_WAITING_BYTES = 256 * 1024
CHUNK_BYTES = select.PIPE_BUF  # bytes that a pipe that is ready for writing takes without blocking
FINISH_S = 1.0


class NonBlockingStream(io.TextIOBase):
    """A text stream over a descriptor that never blocks. A line is written completely or not at all."""

    def __init__(self, descriptor: int) -> None:
        self.num_lost = 0  # lines, in all
        self.json_lines = False
        self._inherited = descriptor
        self._descriptor = not_blocking(descriptor)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._line: list[str] = []  # text of an unfinished line that was not flushed
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0  # lines since the last successful write
        self._reason = ""
        self._begun = False  # a part of the first waiting line was written
        self._torn = False  # the end of the last written line was lost
        self._lock = threading.RLock()  # a signal handler may write while its thread does

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8, whatever the locale."""
        return "utf-8"

    def fileno(self) -> int:
        """Return the descriptor that the process inherited."""
        return self._inherited

    def isatty(self) -> bool:
        """Return whether that descriptor is a terminal."""
        return os.isatty(self._inherited)

    def writable(self) -> bool:
        """Return True always: what cannot be written is counted as lost."""
        return True

    @property
    def waits(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._waiting)

    def write(self, text: str) -> int:
        """Add text, which is written when a line ends. Never blocks, and never raises for a reader that is gone."""
        with self._lock:
            self._line.append(text)
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Write as much as the descriptor takes; the rest waits."""
        with self._lock:
            data = "".join(self._line).encode("utf-8", "backslashreplace")
            self._line.clear()
            if data:
                self._add(data)
            self._send()

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Wait up to `timeout_s` for a slow reader, before the process ends."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._waiting and (left_s := deadline - time.monotonic()) > 0:
            self._poll.poll(left_s * 1e3)
            self._send()

    def _add(self, data: bytes) -> None:
        if self._waiting_bytes + len(data) > MOST_WAITING_BYTES:
            self._lose(data.count(b"\n"), "nobody reads it")
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    def _send(self) -> None:
        with self._lock:
            while self._waiting and self._poll.poll(0):
                try:
                    self._send_some()
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as error:
                    self._drop_all(error.strerror or type(error).__name__)
                    return

    def _send_some(self) -> None:
        """Write a part of the first waiting line, or the notice about lost lines before it."""
        if not self._begun and (notice := b"\n" * self._torn + self._notice()):
            self._torn = os.write(self._descriptor, notice) < len(notice)
            if not self._torn:
                self._lost = 0
            return
        data = self._waiting[0]
        written = os.write(self._descriptor, data[:CHUNK_BYTES])
        self._waiting_bytes -= written
        self._begun = written < len(data)
        if self._begun:
            self._waiting[0] = data[written:]
        else:
            self._waiting.popleft()

    def _drop_all(self, reason: str) -> None:
        """Drop all waiting lines, which would fail as well. Later ones are tried again."""
        self._lose(sum(data.count(b"\n") for data in self._waiting), reason)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._torn, self._begun = self._torn or self._begun, False

    def _lose(self, count: int, reason: str) -> None:
        self._lost += count
        self.num_lost += count
        self._reason = reason

    def _notice(self) -> bytes:
        if not self._lost:
            return b""
        message = f"{self._lost} line{'s' * (self._lost != 1)} of this log could not be written: {self._reason}"
        if self.json_lines:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = {"time": now, "level": "warning", "logger": __name__, "message": message, "lost_lines": self._lost}
            return json.dumps(line).encode() + b"\n"
        return f"inferengine: {message}\n".encode()


def protect(*, json_lines: bool = False) -> None:
    """Replace standard output and error by NonBlockingStreams, unless they were replaced before."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = _protected(1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _protected(2)
    for output in _outputs():
        output.json_lines = json_lines


def retry() -> bool:
    """Write waiting lines as far as possible. Call it from a timer. Returns whether lines still wait."""
    for output in _outputs():
        if output.waits:
            output.flush()
    return any(output.waits for output in _outputs())


def finish() -> None:
    """Give slow readers a moment to take what waits. The last call of a process."""
    for output in _outputs():
        output.finish()


def _protected(descriptor: int) -> NonBlockingStream:
    try:
        os.fstat(descriptor)
    except OSError:  # it was closed by whoever started this process
        descriptor = os.open(os.devnull, os.O_WRONLY)
    output = NonBlockingStream(descriptor)
    atexit.register(output.finish)
    return output


def _outputs() -> list[NonBlockingStream]:
    return [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, NonBlockingStream)]


def not_blocking(descriptor: int) -> int:
    """Return a non-blocking descriptor for a pipe or a terminal.

    It is opened anew, because the inherited open file is shared with other processes that may rely on blocking writes.
    Returns the inherited descriptor if that is not possible, and for files, which never block.
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode) and not os.isatty(descriptor):
        return descriptor
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return descriptor
