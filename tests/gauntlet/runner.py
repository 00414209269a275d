"""One round: ask everything at its time, kill what is to be killed, and look at what is left afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from tests.gauntlet.asks import Ask
from tests.gauntlet.house import Figures, House, held
from tests.gauntlet.outcomes import Outcome
from tests.gauntlet.rounds import Round
from tests.gauntlet.way_http import Http
from tests.gauntlet.way_wire import Wire
from tests.gauntlet.way_ws import Websocket

HANG_S = 60.0  # in which no request ends or comes: what has not ended hangs
SPARE_DESCRIPTORS = 6  # that may differ: a keep-alive connection, a log, the asker's own socket
SPARE_THREADS = 4  # pools start their threads with the first use
SPARE_RSS_BYTES = 192 << 20  # caches that fill, once
SETTLE_S = 15.0


@dataclass
class Ran:
    """What came of a round. `leaks` are failures, `warnings` are not."""

    outcomes: dict[int, Outcome]
    leaks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    hung: list[int] = field(default_factory=list)


def run(house: House, one: Round, *, longest_gap_s: float) -> Ran:
    """Run a round on a service that is READY. `longest_gap_s`: between two tokens, before that is a warning."""
    asyncio.run(_warm_up(house))
    house.settle()
    before = house.figures()
    failed_before = house.stats()["failed_steps"]
    started = time.monotonic()
    ran, problems = asyncio.run(_run(house, one))
    ran.seconds = time.monotonic() - started
    ran.stats = house.settle(SETTLE_S)
    ran.leaks += problems
    ran.leaks += _left_in_engine(ran.stats)
    if not one.kills_s:
        ran.leaks += _left_in_processes(house, before)
        if (failed := ran.stats["failed_steps"] - failed_before) > 0:
            ran.warnings.append(f"{failed} steps failed: {ran.stats['last_error']}")
    for number, outcome in ran.outcomes.items():
        if outcome.longest_gap_s > longest_gap_s and not one.kills_s:
            ran.warnings.append(f"request {number} waited {outcome.longest_gap_s:.1f} s between two tokens")
    return ran


async def _warm_up(house: House) -> None:
    """Send a request each way, so that what is made once is there when the figures are read."""
    wire, http, ws = Wire(house.address), Http(house.http_port), Websocket(house.ws_port)
    await wire.start()
    await ws.start()
    params = {"max_tokens": 2, "temperature": 0.0}
    grammar = ["regex", "[a-c]+", None]
    for way in ("wire", "http", "http-stream", "ws"):
        await _one(Ask(0, 0.0, way, {"text": "a"}, params, grammar), wire, http, ws)
    await wire.close()
    await ws.close()


async def _run(house: House, one: Round) -> tuple[Ran, list[str]]:
    wire, http, ws = Wire(house.address), Http(house.http_port), Websocket(house.ws_port)
    await wire.start()
    await ws.start()
    started = asyncio.get_running_loop().time()

    async def ask_at_its_time(ask: Ask) -> Outcome:
        await asyncio.sleep(started + ask.at_s - asyncio.get_running_loop().time())
        if ask.after in tasks:
            await asyncio.wait([tasks[ask.after]])
        return await _one(ask, wire, http, ws)

    async def kill_at(at_s: float) -> None:
        await asyncio.sleep(started + at_s - asyncio.get_running_loop().time())
        house.kill_engine()

    tasks: dict[int | None, asyncio.Task[Outcome]] = {}
    for ask in one.asks:
        tasks[ask.name] = asyncio.create_task(ask_at_its_time(ask))
    killers = [asyncio.create_task(kill_at(at_s)) for at_s in one.kills_s]
    hung = await _until_stuck({*tasks.values(), *killers})
    for task in hung:
        task.cancel()
    await asyncio.gather(*hung, return_exceptions=True)
    ran = Ran({})
    for ask in one.asks:
        name, task = ask.name, tasks[ask.name]
        if task in hung:
            ran.hung.append(name)
        elif (error := task.exception()) is not None:
            ran.outcomes[name] = Outcome(problems=[f"the client failed: {type(error).__name__}: {error}"])
        else:
            ran.outcomes[name] = task.result()
    problems = [f"wire: {problem}" for problem in wire.problems]
    await wire.close()
    await ws.close()
    mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if mine:
        await asyncio.wait(mine, timeout=2.0)
    problems += [
        f"a task of the client is left: {task.get_name()} {task.get_coro()}" for task in mine if not task.done()
    ]
    return ran, problems


async def _until_stuck(pending: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Wait until all are done, or none was for HANG_S, and return those that are not."""
    while pending:
        done, pending = await asyncio.wait(pending, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
    return pending


async def _one(ask: Ask, wire: Wire, http: Http, ws: Websocket) -> Outcome:
    if ask.way == "wire":
        return await wire.run(ask)
    return await (ws if ask.way == "ws" else http).run(ask)


def _left_in_engine(stats: dict[str, Any]) -> list[str]:
    cache = stats["cache"]
    left = [f"{value} {name} are left" for name, value in held(stats).items() if value]
    if cache["free_pages"] + cache["used_pages"] != cache["max_pages"]:
        left.append(f"blocks: {cache['free_pages']} free + {cache['used_pages']} used are not {cache['max_pages']}")
    return left


def _left_in_processes(house: House, before: dict[str, Figures]) -> list[str]:
    """Return what the three processes hold beyond what they held before, once that has had time to go."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = _more(before, house.figures())
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _more(before: dict[str, Figures], after: dict[str, Figures]) -> list[str]:
    left = []
    for part, old in before.items():
        new = after.get(part)
        if new is None or new.pid != old.pid:
            left.append(f"{part}: the process {old.pid} is gone")
            continue
        if new.descriptors - old.descriptors > SPARE_DESCRIPTORS:
            left.append(f"{part}: {old.descriptors} descriptors before, {new.descriptors} after")
        if new.threads - old.threads > SPARE_THREADS:
            left.append(f"{part}: {old.threads} threads before, {new.threads} after")
        if new.rss_bytes - old.rss_bytes > SPARE_RSS_BYTES:
            left.append(f"{part}: {old.rss_bytes >> 20} MiB before, {new.rss_bytes >> 20} MiB after")
    return left
