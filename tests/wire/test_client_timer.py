"""AsyncClient's clock under uvloop, where a timer for the past is no TimerHandle."""

from __future__ import annotations

import asyncio

import uvloop

from inferengine.client import AsyncClient


def test_a_time_in_the_past_does_not_stop_the_clock() -> None:
    async def run() -> int:
        client = AsyncClient("inproc://nobody", status_address="")
        client.start()
        client._plan_tick(asyncio.get_running_loop().time() - 1.0)
        client._plan_tick(asyncio.get_running_loop().time() - 2.0)
        turns = 0

        def count() -> None:
            nonlocal turns
            turns += 1
            tick()

        tick, client._tick = client._tick, count  # type: ignore[method-assign]
        client._plan_tick(asyncio.get_running_loop().time() - 3.0)
        await asyncio.sleep(0.05)
        await client.close()
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) >= 1
