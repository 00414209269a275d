"""LostConnections: descriptors of connections whose routing id another took over, which libzmq keeps open for ever."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import zmq

from inferengine.client import Client
from inferengine.engine.io import lost_connections
from inferengine.engine.io.lost_connections import LostConnections
from inferengine.sampling_params import SamplingParams
from inferengine.wire.curve import ClientKeys, new_pair, write_pair
from inferengine.wire.messages import Ping
from tests.engine.builders import (
    RawClient,
    address_of,
    assert_asks_for_keys,
    assert_served,
    run_held,
    run_service,
    tokens_of,
    wait_until,
)
from tests.ports import free_port

PAIRS = 8
QUIET_S = 0.3


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_connections, "UNNOTICED_S", QUIET_S)
    monkeypatch.setattr(lost_connections, "CHECK_S", 0.05)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def leave_forgotten(address: str, pairs: int = PAIRS) -> None:
    """Make pairs of connections under one routing id each, of which the first goes on sending; then all are closed."""
    raws = []
    for number in range(pairs):
        first = RawClient(address, routing_id=b"twin%d" % number)
        raws += [first, RawClient(address, routing_id=b"twin%d" % number)]
        first.send(Ping(1))
    time.sleep(QUIET_S)
    for raw in raws:
        raw.close()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_closed_connections_give_their_descriptors_back(scheme: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with run_service(wire={"tcp": address}) as engine:
        client = Client(address_of(engine))
        try:
            client.connect(60.0)
            before = descriptors()
            leave_forgotten(address_of(engine) if scheme == "ipc" else address)
            wait_until(lambda: descriptors() <= before)
            assert tokens_of(client) == 4
        finally:
            client.close()
        assert_served(address_of(engine), address)


def test_running_requests_go_on_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_connections, "MAX_LOST", PAIRS)
    with run_held() as (engine, device):
        client = Client(address_of(engine))
        try:
            client.connect(60.0)
            stream = client.submit([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True)).streams[0]
            leave_forgotten(address_of(engine))
            wait_until(lambda: engine.io.lost_connections.num_renewals == 1)
            device.let()
            assert sum(len(delta.token_ids) for delta in stream) == 500
        finally:
            client.close()


def test_a_few_wait_for_the_end_of_what_runs() -> None:
    with run_held() as (engine, device):
        client = Client(address_of(engine))
        try:
            client.connect(60.0)
            stream = client.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)).streams[0]
            leave_forgotten(address_of(engine), 2)
            time.sleep(3 * QUIET_S)
            assert engine.io.lost_connections.num_renewals == 0
            device.let()
            assert sum(len(delta.token_ids) for delta in stream) == 200
            wait_until(lambda: engine.io.lost_connections.num_renewals == 1)
        finally:
            client.close()


def test_a_client_that_leaves_few_again_and_again_ends_others_connections_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_connections, "MAX_LOST", PAIRS)
    with run_service() as engine:
        leave_forgotten(address_of(engine), 2)
        wait_until(lambda: engine.io.lost_connections.num_renewals == 1)
        leave_forgotten(address_of(engine), 2)
        time.sleep(3 * QUIET_S)
        assert engine.io.lost_connections.num_renewals == 1
        monkeypatch.setattr(lost_connections, "MIN_INTERVAL_S", 0.5)
        wait_until(lambda: engine.io.lost_connections.num_renewals == 2)


def test_many_are_closed_at_once_however_short_ago_the_last_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_connections, "MAX_LOST", PAIRS)
    with run_service() as engine:
        leave_forgotten(address_of(engine), 2)
        wait_until(lambda: engine.io.lost_connections.num_renewals == 1)
        leave_forgotten(address_of(engine))
        wait_until(lambda: engine.io.lost_connections.num_renewals == 2)


def test_clients_that_come_and_go_end_nobodys_connection() -> None:
    with run_service() as engine:
        for _ in range(5):
            RawClient(address_of(engine)).close()
        time.sleep(3 * QUIET_S)
        assert engine.io.lost_connections.num_renewals == 0


class FakeEndpoint:
    """An Endpoint of which only the events of its ROUTER are there. `accept` takes a connection, as libzmq does."""

    def __init__(self, path: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.monitor, self._events = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        self.monitor.bind("inproc://events")
        self._events.connect("inproc://events")
        self.num_bound_again = 0
        self._path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()

    def accept(self) -> tuple[socket.socket, socket.socket]:
        """Return the client's end and ours."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._path)
        ours, _ = self._listener.accept()
        event = struct.pack("=HI", int(zmq.EVENT_ACCEPTED), ours.fileno())
        self._events.send_multipart([event, f"ipc://{self._path}".encode()])
        return client, ours

    def bind_again(self, schemes: Collection[str]) -> None:
        self.num_bound_again += 1

    def close(self) -> None:
        self._listener.close()
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint(tmp_path / "engine")
    yield endpoint
    endpoint.close()


def give_number_to_a_closed_pipe(ours: socket.socket) -> int:
    """Close a connection without an event, and open under its number a pipe whose other end is closed."""
    number = ours.detach()
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, number)
    os.close(reader)
    return number


def give_number_to_another_socket(ours: socket.socket) -> int:
    """Give the number to a socket of something else."""
    number = ours.detach()
    one, other = socket.socketpair()
    os.dup2(one.fileno(), number)
    one.close()
    other.close()
    return number


@pytest.mark.parametrize("reuse", [give_number_to_a_closed_pipe, give_number_to_another_socket])
@pytest.mark.parametrize("seen_before", [True, False])
def test_a_number_that_something_else_has_now_is_no_lost_connection(
    endpoint: FakeEndpoint, reuse: Callable[[socket.socket], int], *, seen_before: bool
) -> None:
    lost = LostConnections(endpoint)  # type: ignore[arg-type]
    client, ours = endpoint.accept()
    if seen_before:
        lost.tick(0.0, busy=False)
    number = reuse(ours)
    for second in range(1, 9):
        lost.tick(float(second), busy=False)
    os.close(number)
    client.close()
    assert endpoint.num_bound_again == 0


def test_a_connection_that_its_client_has_closed_is_lost_when_libzmq_keeps_it(endpoint: FakeEndpoint) -> None:
    lost = LostConnections(endpoint)  # type: ignore[arg-type]
    client, ours = endpoint.accept()
    lost.tick(0.0, busy=False)
    client.close()
    lost.tick(1.0, busy=False)
    assert endpoint.num_bound_again == 0
    lost.tick(1.0 + 2 * QUIET_S, busy=False)
    ours.close()
    assert endpoint.num_bound_again == 1


def test_keys_are_asked_for_where_they_were(tmp_path: os.PathLike[str]) -> None:
    server, friend = new_pair(), new_pair()
    secret, clients = os.path.join(tmp_path, "engine.key"), os.path.join(tmp_path, "clients.toml")
    write_pair(secret, server)
    with open(clients, "w") as file:
        file.write(f'friend = "{friend.public.decode()}"\n')
    address = f"tcp://127.0.0.1:{free_port()}"
    with run_service(wire={"tcp": address, "curve_secret_file": secret, "curve_clients_file": clients}) as engine:
        leave_forgotten(address_of(engine))
        wait_until(lambda: engine.io.lost_connections.num_renewals == 1)
        assert_served(address_of(engine))
        assert_served(address, curve=ClientKeys(friend, server.public))
        assert_asks_for_keys(address)
