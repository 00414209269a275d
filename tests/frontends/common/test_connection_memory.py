"""A connection's memory is free when it has ended, without the garbage collector, which runs rarely in a front end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from frontends.common.connection_limits import TrackedConnection
from frontends.common.server import FrontendServer, HttpProtocol
from tests.frontends.common.test_server import application
from tests.frontends.garbage import without_collector

CONNECTIONS = 20
WAIT_S = 10.0
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Yield a server that keeps idle connections for an hour, as the front ends' uvicorn does for a day."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1, timeout_keep_alive=3600
    )
    server = FrontendServer(config)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield listener.getsockname()[1]
    server.should_exit = True
    await task


async def sends_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    return


async def sends_half_a_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)


async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")


async def sends_two_requests_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((HEAD + b"\r\n") * 2)
    await reader.readuntil(b"\r\n\r\n")


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("act", [sends_nothing, sends_half_a_head, is_answered, sends_two_requests_at_once])
def test_an_ended_connection_leaves_nothing(
    act: Callable[..., Awaitable[None]], leave: Callable[[asyncio.StreamWriter], None]
) -> None:
    async def run() -> Counter[str]:
        async with serving() as port:
            with without_collector(HttpProtocol, TrackedConnection, RequestResponseCycle) as left:
                peers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS)]
                for reader, writer in peers:
                    await act(reader, writer)
                while left()["HttpProtocol"] < CONNECTIONS:  # all were accepted
                    await asyncio.sleep(0.01)
                for _, writer in peers:
                    leave(writer)
                deadline = asyncio.get_running_loop().time() + WAIT_S
                while left() and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(0.02)
                return left()

    assert asyncio.run(run()) == {}
