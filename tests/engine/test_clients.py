"""AsyncClient and Client against a real engine, over connections that break."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Iterator

import pytest

from inferengine.client import AsyncClient, Client, Embedding
from inferengine.engine.service import EngineService
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import simulated_embedding
from tests.engine.builders import HeldExecutor, address_of, check_idle, run_held, run_service, wait_until
from tests.engine.cut import Relay
from tests.ports import free_port

PARAMS = SamplingParams(max_tokens=40, seed=5)


@pytest.fixture
def relayed() -> Iterator[tuple[EngineService, Relay]]:
    """Yield an engine whose TCP address is reached through a relay."""
    port = free_port()
    with run_service(step_s=0.004, wire={"tcp": f"tcp://127.0.0.1:{port}", "heartbeat_s": 1.0}) as service:
        relay = Relay(port)
        yield service, relay
        relay.close()


async def read(stream) -> tuple[list[int], list[object]]:  # type: ignore[no-untyped-def]
    tokens, finishes = [], []
    async for delta in stream:
        tokens += delta.token_ids
        if delta.finish:
            finishes.append(delta.finish)
    return tokens, finishes


def expected(service: EngineService, params: SamplingParams = PARAMS) -> list[int]:
    with Client(address_of(service)) as client:
        return [token for delta in client.submit([1, 2, 3], params).streams[0] for token in delta.token_ids]


class TestAsyncClient:
    def test_many_streams_at_once(self, engine: EngineService) -> None:
        async def scenario() -> list[tuple[list[int], list[object]]]:
            async with AsyncClient(address_of(engine)) as client:
                submissions = [client.submit([1, 2, 3], PARAMS) for _ in range(200)]
                return await asyncio.gather(*(read(submission.streams[0]) for submission in submissions))

        results = asyncio.run(scenario())
        assert all(tokens == results[0][0] and len(finishes) == 1 for tokens, finishes in results)
        assert len(results[0][0]) == 40
        check_idle(engine)

    def test_a_refusal_is_raised_and_ends_the_stream(self, engine: EngineService) -> None:
        async def scenario() -> tuple[str, str | None, str]:
            async with AsyncClient(address_of(engine)) as client:
                submission = client.submit([10**6])
                with pytest.raises(InferEngineError) as caught:
                    await submission.accepted()
                _, finishes = await read(submission.streams[0])
                return caught.value.code, caught.value.field, finishes[0].reason  # type: ignore[attr-defined]

        assert asyncio.run(scenario()) == ("invalid_request", "prompt", "error")

    def test_leaving_a_submission_cancels_it(self, engine: EngineService) -> None:
        async def scenario() -> None:
            async with AsyncClient(address_of(engine)) as client:
                async with client.submit([1], SamplingParams(max_tokens=900)) as submission:
                    await submission.streams[0].__anext__()
                await asyncio.to_thread(check_idle, engine)

        asyncio.run(scenario())
        assert engine.io.counters.finished.total() == 1

    def test_who_leaves_reads_no_more_and_others_read_on(self) -> None:
        async def scenario(address: str, device: HeldExecutor) -> tuple[str, int, str]:
            async with AsyncClient(address) as first, AsyncClient(address) as second:
                left = first.submit([1], SamplingParams(max_tokens=100), detached=True)
                device.let(1)
                await left.streams[0].__anext__()
                read_on = second.attach(left.id)
                await read_on.accepted()
                left.leave()
                await first.ping()  # the engine has handled it
                device.let()
                _, ends = await read(left.streams[0])
                tokens, finishes = await read(read_on.streams[0])
                assert first.attach(left.id).id == left.id, "it may be read here again"
                return ends[0].detail[0], len(tokens), finishes[0].reason  # type: ignore[attr-defined,index]

        with run_held() as (engine, device):
            assert asyncio.run(scenario(address_of(engine), device)) == ("cancelled", 100, "length")

    def test_what_was_left_while_the_connection_was_broken_ends_afterwards(self) -> None:
        async def scenario(relay: Relay, service: EngineService) -> None:
            async with AsyncClient(f"tcp://127.0.0.1:{relay.port}", status_address="") as client:
                submission = client.submit([1], SamplingParams(max_tokens=900), detached=True)
                await submission.streams[0].__anext__()
                relay.cut(refuse=True)
                async with asyncio.timeout(60.0):
                    while client.connected:
                        await asyncio.sleep(0.005)
                submission.leave()
                relay.heal()
                await client.connect(60.0)
                await asyncio.to_thread(check_idle, service)

        port = free_port()
        with run_service(step_s=0.02, wire={"tcp": f"tcp://127.0.0.1:{port}", "heartbeat_s": 1.0}) as service:
            relay = Relay(port)
            try:
                asyncio.run(scenario(relay, service))
            finally:
                relay.close()
            assert service.io.counters.finished["abort"] == 1

    def test_a_slow_reader_gets_everything_merged(self, engine: EngineService) -> None:
        async def scenario() -> int:
            async with AsyncClient(address_of(engine), window=2) as client:
                stream = client.submit([1], SamplingParams(max_tokens=200)).streams[0]
                await asyncio.to_thread(wait_until, lambda: engine.io.counters.finished.total() == 1)
                num_deltas, num_tokens = 0, 0
                async for delta in stream:
                    num_deltas += 1
                    num_tokens += len(delta.token_ids)
                assert num_tokens == 200
                return num_deltas

        assert asyncio.run(scenario()) < 50

    def test_model_files_status_ping_and_admin(self, engine: EngineService) -> None:
        async def scenario() -> None:
            async with AsyncClient(address_of(engine)) as client:
                files = await client.model_files()
                assert files.fingerprint == client.welcome.model.fingerprint  # type: ignore[union-attr]
                assert "tokenizer.json" in files.files
                assert list((await client.model_files(["tokenizer_config.json"])).files) == ["tokenizer_config.json"]
                assert (await client.ping()).state == "READY"
                assert (await client.admin("stats"))["completed_requests"] == 0
                with pytest.raises(InferEngineError):
                    await client.admin("nothing")
                while client.status is None:
                    await asyncio.sleep(0.02)
                assert client.status["state"] == "READY"

        asyncio.run(asyncio.wait_for(scenario(), 60.0))

    @pytest.mark.parametrize("seed", range(3))
    def test_a_connection_cut_again_and_again_loses_and_doubles_nothing(
        self, relayed: tuple[EngineService, Relay], seed: int
    ) -> None:
        service, relay = relayed
        generator = random.Random(seed)
        reference = expected(service)

        async def scenario() -> list[tuple[list[int], list[object]]]:
            async with AsyncClient(f"tcp://127.0.0.1:{relay.port}", status_address="") as client:
                readers = []
                for _ in range(30):
                    readers.append(asyncio.create_task(read(client.submit([1, 2, 3], PARAMS).streams[0])))
                    await asyncio.sleep(generator.random() * 0.05)
                    if generator.random() < 0.2:
                        relay.cut()
                return await asyncio.gather(*readers)

        results = asyncio.run(asyncio.wait_for(scenario(), 60.0))
        assert relay.num_cuts > 0
        assert [tokens for tokens, _ in results] == [reference] * 30
        assert all(len(finishes) == 1 for _, finishes in results)
        assert service.core is not None
        assert service.core.scheduler.stats.num_submitted == 31, "none ran twice"
        check_idle(service)

    def test_embeddings_come_once_each_over_a_connection_that_is_cut(
        self, relayed: tuple[EngineService, Relay]
    ) -> None:
        service, relay = relayed

        async def scenario() -> list[Embedding]:
            async with AsyncClient(f"tcp://127.0.0.1:{relay.port}", status_address="") as client:
                readers = []
                for length in range(1, 31):
                    submission = client.submit([4] * length, reply="embedding", detached=length % 2 == 0)
                    readers.append(asyncio.create_task(submission.embedding()))
                    if length % 5 == 0:
                        await asyncio.sleep(0.03)
                        relay.cut()
                return await asyncio.gather(*readers)

        found = asyncio.run(asyncio.wait_for(scenario(), 60.0))
        assert [embedding.prompt_tokens for embedding in found] == list(range(1, 31))
        assert [embedding.data for embedding in found] == [simulated_embedding(n, False, 8) for n in range(1, 31)]
        assert service.core is not None
        assert service.core.scheduler.stats.num_embeddings == 30, "none ran twice"
        check_idle(service)

    def test_every_submission_is_answered_over_a_connection_that_is_cut(
        self, relayed: tuple[EngineService, Relay]
    ) -> None:
        """An ACCEPT may be lost while the output, which is sent again, is not."""
        service, relay = relayed

        async def scenario() -> list[int]:
            async with AsyncClient(f"tcp://127.0.0.1:{relay.port}", status_address="") as client:
                answers = []
                for place in range(30):
                    submission = client.submit([1, 2, 3], SamplingParams(max_tokens=1))
                    answers.append(asyncio.create_task(submission.accepted()))
                    if place % 5 == 4:
                        await asyncio.sleep(0.03)
                        relay.cut()
                return [accept.prompt_tokens for accept in await asyncio.gather(*answers)]

        assert asyncio.run(asyncio.wait_for(scenario(), 60.0)) == [3] * 30
        check_idle(service)

    def test_a_detached_stream_survives_a_lease_that_ran_out(self, relayed: tuple[EngineService, Relay]) -> None:
        service, relay = relayed
        params = SamplingParams(max_tokens=600, seed=5)
        reference = expected(service, params)

        async def scenario() -> tuple[list[int], list[object], int]:
            async with AsyncClient(f"tcp://127.0.0.1:{relay.port}", status_address="") as client:
                submission = client.submit([1, 2, 3], params, detached=True)
                await submission.accepted()
                task = asyncio.create_task(read(submission.streams[0]))
                await asyncio.sleep(0.2)
                relay.cut(refuse=True)
                await asyncio.to_thread(wait_until, lambda: not service.io.connections.by_routing_id)
                running = service.io.publisher.num_open
                relay.heal()
                tokens, finishes = await task
                return tokens, finishes, running

        tokens, finishes, running = asyncio.run(asyncio.wait_for(scenario(), 60.0))
        assert running == 1
        assert (tokens, len(finishes)) == (reference, 1)

    def test_another_client_takes_over_where_the_first_stopped(self, engine: EngineService) -> None:
        """As a front end's restart does."""

        async def scenario() -> tuple[list[int], list[int]]:
            request_id = secrets.token_bytes(16)
            first = AsyncClient(address_of(engine))
            await first.connect()
            stream = first.submit([1, 2, 3], PARAMS, request_id=request_id, detached=True).streams[0]
            seen = (await stream.__anext__()).token_ids
            await first.close()
            async with AsyncClient(address_of(engine)) as second:
                submission = second.attach(request_id, [len(seen)])
                await submission.accepted()
                rest, _ = await read(submission.streams[0])
            return seen, rest

        seen, rest = asyncio.run(scenario())
        assert seen
        assert seen + rest == expected(engine)


