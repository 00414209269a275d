"""Readers with news have their turns in order, and a long turn lets others in between."""

from __future__ import annotations

import asyncio

from frontends.common.event_loop import SLICE_S, Coalescer


class Reader:
    def __init__(self, name: str, log: list[str], clock: Clock, costs_s: float = 0.0) -> None:
        self.name, self.log, self.clock, self.costs_s = name, log, clock, costs_s

    def take_news(self) -> None:
        self.log.append(self.name)
        self.clock.now += self.costs_s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_all_that_is_noted_has_its_turn_when_the_loop_comes_round() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        clock = Clock()
        coalescer = Coalescer(clock)
        for name in "abc":
            coalescer.add(Reader(name, log, clock))
        assert log == []
        await turns()
        coalescer.add(Reader("d", log, clock))
        await turns()
        return log

    assert asyncio.run(run()) == ["a", "b", "c", "d"]


def test_a_long_turn_is_cut_and_goes_on_behind_what_else_is_due() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        clock = Clock()
        coalescer = Coalescer(clock)
        for name in "abc":
            coalescer.add(Reader(name, log, clock, costs_s=SLICE_S * 2))
        asyncio.get_running_loop().call_soon(log.append, "a request")
        asyncio.get_running_loop().call_soon(coalescer.add, Reader("d", log, clock))
        await turns()
        return log

    assert asyncio.run(run()) == ["a", "a request", "b", "c", "d"]
