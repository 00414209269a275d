"""Workers that share a socket: one whose loop stops turning is killed and replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferengine.errors import ExitCode
from tests.engine.builders import wait_until

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from inferengine.process import workers

folder = Path(sys.argv[1])
workers.KILL_MARGIN_S = 1.0
fork = os.fork

def fork_and_wait():
    pid = fork()
    if pid and late:
        time.sleep(0.5)
    return pid

os.fork, late = fork_and_wait, sys.argv[2] == "late"
cells = workers.WorkerCells(1, 2)

def serve(worker):
    cells.choose_worker(worker)
    lives = len(list(folder.glob(f"{worker}-*")))
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    cells.beat(time.monotonic())
    (folder / f"{worker}-{os.getpid()}").touch()
    while worker == 1 and not lives:
        time.sleep(60)
    while not stopping:
        cells.beat(time.monotonic())
        time.sleep(0.02)
    return 0

signs = workers.SignsOfLife("serving")
sys.exit(workers.Workers(serve, num_workers=2, sockets=[], cells=cells, frozen_after_s=2.0, signs=signs).run())
"""


@pytest.mark.parametrize("parent", ["at once", "late"])
def test_a_worker_that_does_not_turn_is_killed_and_replaced(tmp_path: Path, parent: str) -> None:
    """On a busy machine a worker may have begun, and frozen, before its parent runs again."""

    def lives(worker: int) -> int:
        return len(list(tmp_path.glob(f"{worker}-*")))

    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), parent], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: lives(1) == 2, timeout_s=60.0)
        running.send_signal(signal.SIGTERM)
        log = running.communicate(timeout=60.0)[1]
    finally:
        running.kill()
    assert running.returncode == ExitCode.OK
    assert "a worker's loop does not turn: killing it" in log