class TestBlockingClient:
    def test_text_by_iteration(self, engine: EngineService) -> None:
        with Client(address_of(engine)) as client:
            deltas = list(client.submit(text="the fox", params=SamplingParams(max_tokens=5), reply="text").streams[0])
            assert "".join(delta.text for delta in deltas)
            assert deltas[-1].finish is not None
            assert deltas[-1].finish.completion_tokens == 5

    def test_threads_share_one_client(self, engine: EngineService) -> None:
        counts: list[int] = []

        def run(client: Client) -> None:
            stream = client.submit([1, 2], SamplingParams(max_tokens=20)).streams[0]
            counts.append(sum(len(delta.token_ids) for delta in stream))

        with Client(address_of(engine)) as client:
            threads = [threading.Thread(target=run, args=(client,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60.0)
        assert counts == [20] * 8

    def test_a_reader_may_be_away_longer_than_the_lease(self) -> None:
        with run_service(wire={"heartbeat_s": 0.1}) as engine, Client(address_of(engine)) as client:
            stream = client.submit([1], SamplingParams(max_tokens=30)).streams[0]
            first = next(stream)
            time.sleep(1.0)
            assert len(first.token_ids) + sum(len(delta.token_ids) for delta in stream) == 30


def test_waiting_for_ready_connects() -> None:
    with run_service() as engine:
        client = Client(address_of(engine))
        assert client.wait_ready(60.0).state == "READY"
        client.close()
