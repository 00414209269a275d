"""Where an EnginePool lets a request go on whose engine is lost: sessions without sockets under it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from inferengine.client import EnginePool
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Accept, Reject, Submit
from tests.client.test_going_on import Engine

Body = Callable[[EnginePool, list[Engine]], Awaitable[None]]


def run(body: Body, count: int) -> None:
    async def main() -> None:
        engines = [Engine() for _ in range(count)]
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


def asked(engines: list[Engine]) -> list[tuple[Engine, Submit]]:
    return [(engine, message) for engine in engines for message in engine.heard(Submit)]


def test_full_engines_are_asked_once_each_and_then_after_the_pause_they_name() -> None:
    async def body(pool: EnginePool, engines: list[Engine]) -> None:
        call = pool.submit([1, 2, 3], SamplingParams(max_tokens=50, seed=5)).call
        ((home, message),) = asked(engines)
        home.tell(Accept(call.id, message.stream, 3))
        home.step([message.stream], [11])
        home.dies()
        home.at(10.0)
        others = [engine for engine in engines if engine is not home]
        refusals = 0
        while found := asked(others):
            for engine, message in found:
                assert message.resume == (array("I", [11]).tobytes(),)
                refusals += 1
                assert refusals <= 2
                engine.tell(Reject(call.id, message.stream, "overloaded", "Full.", None, True, 2000))
        pool._watch()
        assert asked(others) == []
        for engine in others:
            engine.at(3.0)
        assert len(asked(others)) == 1
        assert not call.finished

    run(body, 3)
