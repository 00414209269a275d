"""Worker processes that accept connections from the same sockets, and their parent, which starts and replaces them.

The parent serves no requests; it reports to systemd or `inferengine up` for all workers. WorkerCells are numbers that
the workers share: an anonymous mapping made before the fork. Each worker writes only its own cells, so any worker can
answer for all without a lock.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

from inferengine.errors import ExitCode
from inferengine.process import stdio
from inferengine.process.reload import Reload
from inferengine.process.system import Notifier, Watchdog, missed_s

logger = logging.getLogger(__name__)

_DOUBLE = 8  # bytes
SUPERVISED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP}
TURN_S = 0.25
KILL_MARGIN_S = 10.0  # on top of `frozen_after_s`, before a frozen worker is killed
RESTART_AFTER_S = 0.5
FAST_FAILURE_S = 5.0
MAX_FAST_FAILURES = 5
CORES_PER_WORKER = 4  # the others compute, launch and send
MOST_CHOSEN = 4  # workers: each makes every step's messages more


def choose_num_workers(configured: int, cores: float) -> int:
    """Return how many workers serve: as configured, or as this many cores feed where that is 0."""
    return configured or max(1, min(MOST_CHOSEN, int(cores / CORES_PER_WORKER)))


class WorkerCells:
    """Shared memory with `num_cells` doubles for each worker, 0.0 at first. `own` are the cells of `worker`."""

    def __init__(self, num_cells: int, num_workers: int = 1) -> None:
        self.num_cells = num_cells
        self.num_workers = num_workers
        self._size = num_cells + 1  # the last one is the time at which the worker's event loop last turned
        self._memory = mmap.mmap(-1, num_workers * self._size * _DOUBLE)
        self._all: memoryview[float] = memoryview(self._memory).cast("d")
        self.worker = 0
        self.own = self.of(0)

    def choose_worker(self, worker: int) -> None:
        """Use this worker's cells from now on. To be called after the fork.

        A restarted worker finds its predecessor's numbers, except for the time of the last turn, which is reset.
        """
        self.worker = worker
        self.own = self.of(worker)
        self._all[(worker + 1) * self._size - 1] = 0.0

    def of(self, worker: int) -> memoryview[float]:
        """Return a worker's cells."""
        start = worker * self._size
        return self._all[start : start + self.num_cells]

    def total(self, place: int) -> float:
        """Return the sum of one cell over all workers."""
        return sum(self._all[place + worker * self._size] for worker in range(self.num_workers))

    def beat(self, now: float) -> None:
        """Record that this worker's event loop turned at `now`, in seconds of the monotonic clock."""
        self._all[(self.worker + 1) * self._size - 1] = now

    def last_beat(self, worker: int) -> float:
        """Return when a worker's loop last turned; 0.0 if it never did."""
        return self._all[(worker + 1) * self._size - 1]


class SignsOfLife:
    """Notifies systemd or `inferengine up` that the workers are ready, alive or stopping."""

    def __init__(self, status: str) -> None:
        """`status`: the text to show once ready, such as "serving http://127.0.0.1:8000"."""
        self._status = status
        self._ready = self._stopping = False
        self._notifier = Notifier.from_environment()
        self._watchdog = Watchdog.from_environment(self._notifier, time.monotonic)

    def turn(self, stopping: bool) -> None:
        """Send what is due. Call it repeatedly while every worker's loop turns, or while the workers stop."""
        if not self._ready:
            self._ready = True
            self._notifier.send("READY=1", f"STATUS={self._status}")
        if stopping and not self._stopping:
            self._stopping = True
            self._notifier.send("STOPPING=1", "STATUS=finishing what runs")
        self._watchdog.feed()


class Workers:
    """Child processes that accept from the same sockets. A worker that ends or freezes is replaced."""

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
        """`serve(worker)` runs in the child until SIGTERM and returns its exit code. It calls `cells.beat`.

        A worker without a beat for `frozen_after_s` seconds is frozen: the parent then sends no more signs of life, and
        kills the worker KILL_MARGIN_S later.
        """
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
        self._ready = False  # every worker's loop has turned
        self._extended_s = 0.0  # no worker is killed before this time
        self._code: int = ExitCode.OK

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, then until the last worker has ended. Returns an exit code of ExitCode."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISED)
        while self._started or (self._due and not self._stopping):
            now = time.monotonic()
            for worker in [worker for worker, due in self._due.items() if due <= now and not self._stopping]:
                del self._due[worker]
                self._start(worker)
            due_s = time.monotonic() + TURN_S
            received = signal.sigtimedwait(SUPERVISED, TURN_S)
            stdio.retry()
            if received is not None and received.si_signo == signal.SIGHUP:
                self._hang_up()
            elif received is not None and received.si_signo != signal.SIGCHLD:
                self._stop()
            self._reap()
            self._kill_frozen(time.monotonic(), due_s)
            if self._all_turn() or self._stopping:
                self._signs.turn(self._stopping)
        return self._code

    def _start(self, worker: int) -> None:
        started = time.monotonic()  # before the child runs: its first beat may be its last
        pid = os.fork()
        if pid:
            self._started[pid] = (worker, started)
            return
        code: int = ExitCode.CRASH
        try:
            # A terminal's Ctrl-C reaches the whole process group. It stays blocked here: the parent passes it on.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISED - {signal.SIGINT})
            code = self._serve(worker)
        except BaseException:
            logger.exception("a worker failed")
        finally:
            os._exit(code)

    def _hang_up(self) -> None:
        """Pass SIGHUP on: each worker reloads what it can, and this process its own part."""
        if self._reload is not None:
            self._reload.request()
            self._reload.run_if_due()
        for pid in self._started:
            os.kill(pid, signal.SIGHUP)

    def _stop(self) -> None:
        """Pass the signal on: the first drains the workers, the second ends them."""
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

    def _kill_frozen(self, now: float, due_s: float) -> None:
        """Kill workers whose loop no longer turns: they serve no requests, keep connections and ignore SIGTERM."""
        if paused_s := missed_s(now, due_s):  # `docker pause` stops all processes: the workers were not silent
            self._extended_s = now + paused_s
        for pid, (worker, started) in self._started.items():
            beat = self._cells.last_beat(worker)
            silent_s = now - beat if beat > started else 0.0  # a worker that is still starting is not killed
            if silent_s > self._frozen_after_s + KILL_MARGIN_S and now > self._extended_s:
                fields = {"worker": worker, "silent_s": round(silent_s, 1)}
                logger.error("a worker's loop does not turn: killing it", extra={"fields": fields})
                os.kill(pid, signal.SIGKILL)

    def _last_sign(self, worker: int, started: float) -> float:
        """Return when a worker's loop last turned, or when it was started if its cell is still its predecessor's."""
        return max(self._cells.last_beat(worker), started)

    def _all_turn(self) -> bool:
        """Return whether all workers serve. After the start a worker that is being replaced is not counted."""
        if not self._ready:
            self._ready = all(self._cells.last_beat(worker) > 0.0 for worker in range(self._num_workers))
            return self._ready
        now = time.monotonic()
        return all(
            now - self._last_sign(worker, started) < self._frozen_after_s for worker, started in self._started.values()
        )
