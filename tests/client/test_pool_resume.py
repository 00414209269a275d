"""Where an EnginePool resumes a request whose engine is lost, over sessions without sockets."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from inferengine.client import EnginePool
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Accept, Reject, Submit
from tests.client.builders import ScriptedEngine

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
