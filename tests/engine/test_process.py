"""The real process: `inferengine engine` with torch and a tiny checkpoint, its signals and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferengine.client import Client
from inferengine.errors import ExitCode, InferEngineError
from inferengine.sampling_params import SamplingParams
from tests.engine.builders import TEMPLATE, wait_until
from tests.text.vocabularies import byte_level

START_S = 90.0  # importing torch takes its time on a busy machine
SMALL = ["--cache.num_blocks", "64", "--engine.threads", "1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama of three small layers, with a tokenizer."""
    checkpoints = pytest.importorskip("tests.models.checkpoints")
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.make_model("llama").save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Process:
    """An engine process and its address."""

    def __init__(
        self, folder: Path, checkpoint: Path, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        self.address = f"ipc://{folder}/e.sock"
        command = [sys.executable, "-m", "inferengine.cli", "engine", str(checkpoint), "--wire.socket", self.address]
        self.log = (folder / "log").open("w")
        self.child = subprocess.Popen(
            [*command, *SMALL, *arguments], stderr=self.log, stdout=self.log, env={**os.environ, **(environment or {})}
        )

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.child.wait(timeout_s)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self.log.close()


Launch = Callable[..., Process]


@pytest.fixture
def launch(tmp_path: Path, checkpoint: Path) -> Iterator[Launch]:
    started: list[Process] = []

    def start(*arguments: str, model: Path = checkpoint, **options: dict[str, str]) -> Process:
        started.append(Process(tmp_path, model, *arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for process in started:
        process.close()
    if (log := tmp_path / "log").exists():
        print(log.read_text())  # shown when the test failed


def test_a_stream_goes_on_after_a_rank_was_killed(launch: Launch, tmp_path: Path) -> None:
    """The engine ends with it; the next one has all ranks again, and leaves none behind."""
    two = ("--engine.tensor_parallel", "2")
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    process = launch(*two)
    with contextlib.closing(Client(process.address)) as client:
        client.connect(START_S)
        client.wait_ready(START_S)
        whole = [token for delta in client.submit([1, 2, 3], params).streams[0] for token in delta.token_ids]
        stream = client.submit([1, 2, 3], params).streams[0]
        tokens = list(next(stream).token_ids)
        (rank,) = ranks_of(process)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(SOON_S) == ExitCode.CRASH
        assert "rank 1 has ended" in (tmp_path / "log").read_text()
        process = launch(*two)
        finish = None
        for delta in stream:
            tokens += delta.token_ids
            finish = delta.finish
        assert finish is not None
        assert (finish.reason, tokens) == ("length", whole)
        (rank,) = ranks_of(process)
        process.child.send_signal(signal.SIGTERM)
        assert process.wait() == ExitCode.OK
        wait_until(lambda: not Path(f"/proc/{rank}").exists())


SOON_S = 20.0  # far below the half minute after which a step that does not end is noticed


def ranks_of(process: Process) -> list[int]:
    tasks = Path(f"/proc/{process.child.pid}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split() if is_rank(pid)]


def is_rank(pid: str) -> bool:
    return b"inferengine.executor.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_service_from_start_to_drain(launch: Launch, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(START_S)
    process = launch(environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"})
    with contextlib.closing(Client(process.address)) as client:
        client.connect(START_S)
        assert client.welcome.state in ("STARTING", "READY")
        heard = ""
        while "READY=1" not in heard:
            heard += listener.recv(4096).decode() + "\n"
        client.wait_ready(START_S)

        def generate(max_tokens: int = 12) -> list[int]:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            stream = client.submit(text="the quick brown", params=params).streams[0]
            return [token for delta in stream for token in delta.token_ids]

        first = generate()
        assert len(first) == 12
        assert generate() == first, "a prefix hit changes nothing"
        stats = client.admin("stats")
        assert stats["cache"]["used_pages"] == 0
        assert idle_share(process.child.pid, 3.0) < 0.01
        while "WATCHDOG=1" not in heard:
            heard += listener.recv(4096).decode() + "\n"
        stream = client.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)).streams[0]
        next(stream)
        process.child.send_signal(signal.SIGTERM)
        finish = [delta.finish for delta in stream][-1]
        assert finish is not None
        assert finish.reason == "length"
        assert process.wait() == ExitCode.OK
    listener.close()
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("SIGTERM: finishing what runs")


def test_killed_it_leaves_an_error_to_who_opts_out_and_its_successor_serves(launch: Launch) -> None:
    first = launch()
    client = Client(first.address)
    client.connect(START_S)
    client.wait_ready(START_S)
    stream = client.submit([1, 2, 3], SamplingParams(max_tokens=250, ignore_eos=True), resubmit=False).streams[0]
    next(stream)
    first.child.kill()
    first.wait()
    launch()
    begin = time.monotonic()
    finish = [delta.finish for delta in stream][-1]
    assert finish is not None
    assert finish.reason == "error"
    assert finish.detail[0] in ("engine_restarted", "engine_unavailable")
    assert time.monotonic() - begin < 30.0
    client.wait_ready(START_S)
    tokens = [t for delta in client.submit([1, 2], SamplingParams(max_tokens=3)).streams[0] for t in delta.token_ids]
    assert 1 <= len(tokens) <= 3
    client.close()


def test_a_second_signal_does_not_wait(launch: Launch) -> None:
    process = launch()
    with Client(process.address) as client:
        client.wait_ready(START_S)
        submission = client.submit([1], SamplingParams(max_tokens=255, ignore_eos=True))
        submission.accepted()
        process.child.send_signal(signal.SIGTERM)
        wait_until(lambda: client.welcome.state != "READY")
        process.child.send_signal(signal.SIGTERM)
        assert process.wait() in (ExitCode.ABORTED, ExitCode.OK)


def test_an_address_in_use_is_its_own_exit_code(launch: Launch) -> None:
    first = launch()
    with Client(first.address) as client:
        client.connect(START_S)
        assert launch().wait() == ExitCode.ADDRESS
        with pytest.raises(InferEngineError):
            client.admin("no such thing")


def test_a_folder_without_a_model_is_told_in_a_second_and_one_line(launch: Launch, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    process = launch(model=empty)
    assert process.wait() == ExitCode.MODEL
    text = (tmp_path / "log").read_text()
    assert "config.json" in text
    assert "Traceback" not in text


def idle_share(pid: int, seconds: float) -> float:
    """Return the CPU time of a process over wall time."""
    before = cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
