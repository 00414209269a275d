"""JSON of any size: read as json.loads reads it, within bounds, while other threads go on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from frontends.common.json import LARGE, MOST_CONTAINERS, OffLoop, TooManyContainers, parse


def filler(seed: int) -> Any:
    """Return something of every kind that JSON has."""
    draw = random.Random(seed)
    kinds: list[Any] = [None, True, 'näher \\ "[{" \U0001f389', 2**70, -7, 1.5e300, -0.0, 128_000, {}, []]
    items = [draw.choice(kinds) for _ in range(30_000)]
    return {"list": items, "of": [{"role": "user", "n": number} for number in range(5000)], "twice": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_large_body_is_read_as_the_standard_library_reads_it(encoding: str) -> None:
    body = json.dumps(filler(1), ensure_ascii=False)[:-1] + ', "twice": 2}'
    assert len(body) > LARGE
    found = parse(body.encode(encoding))
    assert found == json.loads(body)
    assert found["twice"] == 2
    assert [type(value) for value in found["list"]] == [type(value) for value in json.loads(body)["list"]]


@pytest.mark.parametrize("padding", ["", " " * LARGE], ids=["small", "large"])
def test_what_is_no_json_is_told_with_its_place(padding: str) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        parse(padding + '{"a": 1,}')
    assert raised.value.pos == len(padding) + 8
    with pytest.raises(ValueError, match="no Infinity here"):
        parse(padding + "[Infinity]", parse_constant=refuse)


def refuse(name: str) -> Any:
    raise ValueError(f"no {name} here")


@pytest.mark.parametrize("container", ["[]", "{}"])
def test_more_lists_and_objects_than_any_request_has_are_refused(container: str) -> None:
    body = "[" + ",".join([container] * MOST_CONTAINERS) + "]"
    with pytest.raises(TooManyContainers, match="100000 lists and objects"):
        parse(body.encode())
    assert len(parse(body.replace(container + ",", "", 1))) == MOST_CONTAINERS - 1


def test_brackets_in_texts_do_not_count() -> None:
    code = 'if (a["b"][0]) { say("\\"{[\\\\"); }\n' * (MOST_CONTAINERS // 3)
    assert parse(json.dumps({"prompt": code}).encode()) == {"prompt": code}


def test_others_go_on_while_a_large_body_is_read() -> None:
    body = json.dumps([128_000] * 250_000)

    async def turns_meanwhile() -> int:
        reading = asyncio.ensure_future(OffLoop().run(len(body), parse, body))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await reading) == 250_000
        return turns

    assert asyncio.run(turns_meanwhile()) >= 4  # a thread that keeps the interpreter to itself leaves one or two


def test_a_small_body_is_read_at_once() -> None:
    async def read() -> bool:
        reading = asyncio.ensure_future(OffLoop().run(2, parse, "{}"))
        await asyncio.sleep(0)
        return reading.done()

    assert asyncio.run(read())


def test_large_ones_are_read_one_after_the_other() -> None:
    running: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        assert running == [number]
        time.sleep(0.002)
        running.remove(number)
        return number

    async def read() -> list[int]:
        off_loop = OffLoop()
        return await asyncio.gather(*(off_loop.run(LARGE, work, number) for number in range(8)))

    assert asyncio.run(read()) == list(range(8))
