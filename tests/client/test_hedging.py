"""Hedged requests: when, how many, and that whatever happens each has one end and the output of one run."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from inferengine.client import EnginePool, Submission
from inferengine.client.circuit_breaker import MAX_FAILURES, CircuitState
from inferengine.client.hedging import BURST, LEAST_DELAY_S, LEAST_SAMPLES, HedgeBudget
from inferengine.sampling_params import SamplingParams
from inferengine.wire import messages
from inferengine.wire.messages import Accept, Cancel, Reject, Submit
from tests.client.builders import ScriptedEngine

Body = Callable[[EnginePool, list[ScriptedEngine]], Awaitable[None]]


def test_a_delay_is_the_95th_percentile_of_prompts_of_that_size() -> None:
    budget = HedgeBudget(0.05)
    for place in range(LEAST_SAMPLES):
        assert budget.submitted(100) is None
        budget.observed(100, 0.1 + 0.01 * place)
    assert budget.submitted(100) == pytest.approx(0.1 + 0.01 * int(0.95 * LEAST_SAMPLES))
    assert budget.submitted(127) == budget.submitted(100)
    assert budget.submitted(5000) is None


def test_a_delay_is_never_shorter_than_the_least() -> None:
    budget = HedgeBudget(0.05)
    for _ in range(LEAST_SAMPLES):
        budget.observed(10, 0.001)
    assert budget.submitted(10) == LEAST_DELAY_S


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_hedges_are_at_most_the_share_of_requests_and_a_burst(share: float) -> None:
    budget, hedges = HedgeBudget(share), 0
    for number in range(1, 5001):
        budget.submitted(10)
        hedges += budget.take()
        assert hedges <= share * number
    for _ in range(5000):
        budget.submitted(10)
    assert sum(budget.take() for _ in range(100)) == (BURST if share else 0)


def run(body: Body, count: int = 2) -> None:
    """Run `body(pool, engines)` with sessions whose engines are written by hand, and every hedge allowed."""

    async def main() -> None:
        engines = [ScriptedEngine() for _ in range(count)]
        pool = EnginePool(
            [f"ipc:///nowhere/{number}" for number in range(count)], hedge_share=1.0, generator=random.Random(3)
        )
        for client, engine in zip(pool.clients, engines, strict=True):
            client._session = engine.session
            client.send = lambda: None  # type: ignore[method-assign]
        for _ in range(LEAST_SAMPLES):
            pool._hedges.observed(3, LEAST_DELAY_S)
        try:
            await body(pool, engines)
        finally:
            for client in pool.clients:
                client._session = None
            await pool.close()

    asyncio.run(main())


def submit(pool: EnginePool, **options: Any) -> Submission:
    return pool.submit([1, 2, 3], SamplingParams(max_tokens=50, seed=5, n=options.pop("n", 1)), **options)


def hedge(pool: EnginePool, submission: Submission) -> None:
    """Let its delay be over."""
    pool._hedge(pool._movable[submission.id])


def message_at(engine: ScriptedEngine) -> Submit:
    (message,) = engine.received(Submit)
    return message


def home_and_other(engines: list[ScriptedEngine]) -> tuple[ScriptedEngine, ScriptedEngine, Submit]:
    for engine in engines:
        for message in engine.received(Submit):
            return engine, next(item for item in engines if item is not engine), message
    raise AssertionError("nothing was submitted")


def accept(engine: ScriptedEngine, message: Submit) -> None:
    engine.send(Accept(message.id, message.stream, 3, message.params.get("n", 1)))


def hedged_request(
    pool: EnginePool, engines: list[ScriptedEngine]
) -> tuple[Submission, ScriptedEngine, ScriptedEngine, Submit, Submit]:
    """Return a request that its first engine has accepted, and its second run: both engines, and what each was sent."""
    submission = submit(pool)
    home, other, message = home_and_other(engines)
    accept(home, message)
    hedge(pool, submission)
    return submission, home, other, message, message_at(other)


def test_the_second_run_wins_and_the_first_is_cancelled() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        events: list[str] = []
        pool.on_event = events.append
        submission, home, other, message, second = hedged_request(pool, engines)
        assert second.id == message.id
        accept(other, second)
        other.step([second.stream], [11, 12], counts=array("I", [2]))
        assert home.received(Cancel)[0].streams == (message.stream,)
        home.step([message.stream], [99])  # crossed the cancellation
        home.end(message.stream, "length", None)
        other.end(second.stream, "length", None)
        deltas = [delta async for delta in submission.streams[0]]
        assert [token for delta in deltas for token in delta.token_ids] == [11, 12]
        assert [delta.finish.reason for delta in deltas if delta.finish] == ["length"]
        assert events == ["hedged", "hedge_won"]
        assert not any(client.num_open for client in pool.clients)

    run(body)


def test_the_first_run_wins_and_the_second_is_cancelled() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission, home, other, message, second = hedged_request(pool, engines)
        home.step([message.stream], [11])
        delta = await anext(submission.streams[0])
        assert delta.token_ids == [11]
        assert other.received(Cancel)[0].streams == (second.stream,)
        other.step([second.stream], [99])
        home.end(message.stream, "length", None)
        assert [delta.token_ids async for delta in submission.streams[0]] == [[]]
        assert not any(client.num_open for client in pool.clients)

    run(body)


@pytest.mark.parametrize("loss", ["die", "reject"])
def test_a_request_whose_first_engine_fails_goes_on_as_its_hedge(loss: str) -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission = submit(pool)
        home, other, message = home_and_other(engines)
        hedge(pool, submission)
        second = message_at(other)
        if loss == "die":
            home.die()
            home.run_until(10.0)
        else:
            home.send(Reject(message.id, message.stream, "overloaded", "Full.", None, True, 1000))
        accept(other, second)
        assert (await submission.accepted()).prompt_tokens == 3
        other.step([second.stream], [11])
        other.end(second.stream, "stop", None)
        deltas = [delta async for delta in submission.streams[0]]
        assert [token for delta in deltas for token in delta.token_ids] == [11]
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.reason == "stop"

    run(body)


def test_a_refused_second_run_changes_nothing() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission, home, other, message, second = hedged_request(pool, engines)
        other.send(Reject(second.id, second.stream, "overloaded", "Full.", None, True, 1000))
        home.step([message.stream], [11])
        home.end(message.stream, "length", None)
        deltas = [delta async for delta in submission.streams[0]]
        assert [token for delta in deltas for token in delta.token_ids] == [11]

    run(body)


def hedged_pair(
    pool: EnginePool, engines: list[ScriptedEngine]
) -> tuple[Submission, ScriptedEngine, ScriptedEngine, Submit, Submit]:
    """Return the same as `hedged_request`, with two choices."""
    submission = submit(pool, n=2)
    home, other, message = home_and_other(engines)
    accept(home, message)
    hedge(pool, submission)
    return submission, home, other, message, message_at(other)


def test_all_choices_go_on_as_the_second_run_once_one_of_them_has_output_there() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission, home, other, message, second = hedged_pair(pool, engines)
        accept(other, second)
        other.step([second.stream + 1], [21])
        assert {stream for cancel in home.received(Cancel) for stream in cancel.streams} == {
            message.stream,
            message.stream + 1,
        }
        home.step([message.stream], [99])  # crossed the cancellation
        other.step([second.stream], [11])
        for choice in (0, 1):
            other.end(second.stream + choice, "length", None)
        for stream, expected in zip(submission.streams, ([11], [21]), strict=True):
            deltas = [delta async for delta in stream]
            assert [token for delta in deltas for token in delta.token_ids] == expected
            assert [delta.finish.reason for delta in deltas if delta.finish] == ["length"]
        assert not any(client.num_open for client in pool.clients)

    run(body)


@pytest.mark.parametrize("first", [0, 1])
def test_the_second_run_of_all_choices_is_cancelled_when_any_choice_has_output(first: int) -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission, home, other, message, second = hedged_pair(pool, engines)
        accept(other, second)
        home.step([message.stream + first], [11])
        assert (await anext(submission.streams[first])).token_ids == [11]
        assert {stream for cancel in other.received(Cancel) for stream in cancel.streams} == {
            second.stream,
            second.stream + 1,
        }
        for choice in (0, 1):
            home.end(message.stream + choice, "length", None)
        for stream in submission.streams:
            assert [delta.token_ids async for delta in stream] == [[]]
        assert not any(client.num_open for client in pool.clients)

    run(body)


def test_a_second_run_of_which_one_choice_fails_is_not_gone_on_with() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission, home, other, message, second = hedged_pair(pool, engines)
        accept(other, second)
        other.end(second.stream, "error", ["engine_error", "This choice failed."])
        other.step([second.stream + 1], [99])
        for choice in (0, 1):
            home.step([message.stream + choice], [11 + choice])
            home.end(message.stream + choice, "length", None)
        for stream, expected in zip(submission.streams, ([11], [12]), strict=True):
            deltas = [delta async for delta in stream]
            assert [token for delta in deltas for token in delta.token_ids] == expected
        assert not any(client.num_open for client in pool.clients)

    run(body)


def test_a_request_resumes_after_its_hedge_has_won() -> None:
    """The winner's engine dies: the request goes on with the winner's output and seed."""

    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        _, home, other, _, second = hedged_request(pool, engines)
        accept(other, second)
        other.step([second.stream], [11])
        home.received(Cancel)
        other.die()
        other.run_until(10.0)
        third = next(engine for engine in engines if engine not in (home, other))
        (resumed,) = [*home.received(Submit), *third.received(Submit)]
        assert resumed.resume == (array("I", [11]).tobytes(),)

    run(body, count=3)


@pytest.mark.parametrize(
    "options", [{"detached": True}, {"request_id": bytes(range(16))}, {"resubmit": False}, {"reply": "embedding"}]
)
def test_what_others_may_read_or_what_must_run_once_is_not_hedged(options: dict[str, Any]) -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submission = submit(pool, **options)
        assert pool._movable[submission.id].timer is None

    run(body)


def test_the_loop_hedges_after_the_delay() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        submit(pool)
        _, other, _ = home_and_other(engines)
        async with asyncio.timeout(60):
            while not (found := other.received(Submit)):
                await asyncio.sleep(LEAST_DELAY_S)
        assert len(found) == 1

    run(body)


def test_an_engine_whose_requests_fail_gets_none_until_its_pause_is_over() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        events: list[str] = []
        pool.on_event = events.append
        bad = pool._engines[0]
        for _ in range(MAX_FAILURES):
            pool._note_failure(bad)
        assert [health.circuit for health in pool.health()] == [CircuitState.OPEN, CircuitState.CLOSED]
        for _ in range(20):
            submit(pool)
        assert engines[0].received(Submit) == []
        assert len(engines[1].received(Submit)) == 20
        assert events == ["circuit_opened"]

    run(body)


def test_the_last_engine_is_asked_whatever_its_circuit() -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        for _ in range(MAX_FAILURES):
            pool._note_failure(pool._engines[0])
        submit(pool)
        assert len(engines[0].received(Submit)) == 1

    run(body, count=1)


NUM_TOKENS = 6


class ChaoticEngines:
    """Engines that refuse, die and come back at random. Token n of a request is 1000 * the first byte of its id + n."""

    def __init__(self, engines: list[ScriptedEngine], generator: random.Random) -> None:
        self.engines = engines
        self._random = generator.random
        self._runs: list[dict[int, tuple[Submit, int]]] = [{} for _ in engines]  # by stream: message, tokens so far
        self._is_up = [True] * len(engines)

    def receive(self, refusals: float) -> None:
        """Answer what has arrived."""
        for place, engine in enumerate(self.engines):
            for message in self._arrived(place):
                if isinstance(message, Cancel):
                    self._cancel(place, message)
                elif self._random() < refusals:
                    engine.send(Reject(message.id, message.stream, "overloaded", "Full.", None, True, 250))
                else:
                    engine.send(Accept(message.id, message.stream, 3, message.params.get("n", 1)))
                    num_tokens = len(message.resume[0]) // 4 if message.resume else 0
                    self._runs[place][message.stream] = (message, num_tokens)

    def _arrived(self, place: int) -> list[Any]:
        session = self.engines[place].session
        if not self._is_up[place]:
            return []
        found = [messages.decode(frames) for frames in session.outgoing]
        session.outgoing.clear()
        return [message for message in found if isinstance(message, Submit | Cancel)]

    def _cancel(self, place: int, message: Cancel) -> None:
        ids = set(message.ids)
        for stream, (run, _) in list(self._runs[place].items()):
            if stream in message.streams or run.id in ids:
                del self._runs[place][stream]
                self.engines[place].end(stream, "abort", ["cancelled", "Cancelled."])

    def step(self, share: float) -> None:
        """Give a token to this share of all runs."""
        for place, engine in enumerate(self.engines):
            for stream in [stream for stream in self._runs[place] if self._random() < share]:
                if (found := self._runs[place].get(stream)) is None:
                    continue  # cancelled meanwhile
                message, num_tokens = found
                self._runs[place][stream] = (message, num_tokens + 1)
                engine.step([stream], [1000 * message.id[0] + num_tokens])
                if num_tokens + 1 == NUM_TOKENS:
                    del self._runs[place][stream]
                    engine.end(stream, "length", None)

    def die_or_return(self) -> None:
        """Kill one engine, unless it is the last one; or bring it back."""
        place = int(self._random() * len(self.engines))
        engine = self.engines[place]
        if not self._is_up[place]:
            self._is_up[place] = True
            engine.come_back()
        elif sum(self._is_up) > 1:
            self._is_up[place] = False
            self._runs[place].clear()
            engine.die()
            engine.run_until(engine.now + 10.0)

    def return_all(self) -> None:
        """Bring back what is dead."""
        for place, engine in enumerate(self.engines):
            if not self._is_up[place]:
                self._is_up[place] = True
                engine.come_back()

    def pass_time(self, seconds: float) -> None:
        """Let time pass at all engines."""
        for engine in self.engines:
            engine.run_until(engine.now + seconds)


@pytest.mark.parametrize("seed", range(6))
def test_hedges_kills_refusals_and_cancellations_leave_one_end_and_the_output_of_one_run(seed: int) -> None:
    async def body(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        generator = random.Random(seed)
        chaos = ChaoticEngines(engines, generator)
        events: list[str] = []
        pool.on_event = events.append
        submissions: list[Submission] = []
        cancelled: set[bytes] = set()
        for _ in range(250):
            if generator.random() < 0.4:
                submissions.append(submit(pool))
            pending = [item for item in submissions if item.id in pool._movable]
            if pending and generator.random() < 0.5:
                hedge(pool, generator.choice(pending))
            if submissions and generator.random() < 0.03:
                chosen = generator.choice(submissions)
                cancelled.add(chosen.id)
                chosen.cancel()
            if generator.random() < 0.05:
                chaos.die_or_return()
            chaos.receive(refusals=0.1)
            chaos.step(0.2)
            chaos.pass_time(0.05)
            pool._watch()
        chaos.return_all()
        for _ in range(40):
            chaos.receive(refusals=0.0)
            chaos.step(1.0)
            chaos.pass_time(0.5)
            pool._watch()
        for submission in submissions:
            async with asyncio.timeout(60):
                deltas = [delta async for delta in submission.streams[0]]
            (finish,) = [delta.finish for delta in deltas if delta.finish is not None]
            tokens = [token for delta in deltas for token in delta.token_ids]
            assert tokens == [1000 * submission.id[0] + place for place in range(len(tokens))]
            assert finish.reason != "length" or len(tokens) == NUM_TOKENS
            assert finish.reason != "abort" or submission.id in cancelled
        assert "hedged" in events
        assert not any(client.num_open for client in pool.clients)

    run(body, count=3)
