"""The host of an engine process, and what it says of it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from inferengine.fleet.host import PORTS, EngineHost, RecentFirstTokens, end_of_process, free_ports, last_words
from inferengine.fleet.spec import FleetKeys
from inferengine.process.child import ChildSpec
from inferengine.wire import curve

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
KEYS = FleetKeys(*(key.decode() for pair in (curve.new_pair(), curve.new_pair()) for key in pair))
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
OWNER = (
    "import sys, threading, time\n"
    "from inferengine.fleet import host\n"
    "from tests.fleet.test_host import KEYS, SLEEPER\n"
    "class Sleeper(host.EngineHost):\n"
    "    def _spec(self, address):\n"
    "        return super()._spec(address)._replace(command=[sys.executable, '-c', SLEEPER])\n"
    "kept = Sleeper('engine-0', '127.0.0.1', {}, KEYS, drain_timeout_s=1.0)\n"
    "while not kept.report()['pid']: time.sleep(0.01)\n"
    "print(kept.report()['pid'], flush=True)\n"
    "time.sleep(600)\n"
)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_engine_ends_with_the_process_of_its_host_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        engine = int(owner.stdout.readline())
        assert not is_gone(engine)
        owner.send_signal(signal.SIGKILL)
        until(lambda: is_gone(engine))


class SleepingHost(EngineHost):
    """Its engine does nothing."""

    def _spec(self, address: str) -> ChildSpec:
        return super()._spec(address)._replace(command=[sys.executable, "-c", SLEEPER])


def test_the_host_can_end_its_engine_at_once() -> None:
    host = SleepingHost("engine-0", "127.0.0.1", {}, KEYS, drain_timeout_s=600.0)
    host.kill()  # nothing runs yet, or it ends: both are fine
    until(lambda: host.report()["pid"] != 0)
    host.kill()
    assert host.ended.wait(WAIT_S)
    assert host.report()["exit_code"] == 128 + signal.SIGKILL


def test_the_end_of_a_process_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as process, end_of_process(process.pid) as has_ended:
        assert not has_ended(0.01)
        process.kill()
        assert has_ended(WAIT_S)
    with end_of_process(process.pid) as has_ended:  # it was gone before
        assert has_ended(WAIT_S)


def test_an_engine_that_cannot_run_says_why_and_leaves_no_key_behind() -> None:
    host = EngineHost("engine-0", "127.0.0.1", {"INFERENGINE_ENGINE_DEVICE": "abacus"}, KEYS, drain_timeout_s=1.0)
    assert host.ended.wait(WAIT_S)
    report = host.report()
    assert (report["ready"], report["exit_code"]) == (False, 2)
    assert "engine.device" in report["status"]
    assert not host._folder.exists()


def test_neighbouring_ports_are_free() -> None:
    first = free_ports("127.0.0.1")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", port))) for port in range(first, first + PORTS)
        ]
        assert [server.getsockname()[1] for server in servers] == [first, first + 1, first + 2]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["loading", "configuration: engine.device: must be one of auto, cpu", "bye"], "must be one of"),
        (["one", "two"], "two"),
        ([], "it wrote nothing"),
    ],
)
def test_of_an_engines_output_the_line_is_kept_that_says_why_it_ended(lines: list[str], words: str) -> None:
    assert words in last_words(lines)


def test_first_tokens_are_those_of_the_last_seconds() -> None:
    recent, bounds = RecentFirstTokens(30.0), (0.1, 0.5, 1.0)
    assert recent.add(0.0, bounds, [100, 0, 0, 0]) == 0.0
    assert recent.add(10.0, bounds, [100, 10, 0, 0]) == 0.5
    assert recent.add(20.0, bounds, [100, 10, 10, 0]) == 1.0
    assert recent.add(60.0, bounds, [120, 10, 10, 0]) == 0.1
    assert recent.add(120.0, bounds, [120, 10, 10, 0]) == 0.0


def test_above_the_last_bound_the_last_bound_is_told() -> None:
    recent = RecentFirstTokens(30.0)
    recent.add(0.0, (0.1, 0.5), [0, 0, 0])
    assert recent.add(1.0, (0.1, 0.5), [0, 0, 5]) == 0.5


def test_secrets_are_in_no_text_of_the_keys() -> None:
    assert KEYS.engine_secret not in repr(KEYS)
    assert KEYS.front_secret not in repr(KEYS)
