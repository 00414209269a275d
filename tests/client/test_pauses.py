"""SIGSTOP and SIGCONT of the engine, of its client, and of both: a pause costs time and nothing else.

The engines here have a lease of 2.4 s (`heartbeat_s` 0.8), and each pause is longer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.client.engine_process import ROOT, EngineProcess, engine_processes
from tests.client.test_pool import output_of

PAUSE_S = 3.5
STREAMS, MAX_TOKENS = 4, 150


@contextmanager
def reader_process(address: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a client that reads; its first line has been read: all its streams have begun."""
    command = [sys.executable, "-m", "tests.client.reader_process", address, str(STREAMS), str(MAX_TOKENS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with TemporaryDirectory(prefix="ie-") as folder, engine_processes(Path(folder), 1, step_s=0.02) as (engine,):
        yield engine


def read(engine: EngineProcess, pause: tuple[str, ...]) -> list[dict[str, object]]:
    """Read all streams to their end, with `pause` ("engine", "reader") stopped while they run."""
    with reader_process(engine.address) as reader:
        stopped = [{"engine": engine.process.pid, "reader": reader.pid}[name] for name in pause]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        output, _ = reader.communicate(timeout=60)
        return json.loads(output)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pause", [("engine",), ("reader",), ("engine", "reader"), ("reader", "engine")], ids="+".join)
def test_streams_continue_after_a_pause_longer_than_the_lease(engine: EngineProcess, pause: tuple[str, ...]) -> None:
    whole = [{"tokens": output_of(MAX_TOKENS, seed), "ends": [["length", None]]} for seed in range(STREAMS)]
    assert read(engine, pause) == whole
