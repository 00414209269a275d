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

from frontends.common.server import ACCEPTS_PER_ROUND, Server

HELLO = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204})
    await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def serving(listener: socket.socket) -> AsyncIterator[Server]:
    config = uvicorn.Config(application, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = Server(config)
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
