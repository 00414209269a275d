"""SIGKILL of one of two engines under mixed streams: every client gets what an undisturbed run says, and no error.

Over HTTP and websocket the streams go on at the other engine; clients of the killed engine's own socket wait for its
restart.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from benchmarks.kill_streams import Case, Clients, Differences, Got, cases, compare_unseeded
from tests.e2e.service import WAIT_S, Service

NUM_STREAMS = 20
MAX_TOKENS = 110
MOST_ATTEMPTS = 4
RESUMED = re.compile(r"^inferengine_resumed_requests_total(?:\{.*\})? ([\d.e+]+)$", re.MULTILINE)


def mixed(generator: random.Random) -> list[Case]:
    """Return some cases of every transport, with every feature about once."""
    asked = cases(generator)
    unseeded = [case for case in asked if "unseeded" in case.name]
    chosen = unseeded + generator.sample([case for case in asked if case not in unseeded], NUM_STREAMS - len(unseeded))
    return [case._replace(body={**case.body, "max_tokens": MAX_TOKENS}) for case in chosen]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path / "two", ["--engines", "2"])
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.mark.timeout(400)
def test_twenty_mixed_streams_go_on_when_one_of_two_engines_is_killed(service: Service) -> None:
    children = service.children()
    address = SimpleNamespace(
        http=service.http, ws=service.chat_page.replace("http", "ws") + "/v1/ws", engine=service.engine
    )
    pages = [f"{service.http}/metrics", f"{service.chat_page}/metrics"]
    asked = mixed(random.Random(7))
    found = Differences()

    async def scenario() -> None:
        clients = Clients(address)
        try:
            await clients.wire.wait_ready(WAIT_S)
            seeded = [case for case in asked if "unseeded" not in case.name]
            undisturbed = await asyncio.gather(*map(clients.ask, seeded))
            references = {case.name: got for case, got in zip(seeded, undisturbed, strict=True)}
            asking = [asyncio.create_task(clients.ask(case)) for case in asked]
            while (figures := await asyncio.to_thread(service.stats))["running_requests"] < NUM_STREAMS // 2:
                await asyncio.sleep(0.02)
            busiest = max(figures["engines"].values(), key=lambda one: one["running_requests"])
            service.kill(busiest["engine"])
            later: list[tuple[Case, Got]] = []
            for case, task in zip(asked, asking, strict=True):
                got = await task
                if case.name in references:
                    found.compare(case, references[case.name], got)
                else:
                    later.append((case, got))
            await compare_unseeded(clients, later, found)
        finally:
            await clients.close()

    def all_run() -> bool:
        engines = service.stats()["engines"].values()
        return len(engines) == sum(one["running"] for one in engines)

    def num_resumed() -> float:
        texts = [httpx.get(page).text for page in pages]
        return sum(float(value) for text in texts for value in RESUMED.findall(text))

    for attempt in range(1, MOST_ATTEMPTS + 1):
        asyncio.run(asyncio.wait_for(scenario(), 6 * WAIT_S))
        assert (found.compared, dict(found.wrong), found.examples) == (attempt * NUM_STREAMS, {}, [])
        service.wait_for(all_run)
        if num_resumed():  # on a busy machine the streams of the killed engine may just have ended
            break
    assert num_resumed()
    assert service.wait_idle()["cache"]["used_pages"] == 0
    assert "ended with killed by SIGKILL; starting it again" in service.log()
    service.wait_for(lambda: "is ready again" in service.log())
    figures = service.stats()
    assert figures["output_tokens"] == sum(one["output_tokens"] for one in figures["engines"].values())
    children += service.children()
    assert service.stop() == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list((service.folder / "run").rglob("*.sock*"))
