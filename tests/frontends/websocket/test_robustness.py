"""Comings and goings on the real engine with a simulated device: nothing is left behind, and nobody waits for others.

Short; `benchmarks/soak` does the same ten thousand times with processes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket

import pytest

from benchmarks.websocket_relay import HANDSHAKE, frame
from tests.engine.builders import address_of, check_idle, run_service
from tests.frontends.websocket.builders import open_socket, serving, wait_until

RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: a reset instead of a FIN


@pytest.fixture(scope="module")
def engine():
    with run_service(step_s=0.002) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with serving(address_of(engine), ws={"max_sockets": 400}) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        yield server


def request(tokens, **rest):
    params = {"max_tokens": tokens, "ignore_eos": True}
    return frame(json.dumps({"type": "generate", "id": "r", "prompt": "the fox", "params": params, **rest}))


def one_life(server, draw):
    """Connect, ask, and leave: in the middle of a handshake, a frame, an answer, politely or not."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(20)
        hello = HANDSHAKE.encode()
        if draw.random() < 0.2:
            connection.sendall(hello[: draw.randrange(1, len(hello))])
            return
        connection.sendall(hello)
        connection.recv(4096)
        if draw.random() < 0.1:
            connection.sendall(frame("{")[: draw.randrange(1, 8)])
            return
        connection.sendall(request(draw.choice((1, 20, 800)), detached=draw.random() < 0.2))
        if draw.random() < 0.6:
            connection.recv(1 + draw.randrange(2000))
        if draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def is_left_by_all(server):
    return not server.front_end._socket.connections and not server.front_end._services.registry._logs


def test_many_clients_leave_no_block_file_task_or_log(tmp_path):
    draw = random.Random(1)
    with (
        run_service(step_s=0.002) as engine,
        serving(address_of(engine), wire={"resume_ttl_s": 0.2}) as server,
    ):
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        for _ in range(20):
            one_life(server, draw)
        wait_until(lambda: is_left_by_all(server))
        check_idle(engine)
        gc.collect()
        files, num_tasks = len(os.listdir("/proc/self/fd")), server.num_tasks()
        for _ in range(150):
            one_life(server, draw)
        wait_until(lambda: is_left_by_all(server))
        check_idle(engine)
        gc.collect()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files and server.num_tasks() <= num_tasks)


def test_idle_sockets_delay_no_other(server):
    idle = []
    try:
        for _ in range(300):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(HANDSHAKE.encode())
            idle.append(connection)
        wait_until(lambda: len(server.front_end._socket.connections) == 300)
        with open_socket(server) as client:
            client.generate(params={"max_tokens": 20})
            assert client.read("r1")["r1"].done[0]["usage"]["completion_tokens"] == 20
    finally:
        for connection in idle:
            connection.close()
    wait_until(lambda: not server.front_end._socket.connections)


def test_many_requests_at_once_are_all_served(engine, server):
    crowd = []
    try:
        for _ in range(120):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.settimeout(20)
            connection.sendall(HANDSHAKE.encode())
            crowd.append(connection)
        for connection in crowd:
            assert connection.recv(4096).startswith(b"HTTP/1.1 101")
        for connection in crowd:
            connection.sendall(request(5))
        for connection in crowd:
            seen = b""
            while b'"type":"done"' not in seen:
                data = connection.recv(65536)
                assert data, seen
                seen += data
            assert b'"completion_tokens":5' in seen
    finally:
        for connection in crowd:
            connection.close()
    check_idle(engine)
