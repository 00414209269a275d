"""The cost of speculation that gains nothing: a bounded share of the time, lost overlap included."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Sequence
from inferengine.core.speculation import FIRST_BUDGET, MAX_BUDGET, REFILL, SpeculationBudget
from inferengine.engine.core import EngineCore
from tests.core.builders import make_capacity, make_request

TOKEN = 5  # the only one that this model knows
HOST_S, STEP_S = 1.0, 4.0


class Timed:
    """A device with a queue, and a clock. A step takes STEP_S, each draft token `draft_s` more.

    Every call of the engine takes HOST_S, which is hidden where a step is under way.
    """

    def __init__(self, max_in_flight: int, draft_s: float, *, is_right: bool) -> None:
        self.max_in_flight, self.draft_s, self.is_right = max_in_flight, draft_s, is_right
        self.now = self.free_at = 0.0

    def execute(self, plan: StepPlan) -> _Step:
        self.free_at = max(self.free_at, self.now) + STEP_S + self.draft_s * sum(plan.num_drafts)
        return _Step(self, plan, self.free_at)


class _Step(NamedTuple):
    device: Timed
    plan: StepPlan
    ready_at: float

    def done(self) -> bool:
        return self.device.now >= self.ready_at

    def result(self) -> StepResult:
        self.device.now = max(self.device.now, self.ready_at)
        drafts = self.plan.num_drafts or [0] * len(self.plan.slots)
        draws = [
            1 + count * self.device.is_right for count, draws in zip(drafts, self.plan.samples, strict=True) if draws
        ]
        return StepResult([TOKEN] * sum(draws), num_emitted=draws if self.plan.num_drafts else None)


class FixedProposer:
    def __init__(self, *, on_device: bool = False, length: int = 8) -> None:
        self.on_device, self.length = on_device, length

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return [TOKEN] * min(max_tokens, self.length)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: it remembers nothing."""


def ends(
    proposer: FixedProposer | None,
    *,
    draft_s: float = 0.0,
    max_in_flight: int = 2,
    is_right: bool = False,
    rounds: int = 1,
) -> list[float]:
    """Return when each round of two requests at once, of 250 tokens each, is over."""
    device, capacity = Timed(max_in_flight, draft_s, is_right=is_right), make_capacity(400)
    options = SchedulerOptions(64, capacity.max_num_seqs, max_drafts=4 if proposer else 0)
    core = EngineCore(device, capacity, options, clock=lambda: device.now, proposer=proposer)  # type: ignore[arg-type]
    times = []
    for index in range(rounds):
        for row in range(2):
            core.submit(make_request(2 * index + row + 1, prompt=5 + row, max_tokens=250))
        while core.has_work:
            device.now += HOST_S
            core.step()
        times.append(device.now)
    assert core.scheduler.snapshot().num_drafted > 0 or proposer is None or proposer.length == 0
    return times


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("draft_s", [1.0, 20.0])
def test_rejected_draft_tokens_take_no_more_than_the_budget(
    on_device: bool, max_in_flight: int, draft_s: float
) -> None:
    [plain] = ends(None, max_in_flight=max_in_flight)
    times = ends(FixedProposer(on_device=on_device), draft_s=draft_s, max_in_flight=max_in_flight, rounds=12)
    assert times[5] < (1.01 + REFILL) * 6 * plain + 2 * MAX_BUDGET * STEP_S
    assert times[11] - times[5] < (1.01 + REFILL) * 6 * plain


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_accepted_draft_tokens_are_still_proposed(max_in_flight: int) -> None:
    [speculating] = ends(FixedProposer(), draft_s=0.1, max_in_flight=max_in_flight, is_right=True)
    assert speculating < 0.5 * ends(None, max_in_flight=max_in_flight)[0]


def test_a_step_does_not_wait_for_tokens_while_there_is_nothing_to_propose() -> None:
    assert ends(FixedProposer(length=0)) == ends(None)


def test_time_lost_by_waiting_is_spent_from_the_budget() -> None:
    device, capacity = Timed(2, 0.0, is_right=False), make_capacity(400)
    options = SchedulerOptions(64, capacity.max_num_seqs, max_drafts=4)
    core = EngineCore(device, capacity, options, clock=lambda: device.now, proposer=FixedProposer())  # type: ignore[arg-type]
    core.submit(make_request(1, prompt=5, max_tokens=40))
    while core.has_work:
        device.now += HOST_S
        core.step()
    cost = core.scheduler.speculator.controller.cost.estimate(1)
    assert cost is not None
    assert cost.plain_s == pytest.approx(STEP_S)
    assert cost.fixed_s + cost.slope_s == pytest.approx(2 * HOST_S, rel=0.5)  # the calls that collect and that launch


def test_accepted_draft_tokens_give_back_to_the_budget() -> None:
    budget = SpeculationBudget()
    budget.observe_step(1, 0.5 * MAX_BUDGET + FIRST_BUDGET, is_reading=True)
    budget.observe_accepted(1)
    assert budget.left < 0
    for _ in range(5):
        budget.observe_step(2, 1.1)
        budget.observe_accepted(4)
    assert -MAX_BUDGET < budget.left < 0
    assert budget.allows
    for _ in range(20):
        budget.observe_step(2, 1.1)
    assert not budget.allows


def test_plain_steps_refill_a_debt() -> None:
    budget = SpeculationBudget()
    budget.observe_step(4, 1 + FIRST_BUDGET + 1)
    budget.observe_plain()
    assert not budget.allows
    steps = 0
    while not budget.allows:
        budget.observe_plain()
        steps += 1
    assert steps <= 1 / REFILL
