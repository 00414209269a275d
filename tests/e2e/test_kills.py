"""SIGKILL of the engine under mixed streams: every client gets what an undisturbed run says, and no error."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from benchmarks.kill_streams import Case, Clients, Differences, Got, cases, compare_unseeded
from tests.e2e.service import WAIT_S, Service

NUM_STREAMS = 20
MAX_TOKENS = 110


def mixed(generator: random.Random) -> list[Case]:
    """Some of every transport, with every feature about once."""
    asked = cases(generator)
    unseeded = [case for case in asked if "unseeded" in case.name]
    chosen = unseeded + generator.sample([case for case in asked if case not in unseeded], NUM_STREAMS - len(unseeded))
    return [case._replace(body={**case.body, "max_tokens": MAX_TOKENS}) for case in chosen]


@pytest.mark.timeout(400)
def test_twenty_mixed_streams_go_on_when_the_engine_is_killed(mended_service: Service) -> None:
    service = mended_service
    address = SimpleNamespace(
        http=service.http, ws=service.chat_page.replace("http", "ws") + "/v1/ws", engine=service.engine
    )
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
            while (await asyncio.to_thread(service.stats))["running_requests"] < NUM_STREAMS // 2:
                await asyncio.sleep(0.02)
            service.kill("engine")
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

    asyncio.run(asyncio.wait_for(scenario(), 6 * WAIT_S))
    assert (found.compared, dict(found.wrong), found.examples) == (NUM_STREAMS, {}, [])
    with service.client() as client:
        assert "inferengine_resumed_requests_total 0.0" not in client.get("/metrics").text
    assert service.wait_idle()["cache"]["used_pages"] == 0
