"""EnginePool with real engine processes: when one fails, every stream ends once or resumes at another engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inferengine.client import AsyncClient, EnginePool, Finish, Stream, Submission
from inferengine.client.load_balancing import make_prompt, remembered_beginnings, session_key
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import to_u64
from tests.client.engine_process import EngineProcess, engine_processes
from tests.engine.builders import VOCAB_SIZE

STEP_S = 0.01
Body = Callable[[EnginePool, list[EngineProcess]], Awaitable[None]]


def run_with_engines(
    body: Body, *, count: int = 3, step_s: float = STEP_S, policy: str = "power_of_two", **limits: int
) -> None:
    """Run `body(pool, engines)` with all engines READY."""

    async def main(folder: Path) -> None:
        with engine_processes(folder, count, step_s=step_s, **limits) as engines:
            pool = EnginePool([e.address for e in engines], policy=policy, generator=random.Random(1))
            try:
                await pool.connect(60.0)
                for client in pool.clients:
                    await client.wait_ready(60.0)
                await body(pool, engines)
            finally:
                await pool.close()

    with TemporaryDirectory(prefix="ie-") as folder:
        asyncio.run(asyncio.wait_for(main(Path(folder)), 250.0))


def submit(pool: EnginePool, max_tokens: int, seed: int = 0, **options: Any) -> Submission:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    return pool.submit([seed % 250 + 1] * 8, params, **options)


def output_of(max_tokens: int, seed: int) -> list[int]:
    """Return the output of the simulated device for the request of `submit`."""
    return [(seed + (8 + place) * 7919) % VOCAB_SIZE for place in range(max_tokens)]


async def read_ids(stream: Stream) -> tuple[list[int], list[Finish]]:
    """Read a stream to its end: tokens, terminal events."""
    tokens, finishes = [], []
    async for delta in stream:
        tokens += delta.token_ids
        if delta.finish is not None:
            finishes.append(delta.finish)
    return tokens, finishes


async def read(stream: Stream) -> tuple[int, list[Finish]]:
    """Read as `read_ids` does, with the number of tokens."""
    tokens, finishes = await read_ids(stream)
    return len(tokens), finishes


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def next_status(client: AsyncClient) -> None:
    """Wait for a STATUS that the engine sends after now."""
    for _ in range(2):  # the first may be on its way already
        received_s = client.status_received_s
        await until(lambda received_s=received_s: client.status_received_s != received_s)


def client_of(pool: EnginePool, submission: Submission) -> AsyncClient:
    return next(client for client in pool.clients if submission.streams[0]._client is client)


def test_streams_of_a_killed_engine_resume_at_the_others() -> None:
    """More requests per engine than slots, so that some have begun and some wait when it dies."""
    max_tokens = 60

    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        pauses: list[float] = []
        pool.on_resumed = pauses.append
        submissions = [submit(pool, max_tokens, seed) for seed in range(36)]
        readers = [asyncio.create_task(read_ids(item.streams[0])) for item in submissions]
        homes = [client_of(pool, item) for item in submissions]
        victim = pool.clients[0]
        begun = [item for item, home in zip(submissions, homes, strict=True) if home is victim]
        await until(lambda: any(item.streams[0].num_tokens for item in begun))
        engines[0].kill()
        results = await asyncio.gather(*readers)
        assert [tokens for tokens, _ in results] == [output_of(max_tokens, seed) for seed in range(36)]
        assert all([finish.reason for finish in finishes] == ["length"] for _, finishes in results)
        assert 0 < len(pauses) <= len(begun) <= pool.num_moved + 4

    run_with_engines(body)


def test_a_stream_resumes_at_its_own_engine_when_there_is_no_other() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submissions = [submit(pool, 200, seed) for seed in range(10)]
        readers = [asyncio.create_task(read_ids(item.streams[0])) for item in submissions]
        for _ in range(2):
            before = submissions[0].streams[0].num_tokens
            await until(lambda before=before: submissions[0].streams[0].num_tokens > before + 3)
            engines[0].kill()
            engines[0].start()
        results = await asyncio.gather(*readers)
        assert [tokens for tokens, _ in results] == [output_of(200, seed) for seed in range(10)]
        assert all([finish.reason for finish in finishes] == ["length"] for _, finishes in results)

    run_with_engines(body, count=1)


def test_requests_still_running_at_the_drain_limit_move() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submissions = [submit(pool, 200, seed) for seed in range(4)]
        readers = [asyncio.create_task(read_ids(item.streams[0])) for item in submissions]
        await until(lambda: all(item.streams[0].num_tokens for item in submissions))
        leaving = client_of(pool, submissions[0])
        engine = engines[pool.clients.index(leaving)]
        engine.drain()
        results = await asyncio.gather(*readers)
        assert [tokens for tokens, _ in results] == [output_of(200, seed) for seed in range(4)]
        assert client_of(pool, submissions[0]) is not leaving

    run_with_engines(body, count=2, step_s=0.02, drain_timeout_s=1)


def test_a_killed_engine_ends_begun_requests_without_resubmit() -> None:
    """More requests per engine than slots, so that some have begun and some wait when it dies."""
    max_tokens = 60

    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submissions = [submit(pool, max_tokens, seed, resubmit=False) for seed in range(36)]
        readers = [asyncio.create_task(read(item.streams[0])) for item in submissions]
        homes = [client_of(pool, item) for item in submissions]
        await until(
            lambda: all(
                any(h is c and s.streams[0].num_tokens for h, s in zip(homes, submissions, strict=True))
                for c in pool.clients
            )
        )
        victim = pool.clients[0]
        engines[0].kill()
        results = await asyncio.gather(*readers)

        assert all(len(finishes) == 1 for _, finishes in results)
        restarted = 0
        for (tokens, (finish,)), home in zip(results, homes, strict=True):
            if finish.reason == "length":
                assert tokens == max_tokens
            else:
                assert home is victim
                assert finish.detail[0] == "engine_restarted"
                assert 0 < tokens < max_tokens
                restarted += 1
        assert 0 < restarted <= 4  # it had four slots
        waited = sum(home is victim for home in homes) - restarted
        assert waited > 0
        assert pool.num_moved == waited

    run_with_engines(body)


def test_a_killed_engine_gets_no_new_work_until_it_is_back() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        engines[1].kill()
        await until(lambda: not pool.clients[1].connected)
        chosen = [client_of(pool, submit(pool, 1, seed)) for seed in range(30)]
        assert pool.clients[1] not in chosen
        engines[1].start()
        await until(lambda: pool.clients[1].ready)
        await next_status(pool.clients[1])
        assert pool.clients[1] in [client_of(pool, submit(pool, 1, seed)) for seed in range(60)]

    run_with_engines(body)


def test_a_refused_request_is_tried_elsewhere_and_refused_only_when_all_refuse() -> None:
    """Each engine runs four and lets two wait: of 30 at once most must be refused, and none that fits."""

    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submissions = [submit(pool, 100, seed) for seed in range(30)]
        answers = await asyncio.gather(*(item.accepted() for item in submissions), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, InferEngineError) and error.code == "overloaded" for error in refused)
        assert 12 <= len(answers) - len(refused) <= 18
        assert pool.num_moved > 0
        for item in submissions:
            item.cancel()
        results = await asyncio.gather(*(read(item.streams[0]) for item in submissions))
        assert all(len(finishes) == 1 for _, finishes in results)

    run_with_engines(body, step_s=0.05, max_queued_requests=2)


def test_a_draining_engine_finishes_its_requests_and_refused_ones_move() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        before = [submit(pool, 50, seed) for seed in range(9)]
        await asyncio.gather(*(item.accepted() for item in before))
        engines[2].drain()
        during = [submit(pool, 5, seed) for seed in range(30)]
        results = await asyncio.gather(*(read(item.streams[0]) for item in before + during))
        assert {(finish.reason, str(finish.detail)) for _, (finish,) in results} == {("length", "None")}
        await until(lambda: engines[2].process.exitcode is not None)
        assert engines[2].process.exitcode == 0

    run_with_engines(body)


def test_an_engine_without_status_is_not_chosen() -> None:
    """A stopped process: its connection stays open, and it sends nothing."""

    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        await until(lambda: all(client.status is not None for client in pool.clients))
        engines[0].freeze()
        await asyncio.sleep(3.3)
        chosen = [client_of(pool, submit(pool, 2, seed)) for seed in range(20)]
        assert pool.clients[0] not in chosen

    run_with_engines(body)


def test_a_restarted_single_engine_ends_streams_without_resubmit_once() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submission = submit(pool, 500, resubmit=False)
        reader = asyncio.create_task(read(submission.streams[0]))
        await until(lambda: submission.streams[0].num_tokens > 3)
        engines[0].kill()
        engines[0].start()
        tokens, finishes = await reader
        assert tokens > 3
        assert [finish.detail[0] for finish in finishes] == ["engine_restarted"]

    run_with_engines(body, count=1)


def test_a_cancelled_request_is_not_moved() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submissions = [submit(pool, 200, seed) for seed in range(20)]
        await asyncio.gather(*(item.accepted() for item in submissions))
        waiting = [item for item in submissions if client_of(pool, item) is pool.clients[0]]
        engines[0].freeze()
        for item in waiting:
            item.cancel()
        engines[0].kill()
        results = await asyncio.gather(*(read(item.streams[0]) for item in waiting))
        assert all(len(finishes) == 1 for _, finishes in results)
        assert pool.num_moved == 0

    run_with_engines(body)


def submit_in_session(pool: EnginePool, seed: int, tenant: str = "", max_tokens: int = 1) -> Submission:
    return submit(pool, max_tokens, seed, session="a conversation", tenant=tenant)


def test_a_session_stays_at_its_engine_until_that_one_is_gone_and_then_at_another() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        async def ask(seed: int) -> AsyncClient:
            submission = submit_in_session(pool, seed)
            await read(submission.streams[0])
            client = client_of(pool, submission)
            await next_status(client)  # without this request's load
            return client

        homes = {await ask(seed) for seed in range(12)}
        (home,) = homes
        engines[pool.clients.index(home)].kill()
        await until(lambda: not home.connected)
        later = {await ask(seed) for seed in range(12, 24)}
        assert len(later) == 1
        assert later != homes

    run_with_engines(body, count=4)


def test_a_session_follows_its_request_from_a_lost_engine() -> None:
    """The request has output when its engine dies: it goes on elsewhere, and the next one follows."""

    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        submission = submit_in_session(pool, 1, max_tokens=200)
        reader = asyncio.create_task(read_ids(submission.streams[0]))
        await until(lambda: submission.streams[0].num_tokens > 3)
        engines[pool.clients.index(client_of(pool, submission))].kill()
        tokens, _ = await reader
        assert tokens == output_of(200, 1)
        following = [client_of(pool, submit_in_session(pool, seed)) for seed in range(2, 5)]
        assert set(following) == {client_of(pool, submission)}

    run_with_engines(body, count=4)


def test_sessions_of_one_name_of_many_tenants_are_spread() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        homes = set()
        for number in range(16):
            submission = submit_in_session(pool, number, tenant=f"tenant-{number}")
            homes.add(client_of(pool, submission))
            await read(submission.streams[0])
        assert len(homes) > 1

    run_with_engines(body, count=4)


def test_pools_know_of_each_others_sessions_and_beginnings() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        other = EnginePool([engine.address for engine in engines], policy="prefix_affinity", generator=random.Random(2))
        try:
            await other.connect(60.0)
            for client in other.clients:
                await client.wait_ready(60.0)
            await until(lambda: all(client.status is not None for client in other.clients))
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            document = list(range(1, 200))
            first = submit_in_session(pool, 1)
            home = pool.choose(document)  # the ring's, for both
            elsewhere = next(client for client in pool.clients if client is not home)
            keys = remembered_beginnings(make_prompt(document, b"").keys)
            second = elsewhere.submit(document, params, placement=(to_u64(keys), b""))
            for submission in (first, second):
                await read(submission.streams[0])
            await until(lambda: all(key in other._balancer._policy._engines for key in keys))
            session = session_key("a conversation")
            await until(lambda: session in other._balancer._sessions._engines)
            assert other.choose([*document, 7]).address == elsewhere.address
            following = [submit_in_session(other, seed) for seed in (2, 3)]  # with more the engine would be overloaded
            assert {client_of(other, item).address for item in following} == {client_of(pool, first).address}
        finally:
            await other.close()

    run_with_engines(body, count=4, policy="prefix_affinity")


def test_a_pool_of_one_engine_remembers_nothing_of_requests_that_have_ended() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        for seed in range(5):
            submission = submit_in_session(pool, seed)
            await read(submission.streams[0])
        assert not pool._engine_of
        assert not pool._balancer._sessions._engines
        again = pool.attach(submission.id)
        await again.accepted()
        assert len((await read_ids(again.streams[0]))[0]) == 1

    run_with_engines(body, count=1)


def test_equal_prompts_go_to_one_engine() -> None:
    async def body(pool: EnginePool, engines: list[EngineProcess]) -> None:
        homes = []
        for _ in range(6):
            submission = pool.submit([7] * 64, SamplingParams(max_tokens=1, ignore_eos=True))
            homes.append(client_of(pool, submission))
            await read(submission.streams[0])
            await next_status(homes[-1])  # without this request's load
        assert len(set(homes)) == 1

    run_with_engines(body, policy="prefix_affinity")
