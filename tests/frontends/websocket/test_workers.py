"""`inferengine ws --ws.workers 2`: to clients one front end, whichever worker their socket lands on."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from frontends.common.auth import entry, new_key
from tests.engine.builders import address_of, check_idle, run_service
from tests.frontends.websocket.builders import Reading, open_socket, wait_until
from tests.frontends.websocket.test_process import process

ALICE, BOB = new_key(), new_key()
RESUME_WINDOW_S = 1.0


@pytest.fixture(scope="module")
def engine():
    with run_service(step_s=0.01) as engine:
        yield engine
        check_idle(engine)


@pytest.fixture(scope="module")
def service(engine, tmp_path_factory):
    """Yield one process with two workers, for all tests."""
    folder = tmp_path_factory.mktemp("ws")
    keys = folder / "keys.toml"
    keys.write_text(entry("alice", ALICE, max_in_flight=2) + entry("bob", BOB))
    flags = ("--ws.port", "0", "--ws.workers", "2", "--auth.keys_file", str(keys))
    flags += ("--wire.resume_ttl_s", str(RESUME_WINDOW_S), "--wire.socket", address_of(engine))
    with process(folder, *flags) as service:
        for _ in range(20):
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{service.port}/ready").status_code == 200)
        yield service
        service.child.send_signal(signal.SIGTERM)
        assert service.child.wait(60) == 0


def workers_of(service):
    return [
        int(pid) for pid in Path(f"/proc/{service.child.pid}/task/{service.child.pid}/children").read_text().split()
    ]


def worker_of(service, client):
    """Return the process that has the other end of a client's connection."""
    port = client.connection.socket.getsockname()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[2].endswith(f":{port:04X}") and row[9] != "0"}
    for pid in workers_of(service):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(descriptor) in {f"socket:[{inode}]" for inode in inodes}:
                    return pid
    raise AssertionError("no worker has this connection")


def connect(service, key=BOB):
    return open_socket(service, additional_headers={"Authorization": f"Bearer {key}"})


@contextlib.contextmanager
def on_each_worker(service, key=BOB):
    """Yield a socket on one worker and another one on the other."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(service, key))
        place = worker_of(service, first)
        for _ in range(300):
            with contextlib.ExitStack() as attempt:
                second = attempt.enter_context(connect(service, key))
                if worker_of(service, second) != place:
                    stack.push(attempt.pop_all())
                    break
        else:
            pytest.fail("every socket came to one worker")
        yield first, second


def generate(client, num_tokens, **rest):
    """Start a request, and wait until it is in the middle of its output."""
    client.generate("r1", "fox", params={"max_tokens": num_tokens, "ignore_eos": True}, **rest)
    reading = Reading()
    while not reading.text:
        reading.take(client.until("accepted", "delta", "error", id="r1"))
    return reading


def resume(client, accepted, cursor, name="again"):
    client.send(type="resume", id=name, request_id=accepted["request_id"], cursors=[cursor], detached=True)


def read_on(client, reading, name):
    while not reading.ended:
        reading.take(client.until("accepted", "delta", "done", "error", id=name))


def figures(service, path="/health"):
    return httpx.get(f"http://127.0.0.1:{service.port}{path}", headers={"Authorization": f"Bearer {BOB}"})


def test_a_stream_resumes_at_another_worker_after_the_window_of_the_first(service):
    """The worker that was left forgets the request meanwhile, and must not end it."""
    num_tokens = int(2.5 * RESUME_WINDOW_S / 0.01)
    with on_each_worker(service) as (first, second):
        reading = generate(first, num_tokens, detached=True)
        first.drop()
        resume(second, reading.accepted, reading.cursors[0])
        read_on(second, reading, "again")
        assert (reading.done[0]["finish_reason"], reading.cursors[0]) == ("length", num_tokens)
        whole = Reading()
        resume(second, reading.accepted, 0, "whole")
        read_on(second, whole, "whole")
        assert reading.text == whole.text


def test_a_worker_that_dies_ends_only_its_own_sockets_and_is_replaced(service):
    with on_each_worker(service) as (first, second):
        before, doomed = set(workers_of(service)), worker_of(service, first)
        lost, kept = generate(first, 150, detached=True), generate(second, 150)
        os.kill(doomed, signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            first.until("done")
        resume(second, lost.accepted, lost.cursors[0])
        while not (kept.ended and lost.ended):
            frame = second.until("delta", "done", "error")
            (kept if frame["id"] == "r1" else lost).take(frame)
        assert [reading.done[0]["finish_reason"] for reading in (kept, lost)] == ["length"] * 2
        assert [reading.cursors[0] for reading in (kept, lost)] == [150, 150]
        wait_until(lambda: len(workers_of(service)) == 2)
        assert len(before & set(workers_of(service))) == 1
        wait_until(lambda: figures(service).json()["sockets"] == 1)
    with on_each_worker(service) as sockets:
        for client in sockets:
            while client.hello["engine"]["state"] != "READY":
                client.hello = client.until("state")
            client.generate("new", params={"max_tokens": 3, "ignore_eos": True})
            assert client.until("done", "error", id="new")["type"] == "done"


def test_a_key_s_limit_holds_over_all_workers(service):
    with on_each_worker(service, ALICE) as (first, second):
        for client in (first, second):
            generate(client, 400)
        for client in (first, second):
            client.generate("third")
            assert client.until("error", id="third")["error"]["code"] == "rate_limited"
        first.send(type="cancel", id="r1")
        first.until("done", id="r1")
        second.generate("fourth", params={"max_tokens": 2, "ignore_eos": True})
        assert second.until("done", "error", id="fourth")["type"] == "done"


def test_any_worker_reports_all_sockets(service):
    wait_until(lambda: figures(service).json()["sockets"] == 0)
    with on_each_worker(service):
        wait_until(lambda: figures(service).json()["sockets"] == 2)  # those that came to the wrong worker are closed
        told = {}
        while len(told) < 2:
            document = figures(service, "/stats").json()
            told[document["ws"]["worker"]] = (document["sockets"], document["ws"]["sockets"])
        assert told == {0: (2, 1), 1: (2, 1)}
        for _ in range(4):
            assert "vllm:websocket_connections_active 2.0" in figures(service, "/metrics").text
    wait_until(lambda: figures(service).json()["sockets"] == 0)


def test_two_signals_end_all_workers_at_once(engine, tmp_path):
    flags = ("--ws.port", "0", "--ws.workers", "2", "--wire.socket", address_of(engine))
    with process(tmp_path, *flags) as service, open_socket(service) as client:
        while client.hello["engine"]["state"] != "READY":
            client.hello = client.until("state")
        generate(client, 900)
        service.child.send_signal(signal.SIGTERM)
        while client.until("state")["engine"]["state"] != "DRAINING":
            continue
        service.child.send_signal(signal.SIGTERM)
        assert service.child.wait(60) == 130
