"""Listening sockets: a port in use is one sentence with its remedy."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from inferengine.process.listen import AddressTaken, listen_tcp, listen_unix, open_listeners, url


def test_port_zero_becomes_a_number_that_can_be_printed() -> None:
    with listen_tcp("127.0.0.1", 0, "http") as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url(listener, path="/chat") == f"http://127.0.0.1:{port}/chat"
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_wildcard_address_is_printed_as_loopback() -> None:
    with listen_tcp("0.0.0.0", 0, "ws") as listener:
        assert url(listener).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "port", "complaint"),
    [
        ("192.0.2.1", 0, "192.0.2.1 is no address of this machine: choose another with --ws.host"),
        ("127.0.0.1", 70000, "70000 is no port: --ws.port takes 0 to 65535"),
        ("no host", 0, "'no host' is no address of this machine"),
    ],
)
def test_an_impossible_address_names_its_flag(host: str, port: int, complaint: str) -> None:
    with pytest.raises(AddressTaken, match=complaint):
        listen_tcp(host, port, "ws")


def test_a_port_in_use_names_the_flag_that_chooses_another() -> None:
    with listen_tcp("127.0.0.1", 0, "http") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"port {port} on 127\.0\.0\.1 is in use .* --http\.port N"):
            listen_tcp("127.0.0.1", port, "http")


def test_a_unix_socket_left_behind_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    listen_unix(path).close()  # leaves the file
    with listen_unix(path), pytest.raises(AddressTaken, match=r"is in use: choose another with --http\.uds"):
        listen_unix(path)


def test_a_unix_socket_of_a_stopped_process_is_in_use_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX) as stopped, contextlib.ExitStack() as stack:
        stopped.bind(path)
        stopped.listen(0)
        for _ in range(4):  # more than may wait
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(path)
        with pytest.raises(AddressTaken, match="is in use"):
            listen_unix(path)


def test_a_file_in_the_way_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("text")
    with pytest.raises(AddressTaken):
        listen_unix(str(path))
    assert path.read_text() == "text"


def test_a_connection_notices_a_peer_that_has_vanished() -> None:
    """Half-open connections: the kernel probes silent peers and gives up on bytes that nobody acknowledges."""
    (listener,) = open_listeners("http", "127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        while True:
            with contextlib.suppress(BlockingIOError):
                accepted, _ = listener.accept()
                break
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            probing_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            probing_s += accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * accepted.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_KEEPCNT
            )
            assert probing_s <= 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
