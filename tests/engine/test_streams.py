"""Cursors on logs: what a client receives after it was slow, away, replaced, or gone for good."""

from __future__ import annotations

import asyncio
import gc

import pytest

from inferengine.client import AsyncClient, Stream
from inferengine.engine.io.publisher import BatchRouting, OutputLog, SubmittedRequest, Subscription
from inferengine.engine.service import EngineService
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.wire.messages import Accept, Attach, Bye, Credit, Hello, Ping, Pong, Reject, Step, Welcome
from tests.engine.builders import (
    Collected,
    HeldExecutor,
    RawClient,
    address_of,
    check_idle,
    run_held,
    run_service,
    small_capacity,
    wait_until,
)
from tests.engine.conftest import Connect

ID = bytes(range(16))


def expected_tokens(engine: EngineService, connect: Connect, num_tokens: int, prompt: list[int]) -> list[int]:
    """Return what the same seeded request gives to a client that reads at once."""
    raw = connect(engine)
    raw.submit(1, max_tokens=num_tokens, prompt=prompt, params={"seed": 3})
    return raw.collect({1}).tokens[1]


def num_kept_objects() -> int:
    """Return what the engines of this process hold for requests, and what only a search for garbage would free."""
    return sum(
        isinstance(each, SubmittedRequest | OutputLog | BatchRouting | Subscription) for each in gc.get_objects()
    )


class TestCredit:
    def test_without_credit_no_more_than_a_window_comes_and_nothing_is_lost(self, connect: Connect) -> None:
        with run_service(step_s=0.001) as engine:
            raw = connect(engine, window=4)
            assert raw.welcome is not None
            assert raw.welcome.window == 4
            raw.submit(1, max_tokens=200)
            core = engine.core
            assert core is not None
            wait_until(lambda: core.scheduler.stats.num_finished == 1)
            collected = Collected()
            while (message := raw.receive(0.2)) is not None:
                collected.take(message)
            assert len(collected.steps) == 4
            assert 1 not in collected.done
            raw.send(Credit(4))
            rest = raw.collect({1})
            assert len(collected.tokens[1]) + len(rest.tokens[1]) == 200
            assert len(rest.steps) == 1, "what waited comes in one STEP"
            check_idle(engine)

    def test_a_client_without_credit_costs_others_nothing(self, connect: Connect) -> None:
        with run_service() as engine:
            slow, quick = connect(engine, window=1), connect(engine)
            slow.submit(1, max_tokens=300)
            quick.submit(1, max_tokens=300)
            assert len(quick.collect({1}).tokens[1]) == 300

    def test_steps_are_numbered_without_a_gap(self, connect: Connect) -> None:
        with run_service(step_s=0.001) as engine:
            raw = connect(engine, window=3)
            raw.submit(1, max_tokens=60)
            raw.submit(2, max_tokens=30)
            steps = raw.collect({1, 2}).steps
            assert [step.seq for step in steps] == list(range(1, len(steps) + 1))

    def test_a_stalled_client_loses_its_requests_with_that_reason(self, connect: Connect) -> None:
        with run_service(step_s=0.01, wire={"stall_limit_s": 0.3}) as engine:
            raw = connect(engine, window=2)
            for stream in (1, 2):  # having recovered, it may stall once more
                raw.submit(stream, max_tokens=900)
                raw.expect(Accept)
                wait_until(lambda: engine.io.publisher.num_open == 0)
                check_idle(engine)
                collected = raw.collect({stream})
                assert collected.done[stream][0].detail[0] == "client_stalled"
                assert len(collected.done[stream]) == 1

    def test_a_stalled_client_loses_nothing_that_is_detached_or_read_by_another(self, connect: Connect) -> None:
        with run_service(step_s=0.01, wire={"stall_limit_s": 0.3}) as engine:
            raw, reader = connect(engine, window=2), connect(engine)
            reader.submit(5, id=ID, max_tokens=100)
            reader.expect(Accept)
            raw.submit(1, max_tokens=100, detached=True)
            raw.send(Attach(ID, 2))
            raw.submit(3, max_tokens=900)
            assert len(reader.collect({5}).tokens[5]) == 100
            wait_until(lambda: engine.io.publisher.num_open == 0)
            done = raw.collect({1, 2, 3}).done
            assert [done[stream][0].reason for stream in (1, 2)] == ["length", "length"]
            assert done[3][0].detail[0] == "client_stalled"


