"""Comings and goings on the real engine with a simulated device: nothing is left behind, and nobody waits for others.

Short; `benchmarks/soak` does the same ten thousand times with processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.engine.builders import check_idle, run_service
from tests.frontends.http.builders import HEADERS, FrontEnd, open_request, wait_until
from tests.frontends.http.test_engine import Served, serve

LONG = {"prompt": "the fox", "stream": True, "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(step_s=0.002) as built:
        yield built


def tasks(served: Served) -> int:
    """Return the tasks of the front end's event loop."""
    found: list[int] = []
    done = threading.Event()

    def count() -> None:
        found.append(len(asyncio.all_tasks()))
        done.set()

    served.front.call(count)
    assert done.wait(60)
    return found[0]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def one_life(port: int, draw: random.Random) -> None:
    """Connect, ask, and leave: in the middle of its request, of the answer, politely or not."""
    with open_request(port, "/v1/completions", **LONG) as connection:
        if draw.random() < 0.5:
            connection.recv(1 + draw.randrange(2000))
        if draw.random() < 0.5:  # a reset instead of a FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 400\r\n\r\n{"[: draw.randrange(1, 52)])


def test_comings_and_goings_leave_no_block_file_or_task(served: Served) -> None:
    draw = random.Random(1)
    for _ in range(20):
        one_life(served.front.port, draw)
    check_idle(served.engine)
    wait_until(lambda: served.front.service.num_calls == 0)
    files, num_tasks = open_files(), tasks(served)
    for _ in range(150):
        one_life(served.front.port, draw)
    check_idle(served.engine)
    wait_until(lambda: served.front.service.num_calls == 0)
    wait_until(lambda: open_files() <= files and tasks(served) <= num_tasks)


def test_idle_streams_hold_nobody_up(served: Served) -> None:
    """More streams than run at once: most get nothing for a long time, and a question is answered at once."""
    waiting: list[socket.socket] = []
    payload = json.dumps({**LONG, "max_tokens": 900}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    try:
        for _ in range(200):
            connection = socket.create_connection(("127.0.0.1", served.front.port))
            connection.sendall(head + payload)
            waiting.append(connection)
        wait_until(lambda: served.front.service.num_calls == 200)
        times = []
        for _ in range(10):
            started = time.monotonic()
            assert served.http.get("/health").status_code == 200
            times.append(time.monotonic() - started)
        assert sorted(times)[5] < 2.0
    finally:
        for connection in waiting:
            connection.close()
    check_idle(served.engine)


def test_a_reader_that_takes_nothing_costs_bounded_memory_and_delays_nobody(served: Served) -> None:
    """Its tokens wait in one place, as numbers; what is written to its socket stops at the transport's limit."""
    body = {**LONG, "n": 16, "request_id": "x" * 120}  # 7 MB of events: more than the kernel's buffers hold
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    with socket.socket() as frozen:
        frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frozen.connect(("127.0.0.1", served.front.port))
        frozen.sendall(head + payload)
        wait_until(lambda: served.engine.io.publisher.num_open == 16)
        assert served.complete(max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        wait_until(lambda: served.engine.io.publisher.num_open == 0)  # the engine is not held up either
        assert served.front.service.num_calls == 1
        connections = served.front._server.server_state.connections
        waiting = [one.transport.get_write_buffer_size() for one in connections]
        assert 0 < max(waiting) < 2**20
    wait_until(lambda: served.front.service.num_calls == 0)


def test_a_restarted_engine_is_served_from_by_the_same_front_end() -> None:
    """Streams that opt out of going on end with an error event, the next request is taken as soon as the engine is
    back. How soon both are, at most 5 s, is measured by benchmarks/soak."""
    begun: set[int] = set()  # readers with the first part of their stream
    ended: list[dict[str, Any]] = []

    def read(url: str) -> None:
        body, text = {**LONG, "resubmit": False}, ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            for piece in answer.iter_text():
                begun.add(threading.get_ident())
                text += piece
        lines = text.split("\n\n")
        ended.append(json.loads(lines[-3].removeprefix("data: ")) if lines[-2] == "data: [DONE]" else {})

    with ExitStack() as stack:
        engine = stack.enter_context(run_service(step_s=0.01))
        front = FrontEnd(engine.config)
        stack.callback(front.stop)
        http = stack.enter_context(httpx.Client(base_url=front.url, headers=HEADERS, timeout=30))
        wait_until(lambda: http.get("/ready").status_code == 200)
        readers = [threading.Thread(target=read, args=(front.url,)) for _ in range(5)]
        for reader in readers:
            reader.start()
        wait_until(lambda: len(begun) == 5)
        engine.abort()
        assert engine.wait(60) is not None
        for reader in readers:
            reader.join(20)
        assert len(ended) == 5
        assert all(event["error"]["code"] in ("draining", "engine_unavailable", "engine_restarted") for event in ended)
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        stack.enter_context(run_service(wire={"socket": engine.config.wire.socket}, step_s=0.001))
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
