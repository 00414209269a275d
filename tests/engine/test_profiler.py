"""ADMIN `profile`: steps of a running engine are recorded, one recording at a time, and nothing else notices."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from inferengine.cli.main import main
from inferengine.cli.profile import read_trace
from inferengine.client import Client
from inferengine.engine.loop import EngineLoop, StepObserver
from inferengine.engine.service import EngineService
from inferengine.engine.services.profiler import MAX_STEPS, MAX_TRACE_BYTES, Profiler
from inferengine.errors import ExitCode, InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import address_of, run_service, small_capacity, wait_until


class FakeRecorder:
    """Notes what is asked of it, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.trace_bytes = b"a trace"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)

    def start(self) -> None:
        self._note("start")

    def begin_step(self) -> None:
        self._note("begin")

    def end_step(self) -> None:
        self._note("end")

    def stop(self) -> None:
        self._note("stop")

    def trace(self) -> bytes:
        return self.trace_bytes


class Recorded(SimulatedExecutor):
    """A device that can be profiled."""

    def __init__(self) -> None:
        super().__init__(small_capacity(), step_s=0.001)
        self.made: list[FakeRecorder] = []
        self.next = FakeRecorder

    def recorder(self) -> FakeRecorder:
        self.made.append(self.next())
        return self.made[-1]


@pytest.fixture
def device() -> Recorded:
    return Recorded()


@pytest.fixture
def service(device: Recorded) -> Iterator[EngineService]:
    with run_service(lambda: device) as running:
        yield running


@pytest.fixture
def client(service: EngineService) -> Iterator[Client]:
    client = Client(address_of(service))
    client.connect()
    yield client
    client.close()


def run_some(client: Client, max_tokens: int = 30) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3)
    stream = client.submit(range(1, 20), params).streams[0]
    return [token for delta in stream for token in delta.token_ids]


def ask(client: Client, **arguments: Any) -> list[Any]:
    """Ask for a profile in a thread; the answer, or the error, comes into the list."""
    answers: list[Any] = []

    def wait() -> None:
        try:
            answers.append(client.admin("profile", **arguments))
        except InferEngineError as error:
            answers.append(error)

    threading.Thread(target=wait, daemon=True).start()
    return answers


def test_so_many_steps_are_recorded_in_the_loops_thread(device: Recorded, client: Client) -> None:
    answers = ask(client, steps=5)
    wait_until(lambda: bool(device.made))
    tokens = run_some(client)
    wait_until(lambda: bool(answers))
    assert (answers[0]["steps"], answers[0]["trace"]) == (5, b"a trace")
    assert answers[0]["seconds"] > 0
    (recorder,) = device.made
    assert recorder.calls == ["start", *["begin", "end"] * 5, "stop"]
    assert recorder.threads == {"inferengine-loop"}
    assert run_some(client) == tokens, "the same request gives the same tokens, recorded or not"
    assert len(recorder.calls) == 12


class ObservedLoop:
    """A loop's part that a profile uses; its thread is the caller's."""

    def __init__(self) -> None:
        self.observer: StepObserver | None = None

    def observe_steps(self, observer: StepObserver | None) -> None:
        self.observer = observer

    def call(self, function: Callable[[], None]) -> None:
        function()


def test_with_fewer_steps_in_the_time_there_are_those() -> None:
    now, answers = [100.0], []
    loop = ObservedLoop()
    profiling = Profiler(lambda: now[0], lambda function: function())
    profiling.begin(FakeRecorder, cast(EngineLoop, loop))
    profiling.profile({"steps": 50, "wait_s": 5}, answers.append)
    for computed in (True, True, False, True):
        loop.observer.begins()
        loop.observer.ended(computed)
    now[0] = 104.9
    profiling.tick(now[0])
    assert loop.observer is not None
    now[0] = 105.0
    profiling.tick(now[0])
    profiling.tick(now[0])
    wait_until(lambda: bool(answers))
    assert answers == [{"steps": 3, "seconds": 5.0, "trace": b"a trace"}]
    assert loop.observer is None