class TestResume:
    def test_the_same_routing_id_continues_where_it_stopped(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            expected = expected_tokens(engine, connect, 60, [4, 5])
            first = RawClient(address_of(engine), routing_id=b"front-1")
            first.submit(1, max_tokens=60, prompt=[4, 5], params={"seed": 3})
            collected = Collected()
            while len(collected.steps) < 5:
                message = first.receive()
                assert message is not None
                collected.take(message)
            epoch = engine.lifecycle.epoch
            first.close()
            again = RawClient(address_of(engine), routing_id=b"front-1", epoch=epoch, last_seq=5)
            assert again.welcome is not None
            assert again.welcome.resumed is True
            rest = again.collect({1})
            assert collected.tokens[1] + rest.tokens[1] == expected
            assert rest.steps[0].seq == 6
            again.close()
            check_idle(engine)

    def test_a_sequence_number_that_cannot_be_continued_from_starts_anew(
        self, engine: EngineService, connect: Connect
    ) -> None:
        raw = connect(engine, routing_id=b"front-2", epoch=engine.lifecycle.epoch, last_seq=7)
        assert raw.welcome is not None
        assert raw.welcome.resumed is False

    def test_steps_that_were_acknowledged_cannot_be_asked_for_again(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            raw = connect(engine, routing_id=b"front-3")
            raw.submit(1, max_tokens=20)
            last = raw.collect({1}).steps[-1].seq
            raw.ping()
            raw.expect(Pong)  # the credit before it has arrived
            raw.send(Hello(epoch=engine.lifecycle.epoch, last_seq=last - 1))
            assert raw.expect(Welcome).resumed is False

    def test_another_epoch_is_told_apart(self, engine: EngineService, connect: Connect) -> None:
        raw = connect(engine, epoch=bytes(8), last_seq=1)
        assert raw.welcome is not None
        assert (raw.welcome.resumed, raw.welcome.epoch) == (False, engine.lifecycle.epoch)

    def test_hello_without_resuming_cancels_what_the_old_connection_had(self, connect: Connect) -> None:
        with run_service(step_s=0.01) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=900)
            raw.expect(Step)
            raw.send(Hello())
            raw.expect(Welcome)
            check_idle(engine)


class TestAttach:
    @pytest.mark.parametrize("cursor", [0, 7, 30])
    def test_a_finished_request_is_read_from_a_cursor(
        self, engine: EngineService, connect: Connect, cursor: int
    ) -> None:
        owner, reader = connect(engine), connect(engine)
        owner.submit(1, id=ID, max_tokens=30)
        tokens = owner.collect({1}).tokens[1]
        reader.send(Attach(ID, 9, (cursor,)))
        accept = reader.expect(Accept)
        assert (accept.stream, accept.n, accept.attached) == (9, 1, True)
        collected = reader.collect({9})
        assert collected.tokens.get(9, []) == tokens[cursor:]
        assert collected.done[9][0].reason == "length"

    def test_two_readers_of_a_running_request_get_the_same(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            owner, reader = connect(engine), connect(engine)
            owner.submit(1, id=ID, max_tokens=50)
            owner.expect(Step)
            reader.send(Attach(ID, 3))
            tokens = reader.collect({3}).tokens[3]
            assert len(tokens) == 50
            assert owner.collect({1}).done[1][0].reason == "length"
            check_idle(engine)

    def test_a_request_has_64_readers_and_no_more(self, connect: Connect) -> None:
        """Each step is sent to all of them."""
        with run_held() as (engine, device):
            owner, reader = connect(engine), connect(engine)
            owner.submit(1, id=ID, max_tokens=300)
            device.let(1)
            owner.expect(Step)
            for stream in range(2, 65):
                reader.send(Attach(ID, stream))
                reader.expect(Accept)
            reader.send(Attach(ID, 65))
            reject = reader.expect(Reject)
            assert (reject.code, reject.stream) == ("overloaded", 65)
            device.let()
            check_all = reader.collect(set(range(2, 65)))
            assert all(len(check_all.tokens[stream]) == 300 for stream in range(2, 65))

    def test_a_detached_request_outlives_its_client_and_waits(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            owner = connect(engine)
            owner.submit(1, id=ID, max_tokens=40, detached=True)
            owner.expect(Step)
            owner.send(Bye())
            check_idle(engine)
            reader = connect(engine)
            reader.send(Attach(ID, 1))
            collected = reader.collect({1})
            assert len(collected.tokens[1]) == 40
            assert collected.done[1][0].reason == "length"

    def test_a_request_that_another_client_reads_goes_on_without_its_owner(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            owner, reader = connect(engine), connect(engine)
            owner.submit(1, id=ID, max_tokens=60)
            owner.expect(Step)
            reader.send(Attach(ID, 1))
            reader.expect(Accept)
            owner.send(Bye())
            assert len(reader.collect({1}).tokens[1]) == 60

    def test_a_finished_output_is_kept_no_longer_than_promised(self, connect: Connect) -> None:
        with run_service(wire={"resume_ttl_s": 0.2}) as engine:
            raw = connect(engine)
            raw.submit(1, id=ID)
            raw.collect({1})
            wait_until(lambda: not engine.io.publisher.submissions)
            raw.send(Attach(ID, 2))
            assert raw.expect(Reject).code == "not_found"


class TestLeases:
    def test_goodbye_frees_everything(self, connect: Connect) -> None:
        with run_service(step_s=0.01) as engine:
            raw = connect(engine)
            for stream in range(1, 30):
                raw.submit(stream, max_tokens=900)
            raw.expect(Step)
            raw.send(Bye())
            check_idle(engine)

    def test_a_killed_client_is_noticed_by_its_connection(self, connect: Connect) -> None:
        with run_service(step_s=0.01, wire={"heartbeat_s": 0.3}) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=1000)
            raw.expect(Step)
            raw.close()
            check_idle(engine)
            assert engine.io.connections.by_routing_id == {}

    def test_a_silent_client_is_dropped_after_the_stall_limit(self, connect: Connect) -> None:
        with run_service(step_s=0.01, wire={"heartbeat_s": 0.1, "stall_limit_s": 0.6}) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=1000)
            raw.expect(Step)
            check_idle(engine)
            assert engine.io.connections.by_routing_id == {}

    def test_a_silent_client_whose_connection_stands_keeps_its_requests_beyond_its_lease(
        self, connect: Connect
    ) -> None:
        """It may be paused. Silence is asked about: one that is gone cannot be written to."""
        with run_service(step_s=0.01, wire={"heartbeat_s": 0.1, "window": 1000}) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=150)
            collected = raw.collect({1}, credit=False)
            assert [row.reason for row in collected.done[1]] == ["length"]
            assert len(collected.tokens[1]) == 150

    def test_a_silent_client_that_is_gone_is_dropped_when_its_lease_ends(self, connect: Connect) -> None:
        """Nothing of its request is there to be sent, so that only the question finds out."""
        with run_service(step_s=30.0, wire={"heartbeat_s": 0.1}) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=10)
            wait_until(lambda: engine.io.publisher.num_open == 1)
            raw.close()
            wait_until(lambda: not engine.io.connections.by_routing_id)

    def test_a_ping_keeps_the_lease(self, connect: Connect) -> None:
        with run_service(step_s=0.01, wire={"heartbeat_s": 0.2}) as engine:
            raw = connect(engine)
            raw.submit(1, max_tokens=120)
            for nonce in range(12):
                raw.ping(nonce)
                raw.receive(0.1)
            assert raw.collect({1}).done[1][0].reason == "length"

    def test_a_dropped_client_is_told_to_greet_again(self, connect: Connect) -> None:
        with run_service(wire={"heartbeat_s": 0.1, "stall_limit_s": 0.5}) as engine:
            raw = connect(engine)
            wait_until(lambda: not engine.io.connections.by_routing_id)
            raw.send(Ping(1))
            assert raw.expect(Reject).field == "hello"


