"""Whatever fails, every request that was accepted ends with exactly one terminal event, and every block comes back."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter

import pytest

from inferengine.client import AsyncClient, Client
from inferengine.core.executor import DeviceLost, StepPlan
from inferengine.engine.core import StepFailed
from inferengine.engine.service import EngineService
from inferengine.errors import ExitCode, InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.wire.messages import Accept, Bye, Cancel, Credit, Goodbye, Hello, Reject, Step, Welcome
from tests.engine.builders import (
    Collected,
    HeldExecutor,
    RawClient,
    address_of,
    check_idle,
    end,
    make_card,
    make_config,
    run_service,
    small_capacity,
    wait_until,
)
from tests.engine.conftest import Connect


class FailingExecutor(SimulatedExecutor):
    """Fails the fifth step and some others: in `execute`, in `result`, with or without naming the rows at fault."""

    def __init__(self, generator: random.Random, share: float, *, step_s: float = 0.0, max_in_flight: int = 1) -> None:
        super().__init__(small_capacity(), step_s=step_s, max_in_flight=max_in_flight)
        self._generator = generator
        self._share = share
        self.num_failures = 0

    def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        future = super().execute(plan)
        if self._generator.random() >= self._share and plan.step != 5:
            return future
        self.num_failures += 1
        rows = self._generator.sample(range(len(plan.slots)), 1)
        error = StepFailed("bad row", rows) if self._generator.random() < 0.7 else RuntimeError("bad step")
        if self._generator.random() < 0.5:
            raise error
        future.result = _raiser(error)
        return future


def _raiser(error: Exception):  # type: ignore[no-untyped-def]
    def raise_it() -> None:
        raise error

    return raise_it


class Actor:
    """A client that submits, cancels, reads slowly, dies and comes back at random, and keeps book of what it got."""

    def __init__(self, service: EngineService, generator: random.Random, name: str) -> None:
        self.service, self.generator, self.name = service, generator, name
        self.next_stream = 1
        self.accepted: set[int] = set()
        self.submitted: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.expected: dict[int, int] = {}
        self.tokens: Counter[int] = Counter()
        self.connect()

    def connect(self) -> None:
        self.raw = RawClient(address_of(self.service), routing_id=f"{self.name}-{secrets.token_hex(4)}".encode())
        self.unacknowledged = 0

    def act(self) -> None:
        draw = self.generator.random()
        if draw < 0.35:
            stream, count = self.next_stream, self.generator.choice([1, 1, 1, 3])
            self.next_stream += count
            max_tokens = self.generator.randint(1, 40)
            text = {"text": "the lazy dog", "reply": "text"} if self.generator.random() < 0.2 else {}
            prompt = None if text else [self.generator.randrange(300) for _ in range(self.generator.randint(1, 60))]
            self.raw.submit(stream, max_tokens=max_tokens, prompt=prompt, params={"n": count}, **text)
            for choice in range(count):
                self.submitted.add(stream + choice)
                self.expected[stream + choice] = max_tokens
        elif draw < 0.45 and self.submitted:
            self.raw.send(Cancel((self.generator.choice(sorted(self.submitted)),)))
        elif draw < 0.47:
            self.die()
        elif draw < 0.95:
            self.read(self.generator.randint(1, 20))

    def die(self) -> None:
        if self.generator.random() < 0.5:
            self.raw.send(Bye())
        self.raw.close()
        self.submitted.clear()
        self.tokens.clear()
        self.ended.clear()
        self.connect()
        self.next_stream = 1

    def read(self, most: int, timeout_s: float = 0.0) -> int:
        count = 0
        while count < most and (message := self.raw.receive(timeout_s)) is not None:
            count += 1
            self.take(message)
        return count

    def take(self, message: object) -> None:
        if isinstance(message, Reject) and message.stream is not None:
            choices = [s for s in self.submitted if s == message.stream]
            self.ended.update(choices)
        elif isinstance(message, Step):
            collected = Collected()
            collected.take(message)
            for stream, tokens in collected.tokens.items():
                assert not self.ended[stream], "tokens after the end"
                self.tokens[stream] += len(tokens)
            for stream, rows in collected.done.items():
                self.ended[stream] += len(rows)
                if rows[0].reason == "length" and stream in self.tokens:
                    assert self.tokens[stream] == self.expected[stream]
            self.raw.send(Credit(message.seq))

    def settle(self) -> None:
        while self.submitted - self.ended.keys():
            assert self.read(1, timeout_s=60.0), f"{self.submitted - self.ended.keys()} never ended"
        self.read(1000, timeout_s=0.05)
        assert set(self.ended.values()) <= {1}, "a stream ended twice"


@pytest.mark.parametrize("seed", range(6))
def test_random_raws_and_failing_steps(seed: int) -> None:
    generator = random.Random(seed)
    executor = FailingExecutor(generator, 0.03, step_s=0.0005, max_in_flight=1 + seed % 2)
    wire = {"heartbeat_s": 0.5, "window": generator.choice([1, 4, 64])}
    with run_service(lambda: executor, wire=wire) as engine:
        actors = [Actor(engine, random.Random(seed * 100 + number), f"actor{number}") for number in range(4)]
        for _ in range(300):
            generator.choice(actors).act()
        for actor in actors:
            actor.settle()
        check_idle(engine)
        assert executor.num_failures > 0
        for actor in actors:
            actor.raw.close()


def test_a_failing_step_ends_the_culprit_alone(connect: Connect) -> None:
    class FailsOnce(HeldExecutor):
        failed = False

        def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            if len(plan.slots) == 3 and not self.failed:
                self.failed = True
                raise StepFailed("row 1 is bad", [1])
            return super().execute(plan)

    device = FailsOnce()
    with run_service(lambda: device) as engine:
        raw = connect(engine)
        for stream in (1, 2, 3):
            raw.submit(stream, max_tokens=30)
        raw.settle()
        device.let()
        collected = raw.collect({1, 2, 3})
        reasons = Counter(rows[0].reason for rows in collected.done.values())
        assert reasons == {"length": 2, "error": 1}
        detail = next(rows[0].detail for rows in collected.done.values() if rows[0].reason == "error")
        assert detail[0] == "engine_error"
        assert "row 1" not in detail[1], "what happened inside is for the log"
        raw.submit(4)
        assert len(raw.collect({4}).tokens[4]) == 4
        check_idle(engine)


def test_a_lost_device_ends_every_request_and_the_engine() -> None:
    class Lost(SimulatedExecutor):
        def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            if plan.step > 3:
                raise DeviceLost("gone")
            return super().execute(plan)

    with run_service(lambda: Lost(small_capacity(), step_s=0.01)) as engine:
        raw = RawClient(address_of(engine))
        for stream in (1, 2):
            raw.submit(stream, max_tokens=50)
        collected = raw.collect({1, 2})
        assert {rows[0].detail[0] for rows in collected.done.values()} == {"engine_restarted"}
        raw.expect(Goodbye)
        assert engine.wait(60.0) == ExitCode.CRASH
        raw.close()


def test_a_bug_in_the_loop_ends_every_request_and_the_engine(connect: Connect) -> None:
    with run_service(step_s=0.01) as engine:
        raw = connect(engine)
        raw.submit(1, max_tokens=200)
        raw.expect(Step)
        core = engine.core
        assert core is not None
        core.step = _raiser(AssertionError("a bug"))  # type: ignore[method-assign]
        (done,) = raw.collect({1}).done[1]
        assert (done.reason, done.detail[0]) == ("error", "engine_restarted")
        assert engine.wait(60.0) == ExitCode.CRASH


class TestRestart:
    def test_a_waiting_client_goes_on_at_the_new_engine(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        address = f"ipc://{tmp_path}/e.sock"
        first = start_service(address, step_s=0.01)
        with Client(address) as client:
            client.wait_ready(60.0)
            stream = client.submit([1, 2], SamplingParams(max_tokens=200, seed=3), reply="text").streams[0]
            text = next(stream).text
            crash(first)
            second = start_service(address)
            try:
                finish = None
                for delta in stream:
                    text, finish = text + delta.text, delta.finish
                assert finish is not None
                assert (finish.reason, finish.completion_tokens) == ("length", 200)
                whole = client.submit([1, 2], SamplingParams(max_tokens=200, seed=3), reply="text").streams[0]
                assert text == "".join(delta.text for delta in whole)
            finally:
                end(second)

    def test_a_waiting_client_that_opts_out_gets_an_error_not_a_hang(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        address = f"ipc://{tmp_path}/e.sock"

        async def scenario() -> tuple[str, str]:
            first = start_service(address, step_s=0.01)
            async with AsyncClient(address) as client:
                await client.wait_ready(60.0)
                stream = client.submit([1, 2], SamplingParams(max_tokens=900), resubmit=False).streams[0]
                await stream.__anext__()
                crash(first)
                second = start_service(address)
                try:
                    last = None
                    async for delta in stream:
                        last = delta.finish
                    await client.wait_ready(60.0)
                    again = client.submit([1, 2], SamplingParams(max_tokens=3)).streams[0]
                    tokens = [token async for delta in again for token in delta.token_ids]
                    assert len(tokens) == 3
                finally:
                    end(second)
            assert last is not None
            return last.reason, last.detail[0]

        reason, code = asyncio.run(asyncio.wait_for(scenario(), 200.0))
        assert reason == "error"
        assert code in ("engine_restarted", "engine_error", "engine_unavailable")

    def test_a_submission_in_the_gap_runs_on_the_new_engine(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        address = f"ipc://{tmp_path}/e.sock"
        first = start_service(address)
        with Client(address) as client:
            client.wait_ready(60.0)
            crash(first)
            second = start_service(address)
            try:
                client.wait_ready(60.0)
                tokens = [t for d in client.submit([1], SamplingParams(max_tokens=5)).streams[0] for t in d.token_ids]
                assert len(tokens) == 5
            finally:
                end(second)


def start_service(address: str, step_s: float = 0.0) -> EngineService:
    config = make_config("", wire={"socket": address, "heartbeat_s": 0.3})
    service = EngineService(config, make_card(), lambda: SimulatedExecutor(small_capacity(), step_s=step_s))
    service.start()
    wait_until(lambda: service.lifecycle.state == "READY")
    return service


def crash(service: EngineService) -> None:
    """End without a word to anybody, as after SIGKILL."""
    service.io.connections.by_routing_id.clear()
    service.io.publisher.submissions.clear()
    end(service)


def test_hello_twice_is_harmless(connect: Connect) -> None:
    with run_service() as engine:
        raw = connect(engine)
        raw.send(Hello())
        raw.expect(Welcome)
        raw.submit(1)
        assert raw.expect(Accept).stream == 1
        assert len(raw.collect({1}).tokens[1]) == 4


def test_an_unreachable_engine_is_refused_by_code(tmp_path) -> None:  # type: ignore[no-untyped-def]
    client = Client(f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(InferEngineError) as caught:
        client.connect(0.3)
    client.close()
    assert caught.value.code == "engine_unavailable"
