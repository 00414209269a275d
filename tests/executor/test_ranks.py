"""A rank that ends, hangs or fails is found, and none outlives rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from inferengine.executor.parallel.ranks import CONFIGURE, LOADING_S, Ranks
from tests.engine.builders import wait_until

LIMIT_S = 5.0  # in which a lost rank is found
SLOW_S = 30.0  # for what a busy machine does late


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()
    assert all(is_gone(pid) for pid in made.pids)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def reasons_of(ranks: Ranks) -> SimpleQueue[str]:
    heard: SimpleQueue[str] = SimpleQueue()
    ranks.on_lost = heard.put
    return heard


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 gave no sign of life")]
)
def test_a_rank_that_ends_or_hangs_is_found_and_the_others_are_killed(
    number: signal.Signals, reason: str, ranks: Ranks
) -> None:
    heard = reasons_of(ranks)
    ranks.serving = True
    os.kill(ranks.pids[0], number)
    assert reason in heard.get(timeout=LIMIT_S)
    assert ranks.lost is not None
    wait_until(lambda: is_gone(ranks.pids[0]), SLOW_S)


def test_a_rank_says_why_it_fails(ranks: Ranks) -> None:
    heard = reasons_of(ranks)
    ranks.send(CONFIGURE + msgspec.msgpack.encode({"engine": {"no_such_key": 1}}))
    assert "rank 1 failed: " in heard.get(timeout=SLOW_S + LOADING_S)


def test_signals_to_stop_are_for_rank_0(ranks: Ranks) -> None:
    """A service manager sends them to all processes; rank 0 finishes what runs before it closes the others."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        wait_until(lambda number=number: ignores(ranks.pids[0], number), SLOW_S)  # type: ignore[misc]
        os.kill(ranks.pids[0], number)
    assert not is_gone(ranks.pids[0])


def ignores(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask >> (number - 1) & 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_with_rank_0_however_it_ends(stopped: bool) -> None:
    program = (
        "import time\nfrom inferengine.executor.parallel.ranks import Ranks\n"
        "ranks = Ranks(3)\nprint(*ranks.pids, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    for pid in pids:
        wait_until(lambda pid=pid: ignores(pid, signal.SIGTERM), SLOW_S)  # type: ignore[misc]
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids), SLOW_S)


def test_closing_any_number_of_times_leaves_nothing(ranks: Ranks) -> None:
    before = set(os.listdir("/dev/shm"))
    ranks.close()
    ranks.close()
    assert set(os.listdir("/dev/shm")) <= before