def test_four_thousand_finished_requests_leave_nothing_behind(connect: Connect) -> None:
    capacity = small_capacity(max_num_seqs=256, num_blocks=4096)
    with run_service(lambda: SimulatedExecutor(capacity), wire={"resume_ttl_s": 0.0}) as engine:
        raw = connect(engine)
        for batch in range(4):
            streams = set(range(batch * 1000 + 1, batch * 1000 + 1001))
            for stream in streams:
                raw.submit(stream, max_tokens=1)
            assert len(raw.collect(streams).done) == 1000
        check_idle(engine)
        wait_until(lambda: not engine.io.publisher.submissions)
        assert not engine.io.connections.by_routing_id[next(iter(engine.io.connections.by_routing_id))].streams


@pytest.mark.parametrize("late", [False, True])
def test_the_memory_of_a_forgotten_request_comes_back_without_a_search_for_garbage(
    connect: Connect, late: bool
) -> None:
    """The engine looks for garbage in cycles after 20 million new objects. `late`: some are forgotten before their
    reader, without credit, has read their end."""
    with run_service(step_s=0.0005, wire={"resume_ttl_s": 0.2}) as engine:
        raw = connect(engine, window=1 if late else 64)
        gc.collect()
        gc.disable()
        try:
            before = num_kept_objects()  # of other engines of this process
            for stream in range(1, 31):
                raw.submit(stream, max_tokens=stream)
                if not late:
                    raw.collect({stream})
            publisher = engine.io.publisher
            wait_until(lambda: not publisher.num_open and not publisher.submissions)
            if late:
                raw.collect(set(range(1, 31)))
            raw.submit(99, max_tokens=2)  # what the last step before it was for is kept until there is another one
            raw.collect({99})
            wait_until(lambda: not publisher.submissions)
            wait_until(lambda: num_kept_objects() <= before + 4)
        finally:
            gc.enable()


def test_the_first_of_a_hundred_has_its_answer_before_the_last_has_begun() -> None:
    """A burst is served as a batch: nobody waits for everybody."""

    async def read(stream: Stream) -> int:
        return sum([len(delta.token_ids) async for delta in stream])

    async def scenario(address: str, device: HeldExecutor) -> list[int]:
        async with AsyncClient(address) as client:
            submissions = [client.submit([1, 2], SamplingParams(max_tokens=20)) for _ in range(100)]
            reading = [asyncio.create_task(read(submission.streams[0])) for submission in submissions]
            device.let(30)
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            assert not submissions[-1].streams[0].num_tokens
            device.let()
            return await asyncio.gather(*reading)

    with run_held() as (engine, device):
        assert asyncio.run(scenario(address_of(engine), device)) == [20] * 100
        check_idle(engine)
