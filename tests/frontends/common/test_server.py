"""Connections are accepted many at a time, and as long as there is room for one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from frontends.common import server
from frontends.common.connection_limits import RefusalMetrics
from frontends.common.server import ACCEPTS_PER_ROUND, MOST_AHEAD, FrontendServer

HELLO = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def serving(
    listener: socket.socket, app: Any = application, refusals: RefusalMetrics | None = None
) -> AsyncIterator[FrontendServer]:
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = FrontendServer(config, refusals=refusals)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield server
    server.should_exit = True
    await task


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HELLO)
    answer = await reader.read()
    writer.close()
    return answer


def test_a_crowd_is_served_and_nobody_after_the_end() -> None:
    async def run() -> list[bytes]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        port = listener.getsockname()[1]
        async with serving(listener):
            answers = await asyncio.gather(*(ask(port) for _ in range(ACCEPTS_PER_ROUND * 5)))
        with pytest.raises(ConnectionRefusedError):
            await ask(port)
        return answers

    answers = asyncio.run(run())
    assert len(answers) == ACCEPTS_PER_ROUND * 5
    assert all(answer.startswith(b"HTTP/1.1 204") for answer in answers)


def open_connections(counts: RefusalMetrics, number: int, *, until: int) -> int:
    """Open so many connections at once to the first worker of `counts`, which it keeps; return how many it has when it
    has as many as `until`, or after a second."""

    async def run() -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        address = listener.getsockname()
        async with serving(listener, refusals=counts) as server:
            clients = [socket.create_connection(address) for _ in range(number)]
            for _ in range(100):
                if len(server.connections) >= until:
                    break
                await asyncio.sleep(0.01)
            found = len(server.connections)
            for client in clients:
                client.close()
        return found

    return asyncio.run(run())


def two_workers(others: int) -> RefusalMetrics:
    """Return the counts of two workers, of which the second has so many connections."""
    counts = RefusalMetrics("test", 2)
    counts.choose_worker(1)
    counts.set_open(others)
    counts.choose_worker(0)
    return counts


def test_a_worker_with_more_connections_leaves_the_next_ones_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.common.server.OTHERS_FIRST_S", 60.0)
    assert open_connections(two_workers(0), 12, until=12) == MOST_AHEAD
    assert open_connections(two_workers(3), 12, until=12) == 3 + MOST_AHEAD
    assert open_connections(two_workers(50), 12, until=12) == 12


def test_a_connection_that_another_worker_took_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others were left time for a connection and took it, they are left time for the next one too."""

    async def run() -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        address, other = listener.getsockname(), listener.dup()
        async with serving(listener, refusals=two_workers(0)) as server:
            clients = [socket.create_connection(address) for _ in range(MOST_AHEAD)]
            while len(server.connections) < MOST_AHEAD:
                await asyncio.sleep(0.01)
            clients.append(socket.create_connection(address))
            await asyncio.sleep(0.05)  # it is seen, and waits for others
            clients.append(other.accept()[0])
            acceptor: Any = server.servers[0]
            acceptor._listen_after_others()
            clients.append(socket.create_connection(address))
            await asyncio.sleep(0.1)
            found = len(server.connections)
            for client in [*clients, other]:
                client.close()
        return found

    monkeypatch.setattr("frontends.common.server.OTHERS_FIRST_S", 60.0)  # over when this test says so
    assert asyncio.run(run()) == MOST_AHEAD


def test_connections_that_no_other_worker_takes_are_taken() -> None:
    assert open_connections(two_workers(0), 40, until=40) == 40


def test_a_process_without_room_for_another_file_accepts_again_when_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        num_refused = 0

        def accept(self) -> Any:
            if self.num_refused == 0:
                self.num_refused = 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def run() -> tuple[bytes, int]:
        listener = Full()
        listener.bind(("127.0.0.1", 0))
        async with serving(listener):
            answer = await ask(listener.getsockname()[1])
        return answer, listener.num_refused

    monkeypatch.setattr("frontends.common.server.NO_ROOM_WAIT_S", 0.01)
    answer, num_refused = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 204")
    assert num_refused == 1


# -- offers of other protocols -----------------------------------------------------------------------------------------

OFFER = (
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n\r\nits body."
)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, and the names of the headers."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    body += b" " + b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def exchange(*parts: bytes, end: bytes) -> bytes:
    """Send these one after the other on one connection, and return what comes up to and with `end`."""

    async def run() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(listener, echo):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.02)
            answer = await asyncio.wait_for(reader.readuntil(end), 60.0)
            writer.close()
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize("split", [len(OFFER), len(OFFER) - 9, len(OFFER) - 4, 40])
def test_a_request_that_offers_http_2_keeps_its_body(split: int) -> None:
    """Java's client makes this offer with its first request."""
    whole = b"its body. host content-length"
    assert exchange(OFFER[:split], OFFER[split:], end=whole).startswith(b"HTTP/1.1 200")


def test_an_offer_leaves_the_connection_and_its_other_words_alone() -> None:
    last = OFFER.replace(b"HTTP2-Settings\r\n", b"close\r\n").replace(b"its body.", b"last one.")
    answers = exchange(OFFER, OFFER + last, end=b"last one. host content-length connection")
    assert answers.count(b"HTTP/1.1 200") == 3
    assert b"upgrade" not in answers


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------------


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """Answer in three parts of a length that is not told before."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one ", b"two ", b"three"):
        await send({"type": "http.response.body", "body": part, "more_body": part != b"three"})


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(connection: bytes) -> None:
    async def run() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(listener, stream):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(b"GET / HTTP/1.0\r\nConnection: " + connection + b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10.0)
            writer.close()
            return answer

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two three"


# -- an answer before the whole body -----------------------------------------------------------------------------------


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"9")]})
    await send({"type": "http.response.body", "body": b"too large"})


def send_all_then_read(head: bytes, body: bytes) -> bytes:
    """Send a request, and read only then, as many clients do. Return the answer, until the server ends it."""

    def client(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(head + body)
            answer = b""
            while part := connection.recv(4096):
                answer += part
            return answer

    async def run() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with serving(listener, refuse):
                return await asyncio.to_thread(client, listener.getsockname())

    return asyncio.run(run())


@pytest.mark.parametrize("request_line", [b"POST / HTTP/1.1\r\nConnection: close", b"POST / HTTP/1.0"])
def test_an_answer_before_the_body_arrives_though_the_connection_ends(request_line: bytes) -> None:
    size = 16 * 1024 * 1024  # more than the system's buffers hold
    answer = send_all_then_read(request_line + b"\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size)
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"too large")


def test_nothing_is_written_behind_the_last_answer() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = send_all_then_read(head, b"800000\r\n" + b"x" * 0x800000 + b"\r\nno chunk\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("ends", [b"Connection: close\r\n", b""], ids=["close", "keep"])
def test_a_refused_body_is_not_read_without_end(monkeypatch: pytest.MonkeyPatch, ends: bytes) -> None:
    monkeypatch.setattr(server, "MOST_IGNORED_BYTES", 1024 * 1024)
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + ends + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with pytest.raises(ConnectionError):
        send_all_then_read(head, chunk * 1024)
