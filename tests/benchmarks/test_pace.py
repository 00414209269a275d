"""The yardstick of a shared machine: what it measures, and that the run does not notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.device import Clock
from benchmarks.pace import INTERVAL_S, WORKS, Yardstick, works_of
from inferengine.core.executor import StepPlan


class FakeExecutor:
    """Stands for TorchExecutor: notes the steps, and whose copies of keys they would have used."""

    def __init__(self) -> None:
        self.kv = SimpleNamespace(layers=[None, None], groups=[None])
        self.slots = SimpleNamespace(num_slots=7)
        self.decode_kv_cache: Any = "the run's own"
        self.steps: list[tuple[int, int]] = []
        self.slots_used: set[int] = set()
        self.disturbed = False

    def execute(self, plan: StepPlan) -> Any:
        self.steps.append((plan.num_decodes, plan.num_tokens - plan.num_decodes))
        self.slots_used.update(plan.slots)
        self.disturbed = self.disturbed or self.decode_kv_cache == "the run's own"
        return SimpleNamespace(result=lambda: None)


def test_a_look_takes_every_work_and_leaves_the_runs_rows_alone() -> None:
    executor = FakeExecutor()
    yardstick = Yardstick(Clock("wall"), works_of(executor))
    yardstick.look()
    assert executor.steps == [(decodes, tokens) for decodes, tokens, times in WORKS for _ in range(times)]
    assert executor.slots_used == {7}  # the scratch slot
    assert (executor.disturbed, executor.decode_kv_cache) == (False, "the run's own")
    assert [len(sample.seconds) for sample in yardstick.samples] == [len(WORKS)]


def test_a_look_too_soon_after_the_last_one_measures_nothing() -> None:
    clock: Any = SimpleNamespace(now=lambda: clock.time_s, paused=Clock("wall").paused, time_s=0.0)
    yardstick = Yardstick(clock, works_of(FakeExecutor()))
    for clock.time_s in (0.0, 0.5 * INTERVAL_S, 1.1 * INTERVAL_S):
        yardstick.look()
    assert [sample.at_s for sample in yardstick.samples] == [0.0, 1.1 * INTERVAL_S]


def test_without_works_the_pace_is_one() -> None:
    yardstick = Yardstick(Clock("wall"))
    yardstick.look()
    pace = yardstick.pace()
    assert (pace.at(1.0, 2), pace.mean(0.0, 1.0), pace.summary()) == (1.0, [1.0], {"measurements": 0})
