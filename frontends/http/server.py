"""`run_http`: the process behind `inferengine http`. One worker runs in it; several are its children on one socket."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace

from frontends.common.keys import read_keys
from frontends.common.notify import notify
from frontends.common.protection import check_protection, tls_files
from frontends.http.app import make_metrics, make_quotas, make_shelf
from frontends.http.response_shelf import make_folder, remove_folder
from frontends.http.worker import Shared, run_worker
from inferengine.config import Config, watchdog_interval_s
from inferengine.errors import ExitCode
from inferengine.listening import AddressTaken, describe, open_listeners
from inferengine.logs import configure

logger = logging.getLogger(__name__)

SUPERVISED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
TURN_S = 0.25
RESTART_AFTER_S = 0.5
FAST_FAILURE_S = 5.0
MAX_FAST_FAILURES = 5


def run_http(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit code. Raises ConfigError for what may not be served
    like this."""
    configure(config.log)
    try:
        sockets = open_listeners("http", config.http.host, config.http.port, config.http.uds)
    except AddressTaken as error:
        print(f"inferengine http: {error}", file=sys.stderr)
        return ExitCode.ADDRESS
    address = describe(sockets[0], "https" if config.http.tls_certificate else "http")
    keys = read_keys(config.auth.keys_file)
    check_protection("http", sockets[0], keys, allow_public=config.http.allow_public)
    tls_files("http", config.http.tls_certificate, config.http.tls_key)
    logger.info("listening", extra={"fields": {"address": address, "workers": config.http.workers}})
    shared = Shared(sockets, make_metrics(config.http.workers), keys, make_quotas(config, keys))
    signs = SignsOfLife(address)
    if config.http.workers == 1:
        return run_worker(config, shared, signs.turn)
    folder = make_folder()
    try:
        return Workers(config, replace(shared, shelf=make_shelf(folder)), signs).run()
    finally:
        remove_folder(folder)


class SignsOfLife:
    """What systemd and `inferengine up` want to hear."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ready = self._stopping = False
        self._interval_s = watchdog_interval_s()
        self._next_s = 0.0

    def turn(self, stopping: bool) -> None:
        """Every worker accepts, and its loop has turned lately."""
        now = time.monotonic()
        if not self._ready:
            self._ready = True
            notify(f"READY=1\nSTATUS=serving {self._address}")
        if stopping and not self._stopping:
            self._stopping = True
            notify("STOPPING=1\nSTATUS=finishing what runs")
        if self._interval_s is not None and now >= self._next_s:
            self._next_s = now + self._interval_s / 2
            notify("WATCHDOG=1")


class Workers:
    """Children that accept from the same sockets. One that dies is replaced; the others go on."""

    def __init__(self, config: Config, shared: Shared, signs: SignsOfLife) -> None:
        self._config = config
        self._shared = shared
        self._signs = signs
        self._started: dict[int, tuple[int, float]] = {}  # pid -> worker, when
        self._due: dict[int, float] = dict.fromkeys(range(config.http.workers), 0.0)
        self._fast_failures = 0
        self._stopping = False
        self._code: int = ExitCode.OK

    def run(self) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISED)
        while self._started or (self._due and not self._stopping):
            now = time.monotonic()
            for worker in [worker for worker, due in self._due.items() if due <= now and not self._stopping]:
                del self._due[worker]
                self._start(worker)
            received = signal.sigtimedwait(SUPERVISED, TURN_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISED)
            self._shared.choose_worker(worker)
            code = run_worker(self._config, self._shared, lambda stopping: None)
        except BaseException:
            logger.exception("a worker failed")
        finally:
            os._exit(code)

    def _stop(self) -> None:
        """Pass it on: the first signal drains the workers, the second ends them."""
        self._stopping = True
        for listener in self._shared.sockets:
            listener.close()
        for pid in self._started:
            os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        while self._started:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            worker, started = self._started.pop(pid, (None, 0.0))
            if worker is None or self._stopping:
                continue
            now = time.monotonic()
            code = os.waitstatus_to_exitcode(status)
            logger.error("a worker ended", extra={"fields": {"worker": worker, "exit_code": code}})
            self._fast_failures = self._fast_failures + 1 if now - started < FAST_FAILURE_S else 0
            if self._fast_failures >= MAX_FAST_FAILURES:
                self._code = ExitCode.CRASH
                self._stop()
            self._due[worker] = now + RESTART_AFTER_S

    def _all_turn(self) -> bool:
        oldest = min(self._shared.metrics.last_beat(worker) for worker in range(self._config.http.workers))
        return oldest > 0.0 and time.monotonic() - oldest < self._config.engine.frozen_after_s
