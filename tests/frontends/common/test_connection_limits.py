"""Who keeps a place among a worker's connections, and for how long. Time is what the test says it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from frontends.common.connection_limits import (
    BODY,
    HEAD,
    IDLE,
    ConnectionLimits,
    ConnectionTracker,
    RefusalMetrics,
    TrackedConnection,
    raise_file_limit,
    room_for_connections,
)
from frontends.common.server import FrontendServer
from inferengine.errors import InferEngineError

LIMITS = ConnectionLimits(header_s=10, body_progress_s=15, idle_s=75, most=8)


class Transport:
    """What is asked of one."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_paused = False
        self.said: InferEngineError | None = None

    def abort(self) -> None:
        self.is_closed = True

    close = abort

    def is_reading(self) -> bool:
        return not self.is_paused


class House:
    """Connections with a clock of their own."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.now = 100.0
        self.refusals = RefusalMetrics("inferengine_http")
        self.connections = ConnectionTracker(limits, self.refusals, lambda: self.now)

    def come(self, address: str = "127.0.0.1", *, phase: int = IDLE, waiting: int = 0) -> TrackedConnection:
        """Add a connection, which does this from now on."""
        connection = self.connections.admit((address, 1))
        transport = Transport()
        connection.answer = lambda error: setattr(transport, "said", error)
        self.connections.made(connection, transport)  # type: ignore[arg-type]
        connection.phase, connection.num_waiting = phase, waiting
        connection.num_requests = 1 if waiting or phase == BODY else 0
        return connection

    def after(self, seconds: float) -> None:
        """Advance the clock, with a sweep a second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.connections.sweep()


def transport_of(connection: TrackedConnection) -> Transport:
    assert isinstance(connection.transport, Transport)
    return connection.transport


def has_gone(connection: TrackedConnection) -> bool:
    return transport_of(connection).is_closed


@pytest.mark.parametrize(
    ("phase", "waiting", "seconds", "reason"),
    [
        (IDLE, 0, 10, "header_timeout"),  # it never said anything
        (HEAD, 0, 10, "header_timeout"),
        (BODY, 1, 15, "body_timeout"),
    ],
)
def test_what_a_client_does_not_finish_has_an_end(phase: int, waiting: int, seconds: float, reason: str) -> None:
    house = House()
    connection = house.come(phase=phase, waiting=waiting)
    house.after(seconds - 1)
    assert not has_gone(connection)
    house.after(3)
    assert has_gone(connection)
    assert house.refusals.total(reason) == 1
    assert len(house.connections) == 0


@pytest.mark.parametrize(("phase", "waiting"), [(HEAD, 0), (BODY, 1)])
def test_half_a_request_is_told_why_it_ends(phase: int, waiting: int) -> None:
    house = House()
    connection = house.come(phase=phase, waiting=waiting)
    house.after(20)
    error = transport_of(connection).said
    assert error is not None
    assert (error.code, error.http_status) == ("request_timeout", 408)


def test_between_requests_a_connection_is_kept_for_the_idle_timeout() -> None:
    house = House()
    connection = house.come(waiting=1)
    house.after(5)
    connection.num_waiting = 0
    house.after(74)
    assert not has_gone(connection)
    house.after(3)
    assert has_gone(connection)
    assert house.refusals.total("idle_timeout") == 1


def test_a_request_that_is_answered_and_an_open_socket_are_left_alone() -> None:
    house = House()
    connection = house.come(waiting=1)
    pipelining = house.come(waiting=1, phase=HEAD)
    house.after(10_000)
    assert not has_gone(connection)
    assert not has_gone(pipelining)


def test_a_body_that_keeps_coming_is_read_on_and_one_that_drips_is_not() -> None:
    house = House()
    steady, dripping = house.come(phase=BODY, waiting=1), house.come(phase=BODY, waiting=1)
    for _ in range(60):
        steady.num_bytes += 100
        dripping.num_bytes += 10
        house.after(1)
    assert not has_gone(steady)
    assert has_gone(dripping)


def test_a_body_that_nobody_reads_here_is_not_its_client_s_fault() -> None:
    house = House()
    connection = house.come(phase=BODY, waiting=1)
    transport_of(connection).is_paused = True
    house.after(100)
    assert not has_gone(connection)
    transport_of(connection).is_paused = False
    house.after(17)
    assert has_gone(connection)


def test_the_time_of_a_body_begins_with_it() -> None:
    house = House()
    connection = house.come(phase=BODY, waiting=1)
    house.after(14)
    connection.phase, connection.num_requests = IDLE, 2
    house.after(1)
    connection.phase = BODY
    house.after(14)
    assert not has_gone(connection)


