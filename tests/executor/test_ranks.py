"""A rank that ends, hangs or fails is found, and none outlives rank 0."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch

from frontends.http.openai.response_store import FOLDER_PREFIX
from inferengine.config import Config
from inferengine.core.executor import DeviceLost
from inferengine.executor.parallel.executor import ParallelExecutor
from inferengine.executor.parallel.ranks import CONFIGURE, LOADING_S, Ranks
from inferengine.executor.settings import executor_settings
from tests.engine.builders import wait_until
from tests.executor.engine import Engine
from tests.executor.parallel import Pair
from tests.models.checkpoints import SHAPES

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


def shared_memory() -> set[str]:
    """Return the names in /dev/shm, but for those of front ends, which other tests run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(FOLDER_PREFIX)}


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


@pytest.mark.parametrize("when", ["loads", "computes a step"])
def test_a_rank_that_runs_out_of_memory_says_so_and_leaves_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 alone, which may map 24 MiB more; a layer's weights take 92, or what a step of 24 tokens makes of them."""
    before = shared_memory()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # of the rank: arenas of threads reserve addresses
    wide = {**SHAPES, "num_hidden_layers": 1, "intermediate_size": 500_000}
    for name, values in (("small", SHAPES), ("wide", wide)):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **values}
        config |= {"rms_norm_eps": 1e-6, "dtype": "float32"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    pair = Pair()
    try:
        engine = Engine(tmp_path / ("small" if when == "loads" else "wide"), build=pair.build, model=RANDOM)
        engine.generate([[1, 2]], 2)
        limit_memory(pair.ranks.pids[0], 24 << 20)
        too_much = {
            "loads": lambda: Engine(tmp_path / "wide", build=pair.build, model=RANDOM),
            "computes a step": lambda: engine.generate([[1, 2, 3] * 20], 2),
        }
        with pytest.raises(DeviceLost, match=r"rank 1 failed: \w*Error: .*memory"):
            too_much[when]()
    finally:
        pair.close()
    assert all(is_gone(pid) for pid in pair.ranks.pids)
    assert shared_memory() <= before


RANDOM = {"load_format": "dummy"}


def limit_memory(pid: int, more: int) -> None:
    """Let a process map so many bytes more than now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + more
    resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


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
    before = shared_memory()
    ranks.close()
    ranks.close()
    assert shared_memory() <= before


class Told:
    """What ParallelExecutor uses of the ranks and of the communicator, without any."""

    size, store = 2, ""
    on_lost: Callable[[str], None]

    def __init__(self) -> None:
        self.aborted = False

    def send(self, message: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def test_a_lost_rank_ends_what_waits_for_it_also_where_nobody_asked_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, config = Told(), Config()
    monkeypatch.setattr(ParallelExecutor, "device", torch.device("cuda"))
    ParallelExecutor(config, executor_settings(config), told, told)  # type: ignore[arg-type]
    told.on_lost("rank 1 has ended")
    assert told.aborted
