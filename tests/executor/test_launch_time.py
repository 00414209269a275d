"""The time to launch a step is the host's alone, and not that of its first launch, which loads kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferengine.core.executor import StepPlan
from inferengine.executor.memory import measure


class Runner:
    """An executor whose launches take the given seconds, and whose device takes one more."""

    settings = SimpleNamespace(max_num_batched_tokens=512)
    slots = SimpleNamespace(num_slots=4, tokens=torch.zeros(5, 256))
    kv = SimpleNamespace(groups=[None])

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.plans = list(seconds), 0.0, list[StepPlan]()

    def execute(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.now += self.seconds.pop(0)
        return SimpleNamespace(result=self.wait)

    def wait(self) -> None:
        self.now += 1.0


def test_the_least_of_the_launches_counts_without_what_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = Runner(0.5, 0.007, 0.006, 0.02)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: runner.now)
    assert measure.launch_time(runner) == pytest.approx(0.006)
    assert {(plan.num_tokens, len(plan.slots), plan.num_decodes) for plan in runner.plans} == {(64, 1, 0)}
