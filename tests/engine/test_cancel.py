"""CANCEL, and a client that goes: what ends with it, what runs on, and when its blocks are free."""

from __future__ import annotations

import pytest

from inferengine.engine.service import EngineService
from inferengine.wire.messages import Accept, Attach, Cancel, Ping, Pong, Step, StopFound
from tests.engine.builders import check_idle, run_held, run_service, small_capacity, wait_until
from tests.engine.conftest import Connect

ID = bytes(range(16))


class TestCancel:
    @pytest.mark.parametrize("by_id", [False, True])
    def test_a_running_request_ends_with_abort_and_its_blocks_are_free(self, connect: Connect, by_id: bool) -> None:
        with run_service(step_s=0.01) as engine:
            client = connect(engine)
            client.submit(1, id=ID, max_tokens=500)
            assert client.expect(Step).tokens
            client.send(Cancel(ids=(ID,)) if by_id else Cancel((1,)))
            (done,) = client.collect({1}).done[1]
            assert (done.reason, done.detail[0]) == ("abort", "cancelled")
            check_idle(engine)

    def test_a_stop_string_that_the_client_found_is_the_reason(self, connect: Connect) -> None:
        with run_service(step_s=0.01) as engine:
            client = connect(engine)
            client.submit(1, max_tokens=500, params={"n": 2})
            assert client.expect(Step).tokens
            client.send(Cancel((1, 2), stopped=(StopFound(1, 1, "END"), StopFound(9, 1, "unknown"))))
            collected = client.collect({1, 2})
            (stopped,), (cancelled,) = collected.done[1], collected.done[2]
            assert (stopped.reason, stopped.detail, stopped.completion_tokens) == ("stop", "END", 1)
            assert cancelled.reason == "abort"
            check_idle(engine)

    def test_a_waiting_request_too(self, connect: Connect) -> None:
        with run_held(small_capacity(max_num_seqs=1)) as (engine, device):
            client = connect(engine)
            client.submit(1, max_tokens=20)
            client.submit(2, max_tokens=20)
            client.send(Cancel((2,)))
            client.settle()
            device.let()
            collected = client.collect({1, 2})
            assert collected.done[2][0].reason == "abort"
            assert collected.tokens.get(2, []) == []
            assert len(collected.tokens[1]) == 20

    def test_one_choice_is_cancelled_and_the_others_go_on(self, connect: Connect) -> None:
        with run_held() as (engine, device):
            client = connect(engine)
            client.submit(1, max_tokens=40, params={"n": 2})
            device.let(1)
            assert client.expect(Step).tokens
            client.send(Cancel((2,)))
            client.settle()
            device.let()
            collected = client.collect({1, 2})
            assert (collected.done[1][0].reason, collected.done[2][0].reason) == ("length", "abort")

    def test_again_and_of_the_unknown_changes_nothing(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1, max_tokens=200)
        for _ in range(3):
            client.send(Cancel((1, 99), (ID,)))
        assert len(client.collect({1}).done[1]) == 1
        client.send(Ping(5))
        assert client.expect(Pong).nonce == 5
        check_idle(engine)

    def test_who_leaves_ends_it_for_nobody_else(self, connect: Connect) -> None:
        with run_held() as (engine, device):
            first, second = connect(engine), connect(engine)
            first.submit(1, id=ID, max_tokens=60, detached=True)
            device.let(1)
            assert first.expect(Step).tokens
            second.send(Attach(ID, 5))
            assert second.expect(Accept).attached
            first.send(Cancel((1,), leave=True))
            first.settle()
            device.let()
            collected = second.collect({5})
            assert (collected.done[5][0].reason, len(collected.tokens[5])) == ("length", 60)
            check_idle(engine)

    def test_the_last_to_leave_ends_it(self, connect: Connect) -> None:
        with run_service(step_s=0.01) as engine:
            first, second = connect(engine), connect(engine)
            first.submit(1, id=ID, max_tokens=900, detached=True)
            assert first.expect(Step).tokens
            second.send(Attach(ID, 5))
            assert second.expect(Accept).attached
            second.send(Cancel((5,), leave=True))
            assert first.expect(Step).tokens
            first.send(Cancel((1,), leave=True))
            check_idle(engine)

    def test_blocks_are_free_within_two_steps(self, connect: Connect) -> None:
        with run_held() as (engine, device):
            client = connect(engine)
            client.submit(1, max_tokens=500)
            device.let(1)
            client.expect(Step)
            core = engine.core
            assert core is not None
            client.send(Cancel((1,)))
            client.settle()
            device.let(2)
            wait_until(lambda: core.scheduler.kv.usage == 0.0)
