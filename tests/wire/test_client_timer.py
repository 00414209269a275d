"""AsyncClient's clock: what is due is sent when it is due, also under uvloop, where a timer for the past is no
TimerHandle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from inferengine.client import AsyncClient
from inferengine.wire import messages
from inferengine.wire.messages import READY, Credit, Message, Step, Welcome


def test_credit_that_is_due_does_not_wait_for_the_next_message(tmp_path: Path) -> None:
    """A STEP, and then nothing for a long time: its credit comes all the same."""
    address = f"ipc://{tmp_path}/engine.sock"

    async def run() -> Message:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(address)

        async def receive() -> tuple[bytes, Message]:
            routing_id, *frames = await asyncio.wait_for(router.recv_multipart(), 10.0)
            return routing_id, messages.decode(frames)

        client = AsyncClient(address, status_address="")
        client.start()
        peer, _ = await receive()
        welcome = Welcome("engine", bytes(8), READY, ("ready", 1.0), None, heartbeat_s=3600.0, lease_s=7200.0)
        await router.send_multipart([peer, *messages.encode(welcome)])
        await router.send_multipart(
            [peer, *messages.encode(Step(1, 1, messages.from_u32(b""), messages.from_u32(b"")))]
        )
        _, message = await receive()
        await client.close()
        context.destroy(linger=0)
        return message

    assert asyncio.run(run()) == Credit(1)


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
