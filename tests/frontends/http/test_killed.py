"""SIGKILL of a front end in the middle of a hundred streams: each goes on through another one, word for word."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import httpx

from inferengine.engine.service import EngineService
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import address_of, check_idle, run_service, small_capacity
from tests.frontends.http.builders import wait_until
from tests.frontends.http.resuming import Reader
from tests.frontends.http.test_process import Process

NUM_STREAMS = 100
STEP_S = 0.01


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return completions and chats, some of several choices, some that a stop string ends."""
    made = []
    for number in range(NUM_STREAMS):
        more: dict[str, Any] = {"seed": number, "ignore_eos": True, "max_tokens": 60 + number % 40}
        if number % 10 == 3:
            more["n"] = 2
        if number % 10 == 7:
            more["stop"] = ["zz", "Q"]
        if number % 3:
            made.append(("/v1/completions", {"prompt": f"prompt {number}", **more}))
        else:
            message = {"role": "user", "content": f"message {number}"}
            made.append(("/v1/chat/completions", {"messages": [message], **more}))
    return made


async def read_all(port: int, readers: list[Reader]) -> None:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(reader.read(http) for reader in readers))


def whole_texts(port: int) -> list[dict[int, str]]:
    readers = [Reader(path, body) for path, body in bodies()]
    asyncio.run(read_all(port, readers))
    assert all(reader.finished for reader in readers)
    return [reader.texts() for reader in readers]


def killed_in_the_middle(engine: EngineService, first: Process, second: Process) -> list[Reader]:
    """Read all streams through `first`, kill it when half the tokens are there, and read on through `second`."""
    readers = [Reader(path, body) for path, body in bodies()]

    async def read() -> None:
        reading = asyncio.create_task(read_all(first.port, readers))
        while sum(len(log.tokens) for log in engine.io.publisher.open_logs()) < NUM_STREAMS * 30:
            await asyncio.sleep(0.02)
            assert not reading.done()
        first.popen.kill()
        await reading
        cut = [reader for reader in readers if not reader.finished]
        # Stop strings end some, and on a busy machine the first streams end before the last ones begin.
        assert len(cut) > NUM_STREAMS / 2
        await read_all(second.port, cut)

    asyncio.run(read())
    return readers


def test_a_hundred_streams_survive_the_front_end_that_began_them() -> None:
    with ExitStack() as stack:
        capacity = small_capacity(max_num_seqs=128, num_blocks=2048)
        engine = stack.enter_context(run_service(lambda: SimulatedExecutor(capacity, step_s=STEP_S)))
        first, second = Process(address_of(engine)), Process(address_of(engine))
        stack.callback(first.end)
        stack.callback(second.end)
        wait_until(lambda: first.ready() and second.ready(), 30.0)
        expected = whole_texts(second.port)
        readers = killed_in_the_middle(engine, first, second)
        assert [reader.texts() for reader in readers] == expected
        assert all(reader.finished for reader in readers)
        for reader in readers:
            ids = [event.id for event in reader.events if event.id is not None]
            assert len(set(ids)) == len(ids)
            assert [index for index, _ in reader.finish_reasons()] == sorted(reader.texts())
        check_idle(engine)
