"""Ranks: the processes of ranks 1 and up. Starts them, sends them commands and detects those that are lost.

Each is a child of this process in a process group of its own, so a terminal's Ctrl-C does not reach it. It ends when
its connection closes and, if it hangs, with this process (PR_SET_PDEATHSIG). A rank that ends is noticed at once. A
rank that hangs sends no heartbeats, and counts as lost after SILENT_S. Before warm-up is over silence does not count,
because loading libraries and compiling may block a rank's interpreter for longer.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from inferengine.process.system import missed_s

logger = logging.getLogger(__name__)

# A message is one byte for its kind, then MessagePack or text.
# To a rank, in this order: JOIN once, then CONFIGURE, LOAD, WARM_UP and steps, and after CLOSE perhaps CONFIGURE again.
JOIN = b"J"  # the store's path: exchange addresses
CONFIGURE = b"C"  # the configuration by section
LOAD = b"L"
WARM_UP = b"W"
STEP = b"S"  # a StepPlan
MASKS = b"M"  # masks of the latest step
ADD_ADAPTER = b"A"  # the name of its folder
REMOVE_ADAPTER = b"R"  # its number
CLOSE = b"X"  # drop the model
# From a rank.
BEAT = b"B"
FAILED = b"F"  # the reason; a rank's last message

BEAT_S = 0.5  # between two heartbeats
SILENT_S = 3.5
LEAVE_S = 3.0  # how long the ranks may take to end by themselves
EXPLAIN_S = 1.0  # how long rank 0 waits for another rank's message after an error of its own
LOADING_S = 2.0  # how long to wait for rank 0's own, clearer error: most loading errors happen on all ranks


class Ranks:
    """The processes of ranks 1 to `size` - 1. `send` belongs to one thread; `on_lost` is called once, in another."""

    def __init__(self, size: int) -> None:
        """Start the processes. They import torch in the background."""
        self.size = size
        self.lost: str | None = None  # why the ranks are lost; None: they are not
        self.serving = False  # whether a silent rank counts as lost
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._lost = threading.Event()
        self._closing = False
        self._busy = False  # whether any command was sent
        self._store = os.memfd_create("ranks")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(1, size):
            ours, theirs = Pipe()
            arguments = (rank, size, theirs.fileno(), os.getpid())
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "inferengine.executor.parallel.worker", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._store),
                    process_group=0,
                )
            )
            theirs.close()
            self._connections.append(ours)
        for connection in self._connections:
            connection.send_bytes(JOIN + self.store.encode())
        self._watcher = threading.Thread(target=self._watch, name="inferengine-ranks", daemon=True)
        self._watcher.start()

    @property
    def store(self) -> str:
        """Path of the file through which the ranks find each other; the same in all of them."""
        return f"/proc/self/fd/{self._store}"

    @property
    def pids(self) -> list[int]:
        """Process ids, from rank 1 on."""
        return [process.pid for process in self._processes]

    def send(self, message: bytes) -> None:
        """Send a message to all ranks. A lost rank is ignored here; the watcher detects it."""
        self._busy = True
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(message)

    def explain(self) -> str | None:
        """Return why the ranks are lost, or None. For an error of rank 0 that another rank may have caused."""
        self._lost.wait(EXPLAIN_S)
        return self.lost

    def close(self) -> None:
        """End the processes. May be called repeatedly."""
        self._closing = True
        for connection in self._connections:
            with suppress(OSError):
                connection.close()
        self._end(LEAVE_S if self._busy else 0.0)  # a process that still imports torch can be killed
        if self._store >= 0:
            os.close(self._store)
            self._store = -1

    # -- the watcher's thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen_s = dict.fromkeys(self._connections, time.monotonic())
        was_serving = False
        while not self._closing:
            due_s = time.monotonic() + BEAT_S
            try:
                ready = wait(self._connections, BEAT_S)
            except OSError:
                return  # closed meanwhile
            now = time.monotonic()
            paused_s = missed_s(now, due_s)
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    self._lose(f"rank {1 + self._connections.index(connection)} has ended")
                    return
                if message[:1] == FAILED:
                    reason = message[1:].decode("utf-8", "replace")
                    self._lose(f"rank {1 + self._connections.index(connection)} failed: {reason}")
                    return
                if message == BEAT:
                    seen_s[connection] = now
            if not self.serving or not was_serving:
                seen_s = dict.fromkeys(self._connections, now)
            was_serving = self.serving
            for index, connection in enumerate(self._connections):
                seen_s[connection] += paused_s  # do not count time in which this process did not run either
                if now - seen_s[connection] > SILENT_S:
                    self._lose(f"rank {1 + index} gave no sign of life for {SILENT_S:g} s")
                    return

    def _lose(self, reason: str) -> None:
        if self._closing:
            return
        self.lost = reason
        if not self.serving:
            self._lost.set()
            time.sleep(LOADING_S)
            if self._closing:
                return
        logger.critical("tensor parallelism: %s", reason)
        self.on_lost(reason)
        self._lost.set()
        self._end(0.0)

    def _end(self, leave_s: float) -> None:
        """Wait for the processes, and kill those that do not end in time."""
        deadline_s = time.monotonic() + leave_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # killed, but still inside a call of the driver
                process.wait(LEAVE_S)
