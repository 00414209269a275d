"""Floods of small things over HTTP: parsed a piece at a time, and refused where they have no end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from frontends.common.piece_reader import PIECE, TURN_S, PieceReader
from frontends.common.server import MOST_BEHIND, MOST_HEAD_BYTES, HttpProtocol
from tests.frontends.common.test_server import ask, echo, exchange, serving

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def test_a_body_in_chunks_of_a_byte_is_whole() -> None:
    text = bytes(range(97, 123)) * 400
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in text)
    assert exchange(head + chunks + b"0\r\n\r\n", end=text)


@pytest.mark.parametrize(
    "flood", [b"a:b\r\n" * 40_000, b"a: " + b"b" * (MOST_HEAD_BYTES + 2 * PIECE)], ids=["lines", "one line"]
)
@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"])
def test_a_head_without_end_is_refused_and_so_are_trailers(flood: bytes, head: bytes) -> None:
    async def run() -> tuple[bytes, bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        async with serving(listener, echo):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + flood)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # of what was left unread
                answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer, await ask(port)

    answer, other = asyncio.run(run())
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    assert other.startswith(b"HTTP/1.1 200")


def test_a_head_of_the_usual_size_is_read_in_pieces() -> None:
    cookie = b"c" * (3 * PIECE)
    head = (
        b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nCookie: " + cookie + b"\r\nContent-Length: 4\r\n\r\nbody"
    )
    assert exchange(head, end=b"body")


def test_requests_one_behind_the_other_wait_unparsed_and_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    parse = HttpProtocol._parse_http

    def watched(protocol: HttpProtocol, data: bytes) -> None:
        nonlocal most
        parse(protocol, data)
        most = max(most, len(protocol.pipeline))

    monkeypatch.setattr(HttpProtocol, "_parse_http", watched)
    count = 3000

    async def run() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            writer.write(GET * count)
            seen = 0
            while seen < count:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                seen += 1
            writer.close()
            return seen

    assert asyncio.run(run()) == count
    assert most <= MOST_BEHIND + PIECE // len(GET) + 1


class Transport(asyncio.Transport):
    """A transport of nothing, which notes whether it is read."""

    is_read = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return False


def test_a_turn_ends_after_a_while_and_nothing_is_read_or_parsed_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def run() -> None:
        pieces: list[bytes] = []
        has_room = True
        transport = Transport()

        def parse(piece: bytes) -> None:
            nonlocal now
            pieces.append(piece)
            now += 2 * TURN_S

        monkeypatch.setattr("frontends.common.piece_reader.time.perf_counter", lambda: now)
        reader = PieceReader(parse, lambda: has_room)
        reader.begin(transport)
        data = bytes(range(256)) * 60  # 15,360
        reader.take(data)
        assert (len(pieces), transport.is_read) == (1, False)
        reader.take(b"late")  # was on its way
        has_room = False
        await asyncio.sleep(0.01)
        assert len(pieces) == 1
        has_room = True
        reader.go_on()
        await asyncio.sleep(0.01)
        assert b"".join(pieces) == data + b"late"
        assert max(map(len, pieces)) == PIECE
        assert transport.is_read

    asyncio.run(run())


def test_what_is_parsed_in_a_moment_takes_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.common.piece_reader.time.perf_counter", lambda: 0.0)
    pieces: list[bytes] = []
    transport = Transport()
    reader = PieceReader(pieces.append, lambda: True)
    reader.begin(transport)
    reader.take(bytes(range(256)) * 1024)
    assert b"".join(pieces) == bytes(range(256)) * 1024
    assert transport.is_read
