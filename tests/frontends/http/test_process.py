"""The process: signals, workers, sockets that somebody else opened, and what it tells its supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from inferengine.engine.service import EngineService
from inferengine.errors import ExitCode
from inferengine.wire.messages import Submit
from tests.engine.builders import address_of, check_idle, run_service
from tests.frontends.http.builders import HEADERS, events, open_request, says, text_of, wait_until
from tests.frontends.scripted_engine import Script, ScriptedEngine
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """`inferengine http` on a free port."""

    def __init__(self, address: str, *flags: str, notify: str = "") -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "inferengine.cli", "http", "--wire.socket", address]
        environment = {**os.environ, **({"NOTIFY_SOCKET": notify, "WATCHDOG_USEC": "400000"} if notify else {})}
        self.popen = subprocess.Popen(
            [*command, "--http.port", str(self.port), *flags],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=60.0)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/ready").status_code == 200
        return False

    def refuses(self) -> bool:
        """Return whether nobody listens any more."""
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    def end(self) -> str:
        """Wait for the end, and return its log."""
        self.http.close()
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.communicate(timeout=60)[1]


@contextmanager
def process(address: str, *flags: str, notify: str = "", wait: bool = True) -> Iterator[Process]:
    running = Process(address, *flags, notify=notify)
    try:
        if wait:
            wait_until(running.ready)
        yield running
    finally:
        running.end()


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/engine.sock"


@contextmanager
def streaming(
    address: str, script: Callable[[Submit, int], Script], *flags: str
) -> Iterator[tuple[Process, socket.socket, ScriptedEngine]]:
    """Yield a front end in the middle of a stream."""
    with (
        ScriptedEngine(address, script) as engine,
        process(address, *flags) as running,
        open_request(running.port, "/v1/completions", prompt="say", stream=True) as stream,
    ):
        assert stream.recv(12) == b"HTTP/1.1 200"
        yield running, stream, engine


def read_events(connection: socket.socket) -> list[object]:
    """Return the rest of a chunked answer, as events."""
    data = b""
    while b"0\r\n\r\n" not in data[-7:]:
        part = connection.recv(65536)
        assert part, "the connection was closed before the answer's end"
        data += part
    lines = data.partition(b"\r\n\r\n")[2].split(b"\r\n")
    return events(b"".join(lines[1::2]).decode())


def test_sigterm_finishes_streams_takes_no_more_and_exits_0(address: str) -> None:
    with streaming(address, says("the quick brown fox " * 8, pause_s=0.01)) as (running, stream, engine):
        engine.hold()
        running.popen.send_signal(signal.SIGTERM)
        wait_until(running.refuses)
        engine.release()
        documents = read_events(stream)
        assert text_of(documents) == "the quick brown fox " * 8
        assert documents[-1] == "[DONE]"
        assert running.popen.wait(60) == ExitCode.OK


def test_a_stream_longer_than_the_drain_ends_with_an_error(address: str) -> None:
    script = says("fox " * 400, pause_s=0.02)
    with streaming(address, script, "--engine.drain_timeout_s", "0.3") as (running, stream, engine):
        running.popen.send_signal(signal.SIGTERM)
        documents = read_events(stream)
        assert isinstance(documents[-2], dict)
        assert documents[-2]["error"]["code"] == "draining"
        assert documents[-1] == "[DONE]"
        assert running.popen.wait(60) == ExitCode.OK
        wait_until(lambda: engine.num_running == 0)


def test_a_second_signal_ends_at_once(address: str) -> None:
    flags = ("--engine.drain_timeout_s", "600")
    with streaming(address, says("fox " * 400, pause_s=0.02), *flags) as (running, _, engine):
        engine.hold()
        running.popen.send_signal(signal.SIGINT)
        wait_until(running.refuses)
        running.popen.send_signal(signal.SIGINT)
        assert running.popen.wait(60) == ExitCode.OK


def test_killed_front_end_leaves_the_engine_serving() -> None:
    """SIGKILL: its requests are cancelled by their lease, and another front end is served meanwhile."""
    wire = {"heartbeat_s": 0.1}
    with run_service(step_s=0.01, wire=wire) as engine:
        with (
            process(address_of(engine)) as doomed,
            process(address_of(engine)) as other,
            open_request(
                doomed.port, "/v1/completions", prompt="fox", stream=True, max_tokens=900, ignore_eos=True
            ) as stream,
        ):
            assert stream.recv(20)
            wait_until(lambda: _running(engine) == 1)
            doomed.popen.kill()
            answer = other.http.post("/v1/completions", json={"prompt": "fox", "max_tokens": 5, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 5
            # Without an answer of the engine, whose heartbeat is short here, its last status is shown, without a cache.
            wait_until(lambda: other.http.get("/stats").json().get("cache", {}).get("used_pages") == 0)
        check_idle(engine)


def _running(engine: EngineService) -> int:
    return engine.io.publisher.num_open


def test_workers_share_the_socket_and_the_figures(address: str) -> None:
    with ScriptedEngine(address, says("the fox")), process(address, "--http.workers", "2") as running:
        workers = set()
        for _ in range(200):
            response = httpx.get(f"http://127.0.0.1:{running.port}/stats")
            workers.add(response.json()["http"]["worker"])
            if len(workers) == 2:
                break
        assert workers == {0, 1}
        for _ in range(6):
            assert httpx.post(f"http://127.0.0.1:{running.port}/v1/completions", json={"prompt": "x"}).is_success
        counted = httpx.get(f"http://127.0.0.1:{running.port}/metrics").text
        assert 'http_requests_total{handler="/v1/completions",status="2xx"} 6.0' in counted
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(60) == ExitCode.OK


def test_a_client_cannot_make_up_addresses(address: str) -> None:
    """Fair shares go by the address of the connection, also where it is the loopback, whose headers uvicorn trusts."""
    with ScriptedEngine(address, says("the fox")) as engine, process(address) as running:
        headers = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https", "X-Real-IP": "203.0.113.7"}
        url = f"http://127.0.0.1:{running.port}/v1/completions"
        assert httpx.post(url, json={"prompt": "x"}, headers=headers).is_success
        assert engine.submits[-1].share == ("127.0.0.1", "")


def test_a_signal_that_comes_while_it_starts_ends_it(address: str) -> None:
    program = """if True:
        import os, signal, sys
        from frontends.http import process
        from inferengine.cli.main import main
        make_service = process.make_service
        def told_to_stop(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            return make_service(*arguments)
        process.make_service = told_to_stop
        sys.exit(main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", program, "http", "--wire.socket", address, "--http.port", "0"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == ExitCode.OK


@pytest.mark.parametrize(("flags", "workers"), [((), "2"), (("--http.workers", "3"), "3")])
def test_a_machine_of_eight_cores_gets_two_workers(address: str, flags: tuple[str, ...], workers: str) -> None:
    program = """if True:
        import sys
        from frontends.http import process
        from inferengine.cli.main import main
        class Workers:
            def __init__(self, serve, *, num_workers, **others):
                print(num_workers)
            def run(self):
                return 0
        process.usable_cores = lambda: 8.0
        process.Workers = Workers
        sys.exit(main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", program, "http", "--wire.socket", address, "--http.port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, timeout=60, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.split()) == (ExitCode.OK, [workers])


def test_a_worker_that_dies_is_replaced(address: str) -> None:
    with ScriptedEngine(address, says("the fox")), process(address, "--http.workers", "2") as running:
        children = Path(f"/proc/{running.popen.pid}/task/{running.popen.pid}/children")
        before = children.read_text().split()
        os.kill(int(before[0]), signal.SIGKILL)
        wait_until(lambda: len(set(children.read_text().split()) - set(before)) == 1)
        for _ in range(10):
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{running.port}/ready").status_code == 200)
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(60) == ExitCode.OK
        assert "a worker ended" in running.end()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_supervisor_is_told(address: str, workers: str, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(60)
        with process(address, "--http.workers", workers, notify=path, wait=False) as running:
            assert listener.recv(4096).startswith(b"READY=1\nSTATUS=serving http://127.0.0.1:")  # without an engine
            assert listener.recv(4096) == b"WATCHDOG=1"
            assert listener.recv(4096) == b"WATCHDOG=1"
            running.popen.send_signal(signal.SIGTERM)
            while (message := listener.recv(4096)) == b"WATCHDOG=1":
                continue
            assert message.startswith(b"STOPPING=1")
            assert running.popen.wait(60) == ExitCode.OK


def test_a_socket_from_the_supervisor_is_used(address: str) -> None:
    program = (
        "import os, sys\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'inferengine.cli', 'http', '--wire.socket', sys.argv[2]])\n"
    )
    with ScriptedEngine(address, says("the fox")), socket.create_server(("127.0.0.1", 0)) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, "-c", program, str(descriptor), address]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[descriptor], stderr=subprocess.DEVNULL) as popen:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/version", timeout=60)  # waits in the backlog until then
                assert answer.is_success
                popen.send_signal(signal.SIGTERM)
                assert popen.wait(60) == ExitCode.OK
            finally:
                popen.kill()


def test_a_unix_socket(address: str, tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    with ScriptedEngine(address, says("the fox")), process(address, "--http.uds", path, wait=False):
        wait_until(lambda: Path(path).exists())
        with httpx.Client(transport=httpx.HTTPTransport(uds=path, retries=3)) as client:
            wait_until(lambda: client.get("http://x/ready").status_code == 200)
            assert client.get("http://x/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_port_in_use_is_one_clear_sentence(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "inferengine.cli", "http", "--wire.socket", address, "--http.port", port]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != ExitCode.OK
    assert "http.port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_access_log_line_is_one_json_object(address: str) -> None:
    with ScriptedEngine(address, says("the fox")), process(address, "--log.format", "json") as running:
        running.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "seen-1"})
        running.http.get("/none")
        running.popen.send_signal(signal.SIGTERM)
        running.popen.wait(60)
        lines = [json.loads(line) for line in running.end().splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    assert [(line["path"], line["status"]) for line in requests] == [("/v1/completions", 200), ("/none", 404)]
    assert requests[0]["request_id"] == "seen-1"


def test_an_idle_front_end_uses_next_to_no_cpu(address: str) -> None:
    with ScriptedEngine(address, says("the fox")), process(address) as running:
        stat = Path(f"/proc/{running.popen.pid}/stat")

        def cpu_ticks() -> int:
            fields = stat.read_text().rpartition(") ")[2].split()
            return int(fields[11]) + int(fields[12])

        time.sleep(0.5)
        before = cpu_ticks()
        time.sleep(3.0)
        assert (cpu_ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.03 * 3.0
