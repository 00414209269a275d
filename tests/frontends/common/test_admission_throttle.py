"""Requests begin a few at a time, in order, and nobody waits without a crowd."""

from __future__ import annotations

import asyncio
import contextlib

from frontends.common.event_loop import AdmissionThrottle


async def begin(throttle: AdmissionThrottle, name: str, log: list[str]) -> None:
    await throttle.wait()
    log.append(name)


def test_without_a_crowd_nobody_waits() -> None:
    async def run() -> list[str]:
        throttle, log = AdmissionThrottle(1), list[str]()
        for name in "abc":
            beginning = begin(throttle, name, log)
            with contextlib.suppress(StopIteration):  # to its end without a pause
                beginning.send(None)
            beginning.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return log

    assert asyncio.run(run()) == ["a", "b", "c"]


def test_a_crowd_begins_a_few_in_a_round_and_lets_others_in_between() -> None:
    async def run() -> tuple[list[str], list[int]]:
        throttle, log, begun = AdmissionThrottle(2), list[str](), list[int]()
        tasks = [asyncio.create_task(begin(throttle, name, log)) for name in "abcdefg"]
        while len(log) < 7:
            await asyncio.sleep(0)
            begun.append(len(log))
        await asyncio.gather(*tasks)
        return log, begun

    log, begun = asyncio.run(run())
    assert log == [*"abcdefg"]
    assert all(after - before <= 2 for before, after in zip([0, *begun], begun, strict=False))


def test_a_request_that_is_cancelled_while_waiting_delays_no_other() -> None:
    async def run() -> list[str]:
        throttle, log = AdmissionThrottle(1), list[str]()
        tasks = [asyncio.create_task(begin(throttle, name, log)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return log

    assert asyncio.run(run()) == ["a", "c"]
