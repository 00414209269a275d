"""Sending: connections are used again while they last."""

from __future__ import annotations

import asyncio
import time

from inferengine.bench.load_generator import LoadClient, LoadReply
from inferengine.bench.load_options import LoadOptions, request_bodies
from tests.bench.servers import FakeServer, serving


async def two_in_turn(server: FakeServer) -> list[LoadReply]:
    """Return the second reply, sent once the server has closed the first one's connection, where it does."""
    options = LoadOptions(url=server.url, requests=2)
    load = LoadClient(options, lambda: None)
    first, second = request_bodies(options, "fake")
    replies = [await load.send(first)]
    deadline = time.monotonic() + 10
    while server.hangs_up and load._idle[0].is_open and time.monotonic() < deadline:
        await asyncio.sleep(0.001)
    replies.append(await asyncio.wait_for(load.send(second), 10))
    load.close()
    return replies


def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    with serving() as server:
        server.hangs_up = True
        replies = asyncio.run(two_in_turn(server))
    assert [reply.is_good for reply in replies] == [True, True]
    assert server.num_connections == 2


def test_a_connection_that_stays_open_is_used_again() -> None:
    with serving() as server:
        replies = asyncio.run(two_in_turn(server))
    assert [reply.is_good for reply in replies] == [True, True]
    assert server.num_connections == 1
