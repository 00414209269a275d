"""Where an EnginePool resumes a request whose engine is lost, over sessions without sockets."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

import pytest

from inferengine.client import EnginePool
from inferengine.client import pool as pool_module
from inferengine.client.requests import OpenRequest
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Accept, Attach, Reject, Submit
from tests.client.builders import WAIT_S, ScriptedEngine, finish_of

Body = Callable[[EnginePool, list[ScriptedEngine]], Awaitable[None]]


def run(body: Body, count: int) -> None:
    async def main() -> None:
        engines = [ScriptedEngine() for _ in range(count)]
        pool = EnginePool([f"ipc:///nowhere/{number}" for number in range(count)])
        for client, engine in zip(pool.clients, engines, strict=True):
            client._session = engine.session
            client.send = lambda: None  # type: ignore[method-assign]
        try:
            await body(pool, engines)
        finally:
            for client in pool.clients:
                client._session = None
            await pool.close()

    asyncio.run(main())


def submits_at(engines: list[ScriptedEngine]) -> list[tuple[ScriptedEngine, Submit]]:
    return [(engine, message) for engine in engines for message in engine.received(Submit)]


def test_full_engines_are_tried_once_each_and_then_after_the_delay_that_they_name() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        request = pool.submit([1, 2, 3], SamplingParams(max_tokens=50, seed=5)).request
        ((home, message),) = submits_at(engines)
        home.send(Accept(request.id, message.stream, 3))
        home.step([message.stream], [11])
        home.die()
        home.run_until(10.0)
        others = [engine for engine in engines if engine is not home]
        refusals = 0
        while found := submits_at(others):
            for engine, message in found:
                assert message.resume == (array("I", [11]).tobytes(),)
                refusals += 1
                assert refusals <= 2
                engine.send(Reject(request.id, message.stream, "overloaded", "Full.", None, True, 2000))
        pool._watch()
        assert submits_at(others) == []
        for engine in others:
            engine.run_until(3.0)
        assert len(submits_at(others)) == 1
        assert not request.finished

    run(body, 3)


async def answer(engine: ScriptedEngine, *, has_request: bool) -> Attach:
    """Wait for an ATTACH at this engine, answer it, and return it."""
    found: list[Attach] = []
    async with asyncio.timeout(30.0):
        while not (found := engine.received(Attach)):
            await asyncio.sleep(0)
    (message,) = found
    if has_request:
        engine.send(Accept(message.id, message.stream, 3, attached=True))
    else:
        engine.send(Reject(message.id, message.stream, "not_found", "There is no such request."))
    return message


def test_a_reader_who_attached_follows_the_request_to_the_engine_that_resumes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "SEARCH_S", 0.0)

    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        home, other, third = engines
        reader = pool.attach(bytes(16))
        attached = asyncio.ensure_future(reader.accepted())
        message = await answer(home, has_request=True)
        await attached
        home.step([message.stream], [11])
        home.die()
        home.run_until(10.0)
        for has_request in (False, True):  # the submitter resumes it there in between
            assert (await answer(other, has_request=False)).cursors == (1,)
            probe = await answer(third, has_request=has_request)
        resumed = await answer(third, has_request=True)
        assert (resumed.cursors, resumed.stream != probe.stream) == ((1,), True)
        third.step([probe.stream, resumed.stream], [99, 12])
        assert (await anext(reader.streams[0])).token_ids == [11, 12]

    run(body, 3)


async def attach_and_lose(pool: EnginePool, home: ScriptedEngine) -> OpenRequest:
    """Attach to a request at the first engine, which dies; returns what the reader's client keeps of it."""
    pool._remember(bytes(16), pool._engines[0])
    request: OpenRequest = pool.attach(bytes(16)).request  # type: ignore[union-attr, assignment]
    await answer(home, has_request=True)
    home.die()
    home.run_until(10.0)
    return request


def test_a_reader_whose_request_no_engine_has_ends_once_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SEARCH_S", 0.0)

    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        home, other = engines
        request = await attach_and_lose(pool, home)
        for _ in range(3):
            await answer(other, has_request=False)
        assert not request.finished
        home.run_until(WAIT_S + 20.0)
        finish = finish_of(request)
        assert finish is not None
        assert finish.detail[0] == "engine_unavailable"
        assert finish.detail[1].endswith("no other has the request: submit it again.")

    run(body, 2)


def test_a_reader_whose_engine_is_back_reads_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SEARCH_S", 0.0)

    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        home, other = engines
        request = await attach_and_lose(pool, home)
        await answer(other, has_request=False)
        home.come_back()
        message = await answer(home, has_request=True)
        home.step([message.stream], [11])
        assert request.collectors[0].take().token_ids == [11]
        while pool._searches:
            for late in other.received(Attach):
                other.send(Reject(late.id, late.stream, "not_found", "There is no such request."))
            await asyncio.sleep(0)

    run(body, 2)