# -- when all places are taken -------------------------------------------------------------------------------------


def test_the_oldest_that_asks_for_nothing_gives_its_place_to_a_newer_one() -> None:
    house = House()
    answered = house.come(waiting=1)
    sending = house.come(phase=BODY, waiting=1)
    beginning = house.come(phase=HEAD)
    house.after(1)
    idle = [house.come() for _ in range(5)]
    house.after(1)
    newest = [house.come() for _ in range(5)]
    assert all(map(has_gone, idle))
    for connection in newest:
        connection.phase, connection.num_waiting = IDLE, 1
    house.come(waiting=1)
    assert has_gone(beginning)
    house.come(waiting=1)
    assert has_gone(sending)
    assert not has_gone(answered)
    assert house.refusals.total("displaced") == 7
    assert not any(connection.is_probe for connection in newest)


def test_while_every_place_is_answered_newcomers_are_probes_and_only_so_many() -> None:
    house = House()
    answered = [house.come(waiting=1) for _ in range(8)]
    probes = [house.come() for _ in range(house.connections.most_probes + 3)]
    assert all(connection.is_probe for connection in probes)
    assert [has_gone(connection) for connection in probes] == [True] * 3 + [False] * house.connections.most_probes
    assert not any(map(has_gone, answered))
    assert house.refusals.total("no_room") == len(probes)
    house.after(4)
    assert all(map(has_gone, probes))
    house.connections.lost(answered[0])
    assert not house.come().is_probe


def test_one_address_cannot_take_all_connections() -> None:
    house = House(LIMITS._replace(most_per_address=3))
    mine = [house.come("10.0.0.1", waiting=1) for _ in range(3)]
    assert house.come("10.0.0.1").is_probe
    assert house.refusals.total("address") == 1
    assert not house.come("10.0.0.2").is_probe
    mine[1].num_waiting = 0
    assert not house.come("10.0.0.1").is_probe
    assert has_gone(mine[1])


def test_by_default_an_address_has_half_and_this_machine_all() -> None:
    house = House()
    assert not any(house.come("10.0.0.1", waiting=1).is_probe for _ in range(4))
    assert house.come("10.0.0.1").is_probe
    house = House()
    assert not any(house.come("127.0.0.1", waiting=1).is_probe for _ in range(8))


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    house = House(LIMITS._replace(most_per_address=2))
    assert not house.come("2001:db8::1", waiting=1).is_probe
    assert not house.come("2001:db8::2", waiting=1).is_probe
    assert house.come("2001:db8::3", waiting=1).is_probe
    assert not house.come("2001:db8:0:1::1", waiting=1).is_probe


def test_places_are_free_again_when_connections_go() -> None:
    house = House()
    for _ in range(50):
        connection = house.come(waiting=1)
        house.connections.lost(connection)
        house.connections.lost(connection)
    assert len(house.connections) == 0
    assert house.refusals.total("no_room") == house.refusals.total("displaced") == 0


# -- open files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("file_limit")
def test_connections_leave_files_for_everything_else() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = len(os.listdir("/proc/self/fd"))
    for limit in (used + 40, used + 400, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        room, probes = room_for_connections(0)
        assert room > 8
        assert room + probes < limit - used
    assert room_for_connections(5)[0] == 5


@pytest.mark.usefixtures("file_limit")
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 500), hard))
    assert raise_file_limit() == hard
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


# -- with uvicorn --------------------------------------------------------------------------------------------------


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer when the body is there, and `/slow` never."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body") and scope["path"] != "/slow":
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[tuple[int, RefusalMetrics]]:
    refusals = RefusalMetrics("inferengine_http")
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = FrontendServer(config, ConnectionLimits(**limits), refusals)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield listener.getsockname()[1], refusals
    server.should_exit = True
    await task


HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: local"
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (HALF_HEAD, b"HTTP/1.1 408"), (HALF_BODY, b"HTTP/1.1 408")])
def test_half_sent_requests_are_closed_by_the_server(sent: bytes, answer: bytes) -> None:
    async def run() -> list[bytes]:
        async with serving(header_s=0.5, body_progress_s=0.5, idle_s=0.5) as (port, _):
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in streams:
                writer.write(sent)
            async with asyncio.timeout(30):
                answers = [await reader.read() for reader, _ in streams]
            for _, writer in streams:
                writer.close()
        return answers

    answers = asyncio.run(run())
    assert all(found.startswith(answer) and (answer or not found) for found in answers)


