"""Readers with news have their turns in order, and a long turn lets others in between."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from frontends.common.event_loop import SLICE_S, Coalescer
from frontends.common.resumable import ChoiceLog
from inferengine.client import Delta, Finish, TokenLogprobs


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


class EndedStream:
    """A stream of which everything has come."""

    finished = True

    def __init__(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self.num_tokens = len(token_ids)
        self._delta = Delta(token_ids, "", logprobs, Finish("length", None, 1, 0, len(token_ids), 0.0, 0.0, 0.0))

    def take(self) -> Delta:
        return self._delta


@pytest.mark.parametrize("num_alternatives", [None, 3])
def test_a_long_output_is_read_in_pieces_with_turns_of_others_in_between(num_alternatives: int | None) -> None:
    """A reader that attaches with a cursor far into an output detokenizes all of it again."""
    most = 64
    tokens, cursor = list(range(3 * most)), most + 7
    row = TokenLogprobs(-1.0, 1, [1] * (num_alternatives or 0), [-1.0] * (num_alternatives or 0))
    log = ChoiceLog(EndedStream(tokens, None if num_alternatives is None else [row] * len(tokens)), Coalescer())  # type: ignore[arg-type]
    log.catch_up()

    async def run() -> tuple[list[Delta], list[int]]:
        deltas: list[Delta] = []
        turns: list[int] = []

        async def others() -> None:
            while not deltas or deltas[-1].finish is None:
                turns.append(len(deltas))
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        await asyncio.sleep(0)
        async for delta in log.view(cursor, most):
            deltas.append(delta)
        await other
        return deltas, turns

    deltas, turns = asyncio.run(run())
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert max(len(delta.token_ids) for delta in deltas) == most // (1 + (num_alternatives or 0))
    ends = list(itertools.accumulate(len(delta.token_ids) for delta in deltas))
    assert cursor in ends
    assert turns == list(range(len(deltas)))
    assert [delta.finish is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
