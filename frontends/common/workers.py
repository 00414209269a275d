"""Several processes that accept from the same sockets: their parent starts, replaces and stops them.

Knows nothing of what they serve. The parent serves nothing itself, and tells systemd and `inferengine up` of all.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

from frontends.common.notify import notify
from frontends.common.worker_cells import WorkerCells
from inferengine import output
from inferengine.config import watchdog_interval_s
from inferengine.errors import ExitCode
from inferengine.reload import Reload

logger = logging.getLogger(__name__)

SUPERVISED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP}
TURN_S = 0.25
RESTART_AFTER_S = 0.5
FAST_FAILURE_S = 5.0
MAX_FAST_FAILURES = 5


class SignsOfLife:
    """What systemd and `inferengine up` want to hear."""

    def __init__(self, status: str) -> None:
        """`status`: what is done once it is ready, as "serving http://127.0.0.1:8000"."""
        self._status = status
        self._ready = self._stopping = False
        self._interval_s = watchdog_interval_s()
        self._next_s = 0.0

    def turn(self, stopping: bool) -> None:
        """Every worker accepts, and its loop has turned lately."""
        now = time.monotonic()
        if not self._ready:
            self._ready = True
            notify(f"READY=1\nSTATUS={self._status}")
        if stopping and not self._stopping:
            self._stopping = True
            notify("STOPPING=1\nSTATUS=finishing what runs")
        if self._interval_s is not None and now >= self._next_s:
            self._next_s = now + self._interval_s / 2
            notify("WATCHDOG=1")


class Workers:
    """Children that accept from the same sockets. One that dies is replaced; the others go on."""

    def __init__(
        self,
        serve: Callable[[int], int],
        *,
        num_workers: int,
        sockets: Sequence[socket.socket],
        cells: WorkerCells,
        frozen_after_s: float,
        signs: SignsOfLife,
        reload: Reload | None = None,
    ) -> None:
        """`serve(worker)` runs in the child until SIGTERM and returns its exit code; it beats in `cells`, and stands
        still when it has not for `frozen_after_s`."""
        self._serve = serve
        self._num_workers = num_workers
        self._sockets = sockets
        self._cells = cells
        self._frozen_after_s = frozen_after_s
        self._signs = signs
        self._reload = reload
        self._started: dict[int, tuple[int, float]] = {}  # pid -> worker, when
        self._due: dict[int, float] = dict.fromkeys(range(num_workers), 0.0)
        self._fast_failures = 0
        self._stopping = False
        self._code: int = ExitCode.OK

    def run(self) -> int:
        """Until SIGTERM or SIGINT, then until the last worker has ended. Returns an exit code of ExitCode."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISED)
        while self._started or (self._due and not self._stopping):
            now = time.monotonic()
            for worker in [worker for worker, due in self._due.items() if due <= now and not self._stopping]:
                del self._due[worker]
                self._start(worker)
            received = signal.sigtimedwait(SUPERVISED, TURN_S)
            output.retry()
            if received is not None and received.si_signo == signal.SIGHUP:
                self._hang_up()
            elif received is not None and received.si_signo != signal.SIGCHLD:
                self._stop()
            self._reap()
            if self._all_turn() or self._stopping:
                self._signs.turn(self._stopping)
        return self._code

    def _start(self, worker: int) -> None:
        pid = os.fork()
        if pid:
            self._started[pid] = (worker, time.monotonic())
            return
        code: int = ExitCode.CRASH
        try:
            # A terminal's Ctrl-C reaches the whole group: it stays blocked here, for the parent passes it on.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISED - {signal.SIGINT})
            code = self._serve(worker)
        except BaseException:
            logger.exception("a worker failed")
        finally:
            os._exit(code)

    def _hang_up(self) -> None:
        """Pass it on: each worker reads again what it can, and this process its own part."""
        if self._reload is not None:
            self._reload.note()
            self._reload.run_if_due()
        for pid in self._started:
            os.kill(pid, signal.SIGHUP)

    def _stop(self) -> None:
        """Pass it on: the first signal drains the workers, the second ends them."""
        self._stopping = True
        for listener in self._sockets:
            listener.close()
        for pid in self._started:
            os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        while self._started:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            worker, started = self._started.pop(pid, (None, 0.0))
            if worker is None:
                continue
            now = time.monotonic()
            code = os.waitstatus_to_exitcode(status)
            if self._stopping:
                if code == ExitCode.ABORTED:
                    self._code = code
                continue
            logger.error("a worker ended", extra={"fields": {"worker": worker, "exit_code": code}})
            self._fast_failures = self._fast_failures + 1 if now - started < FAST_FAILURE_S else 0
            if self._fast_failures >= MAX_FAST_FAILURES:
                self._code = ExitCode.CRASH
                self._stop()
            self._due[worker] = now + RESTART_AFTER_S

    def _all_turn(self) -> bool:
        oldest = min(self._cells.last_beat(worker) for worker in range(self._num_workers))
        return oldest > 0.0 and time.monotonic() - oldest < self._frozen_after_s
