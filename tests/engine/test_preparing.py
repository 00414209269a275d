"""What an executor leaves for after the start is done between steps: at once while nothing runs, else now and then."""

from __future__ import annotations

import logging
import time
from array import array

import pytest

from inferengine.core.executor import StepPlan
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.loop import EngineLoop, LoopOutput, StepObserver
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import small_capacity

STEPS = 12


class Preparing(SimulatedExecutor):
    """Has some pieces left to prepare, and notes what it is asked for: `s` a step, `p` a piece."""

    def __init__(self, pieces: int, error: Exception | None = None) -> None:
        super().__init__(small_capacity())
        self.pieces, self.error, self.calls = pieces, error, ""

    def execute(self, plan: StepPlan) -> object:
        self.calls += "s"
        return super().execute(plan)

    def prepare(self) -> bool:
        self.calls += "p"
        if self.error is not None:
            raise self.error
        self.pieces -= 1
        return self.pieces > 0


def run(executor: Preparing, *, is_busy: bool, observer: StepObserver | None = None) -> str:
    """Run a request of STEPS steps, which is there from the start or comes when nothing is left to prepare. Returns
    what the executor was asked for until the loop was idle again. `observer` watches until the request has ended."""
    capacity = small_capacity()
    options = SchedulerOptions(capacity.max_num_batched_tokens, capacity.max_num_seqs)
    core = EngineCore(executor, capacity, options, clock=time.monotonic)
    request = Request(uid=1, prompt_ids=array("I", range(20)), params=SamplingParams(ignore_eos=True), max_tokens=STEPS)

    def submit_or_stop() -> None:
        """Called in each turn."""
        if loop._prepare is None and not core.has_work:
            if not is_busy and not ended:
                loop.submit([request])
            elif ended:
                loop.stop()

    def post(news: LoopOutput) -> None:
        ended.extend(news.output.finished)
        if ended:
            loop.observe_steps(None)

    ended: list[object] = []
    loop = EngineLoop(
        core,
        Lifecycle(engine="e", epoch=bytes(8), clock=time.monotonic),
        post=post,
        on_turn=submit_or_stop,
    )
    if is_busy:
        loop.submit([request])
    loop.observe_steps(observer)
    loop.run()
    return executor.calls


def test_a_loop_without_work_prepares_everything_before_it_waits() -> None:
    assert run(Preparing(5), is_busy=False) == "p" * 5 + "s" * STEPS


def test_a_busy_loop_prepares_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.loop.PREPARE_S", 0.0)
    assert run(Preparing(5), is_busy=True) == "sp" * 5 + "s" * (STEPS - 5)


def test_requests_go_first_where_the_last_piece_is_not_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.loop.PREPARE_S", 1e9)
    assert run(Preparing(5), is_busy=True) == "s" * STEPS + "p" * 5


class Watching:
    """An observer of steps that does nothing."""

    def begins(self) -> None:
        pass

    def ended(self, computed: bool) -> None:
        pass


def test_nothing_is_prepared_while_steps_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.loop.PREPARE_S", 0.0)
    assert run(Preparing(5), is_busy=True, observer=Watching()) == "s" * STEPS + "p" * 5


def test_a_piece_that_fails_ends_the_preparing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        assert run(Preparing(5, RuntimeError("no room")), is_busy=False) == "p" + "s" * STEPS


def test_the_time_of_preparing_counts_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.loop.PREPARE_S", 0.0)
    monkeypatch.setattr(Preparing, "prepare", lambda self: time.sleep(0.05) is None)
    seen: list[float] = []
    monkeypatch.setattr(
        "inferengine.core.scheduler.scheduler.Scheduler.observe", lambda self, step, seconds: seen.append(seconds)
    )
    executor = Preparing(5)
    executor.max_in_flight = 2
    capacity = small_capacity()
    core = EngineCore(
        executor,
        capacity,
        SchedulerOptions(capacity.max_num_batched_tokens, capacity.max_num_seqs),
        clock=time.monotonic,
    )
    loop = EngineLoop(
        core,
        Lifecycle(engine="e", epoch=bytes(8), clock=time.monotonic),
        post=lambda news: loop.stop() if news.output.finished else None,
    )
    params = SamplingParams(ignore_eos=True)
    loop.submit([Request(uid=1, prompt_ids=array("I", range(20)), params=params, max_tokens=5)])
    loop.run()
    assert len(seen) == 5
    assert sorted(seen)[2] < 0.04