def test_an_idle_engine_has_nothing_to_record(device: Recorded, client: Client) -> None:
    with pytest.raises(InferEngineError, match="send requests") as caught:
        client.admin("profile", wait_s=0.1)
    assert caught.value.code == "deadline_exceeded"
    assert device.made[0].calls == ["start", "stop"]


def test_a_second_recording_is_refused_while_one_runs(device: Recorded, client: Client) -> None:
    first = ask(client, steps=3)
    wait_until(lambda: bool(device.made))
    with pytest.raises(InferEngineError, match="being recorded") as caught:
        client.admin("profile")
    assert caught.value.code == "conflict"
    run_some(client)
    wait_until(lambda: bool(first))
    second = ask(client, steps=3)
    wait_until(lambda: len(device.made) == 2)
    run_some(client)
    wait_until(lambda: bool(second))
    assert (first[0]["steps"], second[0]["steps"]) == (3, 3)


@pytest.mark.parametrize("failing", ["start", "begin_step", "end_step", "stop", "trace"])
def test_a_profiler_that_fails_is_told_and_the_engine_goes_on(device: Recorded, client: Client, failing: str) -> None:
    def fail(recorder: FakeRecorder) -> None:
        raise RuntimeError("CUPTI is taken")

    device.next = type("Failing", (FakeRecorder,), {failing: fail})
    answers = ask(client, steps=2)
    wait_until(lambda: bool(device.made))
    assert len(run_some(client)) == 30
    wait_until(lambda: bool(answers))
    assert answers[0].code == "engine_error"
    assert "CUPTI" not in answers[0].message
    device.next = FakeRecorder
    again = ask(client, steps=2)
    wait_until(lambda: len(device.made) == 2)
    run_some(client)
    wait_until(lambda: bool(again))
    assert again[0]["steps"] == 2


def test_a_trace_above_the_limit_is_refused_with_the_remedy(device: Recorded, client: Client) -> None:
    class Large(FakeRecorder):
        def trace(self) -> bytes:
            return bytes(MAX_TRACE_BYTES + 1)

    device.next = Large
    answers = ask(client, steps=2)
    wait_until(lambda: bool(device.made))
    run_some(client)
    wait_until(lambda: bool(answers))
    assert "ask for fewer" in answers[0].message


@pytest.mark.parametrize(
    "arguments",
    [{"steps": 0}, {"steps": MAX_STEPS + 1}, {"steps": True}, {"steps": "5"}, {"wait_s": 0}, {"wait_s": 1e9}],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], device: Recorded, client: Client) -> None:
    with pytest.raises(InferEngineError, match=next(iter(arguments))) as caught:
        client.admin("profile", **arguments)
    assert caught.value.code == "invalid_request"
    assert not device.made


def test_a_device_that_cannot_be_profiled_says_so() -> None:
    with run_service() as service:
        client = Client(address_of(service))
        client.connect()
        with pytest.raises(InferEngineError, match="cannot be profiled") as caught:
            client.admin("profile")
        client.close()
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_writes_the_trace_and_prints_the_table(
    name: str, device: Recorded, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2000.0}

    class Traced(FakeRecorder):
        def trace(self) -> bytes:
            return gzip.compress(json.dumps({"traceEvents": [kernel]}).encode())

    device.next = Traced
    busy = threading.Thread(target=lambda: (wait_until(lambda: bool(device.made)), run_some(client)), daemon=True)
    busy.start()
    words = ["profile", "--steps", "4", "--out", str(tmp_path / name), "--wire.socket", client.address]
    assert main(words) == ExitCode.OK
    busy.join(20.0)
    said = capsys.readouterr()
    assert f"{name}: 4 steps" in said.err
    assert said.out.splitlines()[-1].split() == ["2.00", "100.0%", "1", "1.0", "2000.00", "gemm"]
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert read_trace(tmp_path / name) == {"traceEvents": [kernel]}


def test_the_command_says_when_no_engine_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferengine.cli.command.CONNECT_TIMEOUT_S", 0.1)
    words = ["profile", "--out", str(tmp_path / "trace.json"), "--wire.socket", f"ipc://{tmp_path}/none.sock"]
    assert main(words) == ExitCode.CRASH
    assert "No engine answers" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()