OPENAI, ANTHROPIC, OLLAMA = ("/v1/chat/completions", "/v1/messages", "/api/chat")


def whole(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and document of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), json.loads(body)


def check_shape(path: str, answer: bytes, status: int, code: str) -> None:
    """Check that the answer is an error as this path's API writes them."""
    found, headers, document = whole(answer)
    assert found == status
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    if path == ANTHROPIC:
        assert document["type"] == "error"
        assert document["error"].keys() == {"type", "message"}
        assert document["request_id"] == headers["request-id"] == headers["x-request-id"]
    elif path == OLLAMA:
        assert document.keys() == {"error"}
        assert isinstance(document["error"], str)
    else:
        assert document["error"].keys() == {"message", "type", "param", "code"}
        assert document["error"]["code"] == code


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, OLLAMA])
@pytest.mark.parametrize(
    "rest",
    [
        " HTTP/1.1\r\nHost: local",  # half a head
        " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",  # half a body
    ],
)
def test_a_request_that_came_too_slowly_is_refused_in_the_shape_of_its_api(path: str, rest: str) -> None:
    async def run() -> bytes:
        async with serving(header_s=0.2, body_progress_s=0.2) as (port, _):
            return await sent(port, f"POST {path}{rest}".encode())

    check_shape(path, asyncio.run(run()), 408, "request_timeout")


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, OLLAMA])
def test_what_is_no_http_is_refused_in_the_shape_of_its_api(path: str) -> None:
    async def run() -> bytes:
        async with serving() as (port, _):
            return await sent(port, f"POST {path} HTTP/1.1\r\nno header\r\n\r\n".encode())

    check_shape(path, asyncio.run(run()), 400, "invalid_request")


@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC, OLLAMA])
def test_a_request_above_the_limit_is_refused_in_the_shape_of_its_api(path: str) -> None:
    async def run() -> bytes:
        async with serving(most=2) as (port, _):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in slow:
                writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await writer.drain()
            while not (
                answer := await sent(port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            ).startswith(b"HTTP/1.1 503"):
                await asyncio.sleep(0)  # the slow ones have not all arrived
            for _, writer in slow:
                writer.close()
            return answer

    answer = asyncio.run(run())
    check_shape(path, answer, 503, "overloaded")
    assert whole(answer)[1]["retry-after"] == "1"


async def sent(port: int, request: bytes) -> bytes:
    """Return what the server answers before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def test_health_is_answered_while_every_place_is_taken() -> None:
    async def ask(port: int, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        async with asyncio.timeout(30):
            answer = await reader.readuntil(b"\r\n")
        writer.close()
        return answer

    async def run() -> None:
        async with serving(most=4) as (port, refusals):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in slow:
                writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await writer.drain()
            while not (await ask(port, "/other")).startswith(b"HTTP/1.1 503"):
                await asyncio.sleep(0)  # the slow ones have not all arrived
            assert (await ask(port, "/health")).startswith(b"HTTP/1.1 200")
            assert refusals.total("no_room") >= 2
            for _, writer in slow:
                writer.close()

    asyncio.run(run())


def test_a_flood_of_half_heads_keeps_nobody_out() -> None:
    async def run() -> None:
        async with serving(most=8, header_s=60) as (port, refusals):
            flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            for _, writer in flood:
                writer.write(HALF_HEAD)
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                async with asyncio.timeout(30):
                    assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            assert refusals.total("displaced") >= 92
            for _, writer in flood:
                writer.close()

    asyncio.run(run())


def test_after_a_pause_of_the_process_connections_are_read_before_they_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP for 20 s while a request comes in: the rest of it lies in the socket's buffer."""
    house = House()
    connection = house.come(phase=HEAD)
    server = FrontendServer(uvicorn.Config(lambda scope: None))
    server.connections = house.connections
    monkeypatch.setattr("frontends.common.server.time.monotonic", lambda: house.now)
    asyncio.run(server.on_tick(0))
    house.now += 20.0
    asyncio.run(server.on_tick(10))
    assert not has_gone(connection)
    connection.phase, connection.num_waiting, connection.num_requests = IDLE, 1, 1  # now it has been read
    house.now += 0.1
    asyncio.run(server.on_tick(11))
    assert not has_gone(connection)

    silent = house.come(phase=HEAD)
    for counter in (20, 30, 40, 50):  # a loop that is always late judges all the same
        house.now += 10.0
        asyncio.run(server.on_tick(counter))
    assert has_gone(silent)
