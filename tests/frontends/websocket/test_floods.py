"""Floods of tiny frames: they are parsed a piece at a time, and neither fragments nor pongs pile up."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.websocket_relay import HANDSHAKE, frame
from frontends.common.piece_reader import PIECE
from frontends.websocket.channel import MOST_FRAGMENTS, FramesProtocol
from tests.frontends.websocket.builders import Server, make_engine, serving, wait_until

MASK = bytes(4)
FINAL, TEXT, MORE, PING, PONG, CLOSE = 0x80, 1, 0, 9, 10, 8


def tiny(opcode: int, payload: bytes = b"", *, is_final: bool = True) -> bytes:
    """Return a masked frame as a client sends it."""
    return bytes((FINAL * is_final | opcode, 0x80 | len(payload))) + MASK + payload


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with make_engine(tmp_path) as engine, serving(engine) as server:
        yield server


def connected(server: Server) -> socket.socket:
    """Open a socket and read as far as the hello frame."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(20)
    connection.sendall(HANDSHAKE.encode())
    seen = b""
    while b'"hello"' not in seen or not seen.endswith(b"}"):
        seen += connection.recv(4096)
    return connection


def received(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (more := connection.recv(num_bytes - len(found))):
            break
        found += more
    return found


def test_a_flood_is_parsed_in_pieces_and_every_ping_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    parse = FramesProtocol.__mro__[1].data_received

    def watched(protocol: FramesProtocol, data: bytes) -> None:
        sizes.append(len(data))
        parse(protocol, data)

    monkeypatch.setattr(FramesProtocol.__mro__[1], "data_received", watched)
    with connected(server) as connection:
        count = 20_000
        connection.sendall(tiny(PING) * count + frame(json.dumps({"type": "ping", "nonce": 7})))
        assert received(connection, 2 * count) == bytes((FINAL | PONG, 0)) * count
        assert b'"nonce":7' in connection.recv(4096)
    assert max(sizes) <= PIECE
    assert sum(sizes) > 6 * count


def test_a_message_in_some_fragments_is_read(server: Server) -> None:
    with connected(server) as connection:
        text = json.dumps({"type": "ping", "nonce": "whole"}).encode()
        pieces = [tiny(TEXT, text[:5], is_final=False)]
        pieces += [tiny(MORE, text[at : at + 1], is_final=False) for at in range(5, len(text))]
        connection.sendall(b"".join(pieces) + tiny(MORE))
        assert b'"nonce":"whole"' in connection.recv(4096)


def test_a_message_in_too_many_fragments_closes_its_socket_alone(server: Server) -> None:
    with connected(server) as connection, connected(server) as other:
        connection.sendall(tiny(TEXT, b"{", is_final=False) + tiny(MORE, is_final=False) * (2 * MOST_FRAGMENTS))
        found = received(connection, 1 << 20)
        assert found[0] == FINAL | CLOSE
        assert struct.unpack(">H", found[2:4]) == (1009,)
        assert b"more than 4096 fragments" in found
        other.sendall(frame(json.dumps({"type": "ping", "nonce": 1})))
        assert b'"nonce":1' in other.recv(4096)


def test_who_takes_no_pongs_is_not_read(server: Server) -> None:
    payload = bytes(125)
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.5)
        (protocol,) = [each for each in server._server.server_state.connections if isinstance(each, FramesProtocol)]
        pings, sent = memoryview(tiny(PING, payload) * 500_000), 0  # 65 MB
        while protocol.writable.is_set():
            with suppress(TimeoutError):  # a busy server reads late
                sent += connection.send(pings[sent : sent + (1 << 16)])
            assert sent < len(pings)
        with pytest.raises(TimeoutError):
            connection.sendall(pings[sent:])
        assert not protocol.writable.is_set()
        assert protocol.transport.get_write_buffer_size() < 1 << 20
        connection.settimeout(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        wait_until(lambda: bool(connection.recv(1 << 16)) and protocol.writable.is_set())


def test_messages_that_wait_hold_up_what_is_behind_them(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def noted(protocol: FramesProtocol) -> None:
        nonlocal most
        before(protocol)
        most = max(most, protocol.queue.qsize())

    before = FramesProtocol.send_receive_event_to_app
    monkeypatch.setattr(FramesProtocol, "send_receive_event_to_app", noted)
    with connected(server) as connection:
        ping = frame(json.dumps({"type": "ping"}))
        count = 20_000
        connection.sendall(ping * count)
        pong = b'{"type":"pong","nonce":null}'
        found = received(connection, count * (2 + len(pong)))
    assert found.count(b'"pong"') == count
    assert most <= PIECE // len(ping) + 1
