"""`inferengine ws` as a process: sockets from a supervisor, sd_notify, and an end that loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from websockets.exceptions import ConnectionClosed

from tests.frontends.websocket.builders import ANSWER, Reading, make_engine, open_socket


@contextlib.contextmanager
def process(folder, *flags, environment=None, handed_over=None):
    """Yield the process, the port it listens on, and what it notified so far."""
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(f"{folder}/notify.sock")
    notify.settimeout(60)
    command = [sys.executable, "-m", "inferengine.cli", "ws", "--wire.socket", f"ipc://{folder}/engine.sock", *flags]
    if handed_over is not None:  # LISTEN_PID must be the process's own, as systemd sets it
        program = (
            "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid()); os.dup2(int(sys.argv[1]), 3); "
            "os.execv(sys.argv[2], sys.argv[2:])"
        )
        command = [sys.executable, "-c", program, str(handed_over.fileno()), *command]
    child = subprocess.Popen(
        command,
        env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify.sock", **(environment or {})},
        pass_fds=(handed_over.fileno(),) if handed_over is not None else (),
    )
    try:
        first = notify.recv(4096).decode()
        assert first.startswith("READY=1\n")
        port = int(first.rpartition("port ")[2])
        yield SimpleNamespace(child=child, port=port, notify=notify)
    finally:
        child.kill()
        child.wait(10)
        notify.close()


def free_port_flags():
    return ("--ws.port", "0")


def begin_draining(engine, server, client):
    """Start a request, and tell the front end to end."""
    engine.hold()
    wait_ready(client)
    client.generate()
    client.until("accepted")
    server.child.send_signal(signal.SIGTERM)
    while client.until("state")["engine"]["state"] != "DRAINING":
        continue


def test_sigterm_finishes_open_requests_and_refuses_new_ones(tmp_path):
    with make_engine(tmp_path) as engine, process(tmp_path, *free_port_flags()) as server:
        with open_socket(server) as client:
            begin_draining(engine, server, client)
            client.generate("late")
            assert client.until("error")["error"]["code"] == "draining"
            engine.release()
            reading = Reading()
            while not reading.done:
                reading.take(client.until("delta", "done", id="r1"))
            assert reading.text[0] == ANSWER
            with pytest.raises(ConnectionClosed) as closed:
                client.until("never")
            assert closed.value.rcvd.code == 1012
        assert server.child.wait(60) == 0


def test_a_second_signal_stops_at_once(tmp_path):
    with make_engine(tmp_path) as engine, process(tmp_path, *free_port_flags()) as server:
        with open_socket(server) as client:
            begin_draining(engine, server, client)
            server.child.send_signal(signal.SIGTERM)
            assert server.child.wait(60) == 130
        engine.wait_for(lambda: len(engine.cancelled) == 1)


def test_a_drain_ends_at_its_time_limit(tmp_path):
    flags = (*free_port_flags(), "--engine.drain_timeout_s", "0.3")
    with make_engine(tmp_path) as engine, process(tmp_path, *flags) as server, open_socket(server) as client:
        engine.hold()
        wait_ready(client)
        client.generate()
        client.until("accepted")
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 0


def test_a_socket_handed_over_is_used(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = {"LISTEN_FDS": "1"}
        with (
            make_engine(tmp_path),
            process(tmp_path, environment=environment, handed_over=listener) as server,
            open_socket(server) as client,
        ):
            assert server.port == listener.getsockname()[1]
            children = Path(f"/proc/{server.child.pid}/task/{server.child.pid}/children")
            assert not children.read_text(), "one worker runs in the process itself"
            assert client.hello["type"] == "hello"


def test_the_watchdog_is_notified(tmp_path):
    environment = {"WATCHDOG_USEC": "400000"}
    with process(tmp_path, *free_port_flags(), environment=environment) as server:
        signs = [server.notify.recv(4096) for _ in range(3)]
        assert signs == [b"WATCHDOG=1"] * 3


def test_a_taken_port_is_reported_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = subprocess.run(
            [sys.executable, "-m", "inferengine.cli", "ws", "--ws.port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 5
    assert "--ws.port" in ended.stderr
    assert "Traceback" not in ended.stderr


def wait_ready(client):
    """Wait until the engine behind the socket takes requests."""
    state = client.hello["engine"]["state"]
    while state != "READY":
        state = client.until("state")["engine"]["state"]
