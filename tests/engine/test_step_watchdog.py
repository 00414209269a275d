"""The thread that looks at the step under way, turned by hand: a fake clock, a core that only has attributes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from inferengine.core.scheduler.planner import ScheduledStep
from inferengine.core.step_time import Roofline, StallRule
from inferengine.engine.lifecycle import EXCUSED_S, TICK_S, Stall, StepWatchdog, stall_rule
from tests.core.test_step_time import make_step

RULE = StallRule(factor=20.0, min_s=2.0, new_kind_s=10.0)


class Core:
    """What a watch reads of EngineCore."""

    def __init__(self) -> None:
        self.under_way: ScheduledStep | None = None
        self.launching: ScheduledStep | None = None
        self.finished: dict[bool, tuple[ScheduledStep, float]] = {}
        self.roofline: Roofline | None = None
        self.executor: Any = None
        self.num_in_flight = 1


class Bench:
    """A watch, its clock and what it told."""

    def __init__(self, rule: StallRule = RULE) -> None:
        self.core, self.now = Core(), 1000.0
        self.stalls: list[Stall] = []
        self.alive: list[float] = []
        self.excuse = ""
        self.is_profiled = False
        self.watch = StepWatchdog(
            self.core,  # type: ignore[arg-type]
            rule,
            clock=lambda: self.now,
            on_alive=self.alive.append,
            on_stall=self.stalls.append,
            excuse=lambda: self.excuse,
            is_profiled=lambda: self.is_profiled,
        )

    def finish(self, step: ScheduledStep, seconds: float) -> None:
        """Finish a step of this kind, which the watch sees."""
        self.core.finished[step.plan.num_decodes == len(step.rows)] = step, seconds
        self.core.under_way = None
        self.look()

    def look(self, after_s: float = TICK_S) -> bool:
        self.now += after_s
        return self.watch.look(self.now)

    def seconds_to_alarm(self, most_s: float) -> float:
        """Return how long the step now under way must go on until it is called a stall."""
        begin = self.now
        while self.now - begin < most_s:
            if self.look():
                return self.now - begin
        return float("inf")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_step_of_a_known_kind_is_a_stall_after_the_minimum(bench: Bench) -> None:
    bench.finish(make_step([(5, 1)]), 0.01)
    bench.core.under_way = make_step([(9, 1)])
    assert 2.0 < bench.seconds_to_alarm(60.0) <= 2.0 + 3 * TICK_S


def test_a_step_of_an_unknown_kind_has_longer(bench: Bench) -> None:
    bench.core.under_way = make_step([(9, 1)])
    assert 10.0 < bench.seconds_to_alarm(60.0) <= 10.0 + 3 * TICK_S


def test_a_step_that_takes_long_by_nature_has_as_long_as_the_factor_allows(bench: Bench) -> None:
    bench.finish(make_step([(0, 500)]), 0.5)
    bench.core.under_way = make_step([(0, 500)])
    assert 10.0 < bench.seconds_to_alarm(60.0) <= 10.0 + 3 * TICK_S


@pytest.mark.parametrize("seed", range(10))
def test_no_step_within_the_factor_alarms_and_a_longer_one_does_within_three_ticks(seed: int) -> None:
    generator = random.Random(seed)
    bench = Bench()
    usual_s = 10 ** generator.uniform(-3, 0.5)
    for _ in range(5):
        bench.finish(make_step([(50, 1)]), usual_s)
    limit_s = max(RULE.min_s, RULE.factor * usual_s)
    bench.core.under_way = make_step([(60, 1)])
    alarm_s = bench.seconds_to_alarm(3 * limit_s + 10)
    assert limit_s < alarm_s <= limit_s * 1.3 + 3 * TICK_S, "1.3: the step has ten tokens of context more"


def test_many_short_steps_are_no_long_one(bench: Bench) -> None:
    for _ in range(200):
        bench.core.under_way = make_step([(9, 1)])
        assert not bench.look()


def test_time_in_which_the_watch_did_not_run_does_not_count(bench: Bench) -> None:
    """SIGSTOP and SIGCONT, a suspended machine, a clock that jumps."""
    bench.finish(make_step([(5, 1)]), 0.01)
    bench.core.under_way = make_step([(9, 1)])
    bench.look()
    assert not bench.look(after_s=3600.0)
    assert not bench.look(after_s=-3600.0)
    assert not bench.look()


def test_while_the_loop_compiles_a_kernel_no_time_counts_up_to_a_bound(bench: Bench) -> None:
    bench.finish(make_step([(5, 1)]), 0.01)
    bench.core.under_way = make_step([(9, 1)])
    bench.excuse = "compiling"
    assert EXCUSED_S < bench.seconds_to_alarm(300.0) < EXCUSED_S + 4.0


def test_a_step_with_compilation_teaches_nothing(bench: Bench) -> None:
    slow = make_step([(5, 1)])
    bench.core.under_way = slow
    bench.excuse = "compiling"
    for _ in range(40):
        bench.look()
    bench.finish(slow, 10.0)
    assert bench.watch.times.predict(bench.watch.times.size(slow)).seconds is None


def test_a_step_that_is_profiled_has_as_long_as_one_of_a_new_kind_and_teaches_nothing(bench: Bench) -> None:
    bench.finish(make_step([(5, 1)]), 0.01)
    bench.is_profiled = True
    bench.finish(make_step([(0, 500)]), 8.0)
    bench.core.under_way = make_step([(9, 1)])
    assert 10.0 < bench.seconds_to_alarm(60.0) <= 10.0 + 3 * TICK_S


def test_a_step_within_its_time_is_a_sign_of_life_and_an_idle_engine_gives_none(bench: Bench) -> None:
    bench.look()
    assert not bench.alive
    bench.core.under_way = make_step([(9, 1)])
    bench.look()
    bench.look()
    assert bench.alive == [bench.now - TICK_S, bench.now]


def test_a_stall_names_what_ran_and_who_asked(bench: Bench) -> None:
    bench.finish(make_step([(5, 1)]), 0.01)
    bench.core.under_way = make_step([(9, 1), (0, 40)])
    bench.core.launching = make_step([(9, 1), (40, 1), (7, 1)])
    bench.seconds_to_alarm(60.0)
    (stall,) = bench.stalls
    assert stall.uids == {0, 1, 2}, "the step behind it may be what hangs, in its launch"
    assert stall.fields["rows"] == 2
    assert stall.fields["tokens"] == 41
    assert stall.fields["chunks"] == [40]
    assert stall.fields["draft_tokens"] == 0
    assert stall.fields["requests"] == ["0", "1", "2"]
    assert any("test_step_watch" in frame for frame in stall.fields["at"]), "where the loop's thread is"
    assert "step 1 (mixed, 2 rows, 41 tokens) is not done after" in stall.summary


def test_the_rule_of_a_cpu_is_more_patient_and_keys_override_it() -> None:
    assert stall_rule(20.0, 0.0, "cuda") == (20.0, 2.0, 10.0)
    assert stall_rule(20.0, 0.0, "cpu") == (20.0, 30.0, 60.0)
    assert stall_rule(5.0, 1.0, "cuda") == (5.0, 1.0, 2.0)
    assert stall_rule(0.0, 1.0, "cuda") is None


def test_the_thread_sleeps_while_there_is_no_work() -> None:
    bench = Bench()
    looks = 0

    def count() -> float:
        nonlocal looks
        looks += 1
        return bench.now

    bench.watch._clock = count
    thread = threading.Thread(target=bench.watch.run)
    thread.start()
    thread.join(3 * TICK_S)
    assert looks == 0
    bench.watch.busy(True)
    thread.join(3 * TICK_S)
    assert looks > 0
    bench.watch.close()
    thread.join(10.0)
    assert not thread.is_alive()
