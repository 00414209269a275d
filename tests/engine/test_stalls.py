"""A step that never ends: what clients hear, what is left behind, and how soon somebody serves again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inferengine.config import child_environment
from inferengine.engine.lifecycle import StallHistory, StallRecord, UnchangedTimer
from inferengine.engine.service import EngineService
from inferengine.errors import KINDS, ExitCode
from inferengine.process import listen
from inferengine.process.child import ChildSpec
from inferengine.process.supervisor import Supervisor
from inferengine.process.system import Notifier
from inferengine.wire.messages import Accept, Admin, AdminReply, Goodbye, Hello, Reject, Step, Welcome
from tests.engine.builders import RawClient, address_of, make_card, make_config, run_service, wait_until
from tests.engine.conftest import Connect
from tests.engine.stalling_engine import POISON, StallingExecutor
from tests.process.services import RecordingView

POISONED = [1, POISON, 2]
QUICK = {"stall_min_s": 0.4}


@pytest.fixture(autouse=True)
def _clients_that_do_not_say_bye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.service.FAREWELL_S", 0.1)  # an engine that ends waits for them


@pytest.fixture(params=["while it is launched", "while its result is awaited"])
def executor(request: pytest.FixtureRequest) -> Iterator[StallingExecutor]:
    made = StallingExecutor(in_execute=request.param == "while it is launched", max_num_seqs=2)
    yield made
    made.released.set()


class TestOneEngine:
    def test_all_streams_end_and_the_engine_leaves_with_a_code_of_its_own(
        self, executor: StallingExecutor, connect: Connect
    ) -> None:
        with run_service(lambda: executor, engine=QUICK) as engine:
            client = connect(engine)
            client.submit(1, prompt=POISONED, label="the culprit")
            client.submit(2, max_tokens=900)
            client.submit(3, max_tokens=900)
            collected = client.collect({1, 2, 3})
            ends = {stream: rows[0] for stream, rows in collected.done.items()}
            assert {end.reason for end in ends.values()} == {"error"}
            assert ends[1].detail[0] == "engine_stalled"
            assert ends[3].detail[0] == "engine_restarted", "it had no row in the step: two slots, and it was the third"
            client.expect(Goodbye)
            assert engine.wait(60.0) == ExitCode.STALLED

    def test_what_comes_after_the_stall_is_refused_and_may_be_sent_again(
        self, executor: StallingExecutor, connect: Connect
    ) -> None:
        with run_service(lambda: executor, engine=QUICK) as engine:
            client = connect(engine)
            client.submit(1, prompt=POISONED)
            client.collect({1})
            client.submit(2)
            answer = client.receive()
            assert answer is None or isinstance(answer, Goodbye | Reject)
            assert not isinstance(answer, Reject) or KINDS[answer.code].retryable
            assert engine.wait(60.0) == ExitCode.STALLED

    def test_the_log_says_what_ran_for_whom_and_where_it_hangs(
        self, executor: StallingExecutor, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.CRITICAL), run_service(lambda: executor, engine=QUICK) as engine:
            client = connect(engine)
            client.submit(1, prompt=POISONED, label="the culprit", params={"top_p": 0.5, "logprobs": 1})
            client.collect({1})
            assert engine.wait(60.0) == ExitCode.STALLED
        (record,) = [item for item in caplog.records if "a step stalled" in item.message]
        fields = record.fields  # type: ignore[attr-defined]
        assert fields["requests"] == ["the culprit"]
        assert fields["features"] == ["filters", "logprobs", "sampling"]
        assert (fields["rows"], fields["tokens"], fields["launched"]) == (1, 3, "simulated")
        assert any("hang" in frame for frame in fields["at"])
        assert "in hang" in caplog.text, "the stacks of all threads"

    def test_the_engine_ends_only_after_its_log_tells_of_the_stall(
        self, executor: StallingExecutor, connect: Connect
    ) -> None:
        told: list[str] = []

        class SlowHandler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                time.sleep(0.3)
                told.append(record.getMessage())

        handler = SlowHandler()
        service_log = logging.getLogger("inferengine.engine.service")
        service_log.addHandler(handler)
        try:
            with run_service(lambda: executor, engine=QUICK) as engine:
                connect(engine).submit(1, prompt=POISONED)
                assert engine.wait(60.0) == ExitCode.STALLED
                assert any("where its threads are" in line for line in told)
        finally:
            service_log.removeHandler(handler)

    def test_a_slow_step_within_its_time_is_left_alone(self, connect: Connect) -> None:
        slow = StallingExecutor(step_s=0.05)
        with run_service(lambda: slow, engine={"stall_min_s": 10.0}) as engine:
            client = connect(engine)
            threading.Timer(0.5, slow.released.set).start()
            client.submit(1, prompt=POISONED)
            (done,) = client.collect({1}).done[1]
            assert done.reason == "length"
            assert engine.lifecycle.num_stalled_steps == 0

    def test_switched_off_a_hanging_step_is_a_frozen_loop(self, executor: StallingExecutor, connect: Connect) -> None:
        config = {"stall_factor": 0.0, "stall_min_s": 0.1, "frozen_after_s": 2.0}
        with run_service(lambda: executor, engine=config) as engine:
            client = connect(engine)
            client.submit(1, prompt=POISONED)
            (done,) = client.collect({1}).done[1]
            assert done.detail[0] == "engine_stalled"
            assert engine.wait(60.0) == ExitCode.FROZEN


class TestRecord:
    def test_the_next_process_counts_the_stall_and_tells_of_it(self, tmp_path: Path) -> None:
        wire = {"socket": f"ipc://{tmp_path}/e.sock"}
        first = StallingExecutor()
        with run_service(lambda: first, engine=QUICK, wire=dict(wire)) as engine:
            client = RawClient(address_of(engine))
            client.submit(1, prompt=POISONED, label="a name")
            client.collect({1})
            client.close()
            assert engine.wait(60.0) == ExitCode.STALLED
        first.released.set()
        with run_service(wire=dict(wire)) as engine:
            client = RawClient(address_of(engine))
            client.send(Admin("stats", 1))
            stats = client.expect(AdminReply).result
            client.close()
            assert stats["stalled_steps"] == 1
            assert stats["last_error"].startswith("StepStalled: step ")
            assert "a name" not in stats["last_error"]
            engine.drain()
            assert engine.wait(60.0) == ExitCode.OK
        assert not list(tmp_path.glob("*.stalls")), "who ends as asked begins anew"

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"count": "many", "last": 3}', "{}"])
    def test_a_file_that_makes_no_sense_is_no_record(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "r").write_text(content)
        assert StallRecord(tmp_path / "r").read() == StallHistory()

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        StallRecord(tmp_path / "r").write(StallHistory(3, "x" * 10_000))
        assert StallRecord(tmp_path / "r").read() == StallHistory(3, "x" * 500)

    def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(self, tmp_path: Path) -> None:
        record = StallRecord(tmp_path / "none" / "r")
        record.write(StallHistory(1, "x"))
        record.clear()
        assert record.read() == StallRecord(None).read() == StallHistory()


class TestService:
    """The engine as a process under the supervisor of `inferengine up`, and an HTTP front end beside it."""

    def test_from_a_stall_to_an_answer_in_seconds(self, tmp_path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="ie-") as folder:
            config = make_config(folder, engine={"stall_min_s": 1.0, "frozen_after_s": 20.0})
            listener = listen.listen_tcp("127.0.0.1", 0, "http")
            config = config.with_values(http={"port": listener.getsockname()[1]})
            environment = child_environment(config)
            engine_command = [sys.executable, "-m", "tests.engine.stalling_engine", str(tmp_path / "stalled")]
            view = RecordingView()
            supervisor = Supervisor(
                [ChildSpec("engine", engine_command, environment, watchdog_s=30.0)],
                [ChildSpec("http", [sys.executable, "-m", "inferengine.cli", "http"], environment, listener)],
                Path(folder),
                view,
                drain_timeout_s=5.0,
                when_ready=lambda seconds: None,
            )
            story = _Story(f"http://127.0.0.1:{config.http.port}")
            conductor = threading.Thread(target=story.run)
            conductor.start()
            code = supervisor.run()
            conductor.join(10.0)
        assert story.error is None, (story.error, view.notices, view.lines)
        assert code == ExitCode.OK
        assert "engine ended with exit code 7; starting it again now" in view.notices
        # Nothing of its output had come: where the engine's last words do not name it, it is asked again.
        assert story.refused.status_code in (503, 200)
        if story.refused.status_code == 503:
            assert story.refused.json()["error"]["code"] in ("engine_stalled", "engine_restarted")
            assert int(story.refused.headers["retry-after"]) >= 1
        assert story.served.status_code == 200
        assert story.pause_s < 20.0, "from the stalled request to an answer of the next process"
        assert story.stats["stalled_steps"] == 1
        assert "inferengine_stalled_steps_total" in story.metrics


class _Story:
    """What a client does while the supervisor runs in the main thread; ends it by a signal."""

    refused: httpx.Response
    served: httpx.Response
    stats: dict[str, object]
    metrics: str

    def __init__(self, url: str) -> None:
        self.url = url
        self.error: BaseException | None = None
        self.pause_s = 0.0

    def run(self) -> None:
        try:
            self.play()
        except BaseException as error:
            self.error = error
        finally:
            os.kill(os.getpid(), 15)

    def play(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60.0) as http:
            self.wait_ready(http)
            assert http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}).status_code == 200
            begin = time.monotonic()
            stalling = {"prompt": POISONED, "max_tokens": 4, "resubmit": False}
            self.refused = http.post("/v1/completions", json=stalling)
            self.wait_ready(http)
            self.served = http.post("/v1/completions", json={"prompt": POISONED, "max_tokens": 4})
            self.pause_s = time.monotonic() - begin
            self.stats = http.get("/stats").json()
            self.metrics = http.get("/metrics").text

    def wait_ready(self, http: httpx.Client) -> None:
        def ready() -> bool:
            try:
                return http.get("/ready").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, timeout_s=60.0)


class TestPauses:
    """A process that was stopped, or whose machine slept, has missed nothing."""

    def test_time_between_two_looks_counts_only_up_to_a_bound(self) -> None:
        patience = UnchangedTimer(2.0)
        assert patience.look("turn 1", 100.0) == 0.0
        assert patience.look("turn 1", 101.0) == 1.0
        assert patience.look("turn 1", 3600.0) == 3.0
        assert patience.look("turn 1", 100.0) == 3.0, "a clock that jumps back"
        assert patience.look("turn 2", 101.0) == 0.0

    def test_an_engine_that_was_stopped_for_longer_than_a_freeze_goes_on(self, tmp_path: Path) -> None:
        config = make_config(str(tmp_path), engine={"frozen_after_s": 2.0, "stall_min_s": 1.0})
        command = [sys.executable, "-m", "tests.engine.stalling_engine", str(tmp_path / "marker")]
        child = subprocess.Popen(command, env=child_environment(config))
        try:
            client = RawClient(config.wire.socket, greet=False)
            client.send(Hello(name="raw"))
            wait_until(lambda: client.expect(Welcome, 30.0).state == "READY", 30.0)
            for stream in (1, 2):
                client.submit(stream, max_tokens=600)
                client.expect(Step, 30.0)
                child.send_signal(signal.SIGSTOP)
                time.sleep(3.5)
                child.send_signal(signal.SIGCONT)
                (done,) = client.collect({stream}, 30.0).done[stream]
                assert done.reason == "length"
            assert child.poll() is None
            client.close()
        finally:
            child.kill()
            child.wait()


def test_an_engine_ends_though_its_io_thread_hangs_as_well(tmp_path: Path) -> None:
    """No last word gets out then, but the process must be gone, so that the next one can serve. Who supervises it is
    asked to see to that."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    config = make_config(str(tmp_path), engine=QUICK)
    stalling, released = StallingExecutor(), threading.Event()
    service = EngineService(config, make_card(), lambda: stalling, notifier=Notifier(str(tmp_path / "notify")))
    service.start()
    try:
        wait_until(lambda: service.lifecycle.state == "READY")
        client = RawClient(config.wire.socket)
        client.submit(1, prompt=POISONED)
        client.expect(Accept)
        service.io._thread.call(lambda: _wait(released))
        assert service.wait(60.0) == ExitCode.STALLED
        client.close()
        listener.settimeout(60.0)
        while b"WATCHDOG=trigger" not in listener.recv(4096):
            pass
    finally:
        released.set()
        stalling.released.set()
        listener.close()


def test_a_process_whose_own_end_hangs_is_gone_all_the_same(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    program = """
import threading
from inferengine.config import load
from inferengine.engine import process as startup
from inferengine.process.system import Notifier
from inferengine.engine.service import EngineService
from inferengine.errors import ExitCode
from tests.engine.builders import make_card
from tests.engine.stalling_engine import StallingExecutor
startup.LEAVE_S = 1.0
service = EngineService(load(), make_card(), StallingExecutor)
service._shut_down = lambda: threading.Event().wait()
threading.Timer(0.2, lambda: service._shutdown.fail(ExitCode.STALLED)).start()
startup.serve(service)
"""
    child = subprocess.Popen([sys.executable, "-c", program], env=child_environment(config), stderr=subprocess.PIPE)
    try:
        _, stacks = child.communicate(timeout=60.0)
        assert child.returncode == ExitCode.CRASH
        assert b"_supervise" in stacks, "where it hung is on standard error"
    finally:
        child.kill()
        child.wait()


def _wait(released: threading.Event) -> None:
    released.wait(60.0)
