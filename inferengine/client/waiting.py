"""How a task waits for an answer that another part of the program resolves."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from inferengine.client.streams import Answer

T = TypeVar("T")


async def wait_for(answer: Answer[T]) -> T:
    """Its value, or the InferEngineError that it failed with. Any number of tasks may wait."""
    if not answer.done:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        previous = answer.on_done

        def wake() -> None:
            if previous is not None:
                previous()
            if not waiter.done():
                waiter.set_result(None)

        answer.on_done = wake
        await waiter
    return answer.result()
