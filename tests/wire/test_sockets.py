"""Options that something depends on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from inferengine.wire import sockets

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_no_socket_has_heartbeats_of_zeromq(context: Context) -> None:
    """With them a peer that fills the engine's pipe and disconnects aborts the process (libzmq 4.3.5)."""
    for socket in (
        sockets.engine_router(context, 4096),
        sockets.engine_publisher(context),
        sockets.replay_router(context),
        sockets.client_dealer(context, b"x"),
        sockets.status_subscriber(context),
    ):
        with socket:
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0


def test_a_peer_that_fills_the_pipe_and_leaves_is_survived(context: Context, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with sockets.engine_router(context, 4096) as router:
        router.setsockopt(zmq.RCVHWM, 64)
        router.bind(f"ipc://{tmp_path}/e.sock")
        flooding: Context = zmq.Context()
        with flooding.socket(zmq.DEALER) as flooder:
            flooder.setsockopt(zmq.SNDHWM, 0)
            flooder.setsockopt(zmq.LINGER, 0)
            flooder.connect(f"ipc://{tmp_path}/e.sock")
            for _ in range(5000):
                flooder.send(b"x" * 100)
            assert router.poll(2000)
        flooding.term()
        with sockets.client_dealer(context, b"other") as other:
            other.connect(f"ipc://{tmp_path}/e.sock")
            assert other.poll(2000, zmq.POLLOUT)
            other.send(b"hello")
            while router.recv_multipart()[0] != b"other":
                continue


@pytest.mark.parametrize(
    ("address", "status", "replay"),
    [
        ("ipc:///run/e.sock", "ipc:///run/e.sock.status", "ipc:///run/e.sock.replay"),
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556", "tcp://127.0.0.1:5557"),
    ],
)
def test_the_other_addresses_follow_from_the_first(address: str, status: str, replay: str) -> None:
    assert sockets.default_status_address(address) == status
    assert sockets.replay_address(address) == replay


@pytest.mark.parametrize("role", ["http", "", "\0odd", "ü" * 300])
def test_a_routing_id_is_one_that_zeromq_takes(role: str) -> None:
    routing_id = sockets.routing_id(role)
    assert 1 <= len(routing_id) <= 255
    assert routing_id[0] != 0
    assert routing_id != sockets.routing_id(role)
