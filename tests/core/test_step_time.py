"""What a step may take: learnt from finished steps, never a false alarm within the factor, always one beyond it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inferengine.core.executor import BlockCopies, StepPlan
from inferengine.core.scheduler.planner import ScheduledStep
from inferengine.core.sequence import Request, Sequence
from inferengine.core.step_time import (
    MAX_REFERENCES,
    StallRule,
    StepSize,
    StepTimes,
    features_of,
    token_work,
)
from inferengine.sampling_params import SamplingParams

PLAIN: frozenset[str] = frozenset()
RULE = StallRule(factor=20.0, min_s=2.0, new_kind_s=10.0)


def make_step(
    rows: list[tuple[int, int]], *, params: SamplingParams | None = None, adapter: int = 0, **changes: object
) -> ScheduledStep:
    """Return a step with a row for each (start, count), decodes first."""
    greedy = params or SamplingParams(temperature=0.0)
    sequences = [
        Sequence(Request(uid, [1] * (start + count), greedy, max_tokens=8, adapter=adapter))
        for uid, (start, count) in enumerate(rows)
    ]
    plan = StepPlan(
        step=1,
        slots=list(range(len(rows))),
        starts=[start for start, _ in rows],
        counts=[count for _, count in rows],
        samples=[True] * len(rows),
        num_decodes=sum(count == 1 for _, count in rows),
        num_tokens=sum(count for _, count in rows),
        admitted=[],
        block_updates=[],
    )
    plan = plan._replace(**changes)
    return ScheduledStep(plan, sequences, sequences, [s.uid for s in sequences], 1, [], {}, [])


class TestPrediction:
    def test_nothing_is_known_at_first(self) -> None:
        assert StepTimes().predict(StepSize(100.0, PLAIN)) == (None, False)

    def test_at_first_a_roofline_says_what_can_be_expected(self) -> None:
        times = StepTimes(lambda plan: 0.01)
        prediction = times.predict(times.size(make_step([(5, 1)])))
        assert prediction.seconds == pytest.approx(0.05)
        assert not prediction.known

    def test_a_smaller_step_takes_no_longer(self) -> None:
        times = StepTimes()
        times.observe(StepSize(1000.0, PLAIN), 0.5)
        assert times.predict(StepSize(10.0, PLAIN)) == (0.5, True)

    def test_a_larger_step_takes_longer_in_proportion(self) -> None:
        times = StepTimes()
        times.observe(StepSize(1000.0, PLAIN), 0.5)
        assert times.predict(StepSize(4000.0, PLAIN)) == (2.0, True)

    def test_the_tightest_bound_counts(self) -> None:
        times = StepTimes()
        times.observe(StepSize(10.0, PLAIN), 0.01)
        times.observe(StepSize(1000.0, PLAIN), 0.5)
        assert times.predict(StepSize(20.0, PLAIN)).seconds == pytest.approx(0.02)

    def test_a_step_that_did_more_stands_for_one_that_does_less(self) -> None:
        times = StepTimes()
        times.observe(StepSize(100.0, frozenset({"sampling", "filters"})), 0.5)
        assert times.predict(StepSize(100.0, frozenset({"sampling"}))).known
        assert not times.predict(StepSize(100.0, frozenset({"sampling", "penalties"}))).known

    def test_one_slow_step_does_not_hide_the_next_stall(self) -> None:
        """The machine did something else for a minute, or a kernel was compiled."""
        times = StepTimes()
        for _ in range(5):
            times.observe(StepSize(100.0, PLAIN), 0.01)
        times.observe(StepSize(100.0, PLAIN), 60.0)
        assert RULE.limit_s(times.predict(StepSize(100.0, PLAIN))) == RULE.min_s

    def test_steps_that_stay_slow_are_believed(self) -> None:
        times = StepTimes()
        times.observe(StepSize(100.0, PLAIN), 0.1)
        for _ in range(30):
            times.observe(StepSize(100.0, PLAIN), 3.0)
        assert times.predict(StepSize(100.0, PLAIN)).seconds == pytest.approx(3.0, rel=0.05)

    def test_what_is_kept_is_bounded(self) -> None:
        times = StepTimes()
        for number in range(3 * MAX_REFERENCES):
            times.observe(StepSize(1.0, frozenset({str(number)})), 0.1)
        assert len(times._references) == MAX_REFERENCES
        assert times.predict(StepSize(1.0, frozenset({str(3 * MAX_REFERENCES - 1)}))).known


class TestRule:
    def test_no_step_is_a_stall_below_the_minimum(self) -> None:
        times = StepTimes()
        times.observe(StepSize(100.0, PLAIN), 0.01)
        assert RULE.limit_s(times.predict(StepSize(100.0, PLAIN))) == 2.0

    def test_a_step_of_a_new_kind_has_longer(self) -> None:
        times = StepTimes()
        times.observe(StepSize(100.0, PLAIN), 0.01)
        assert RULE.limit_s(times.predict(StepSize(100.0, frozenset({"adapter"})))) == 10.0
        assert RULE.limit_s(StepTimes().predict(StepSize(100.0, PLAIN))) == 10.0

    @pytest.mark.parametrize("seed", range(20))
    def test_no_step_within_the_factor_is_a_stall_and_every_one_far_beyond_it_is(self, seed: int) -> None:
        """A device whose times are any linear function of tokens, draws and attention, noisy by up to 3, after a
        handful of steps of other shapes than the one that is judged."""
        generator = random.Random(seed)
        device = _Device(generator)
        times = StepTimes()
        seen: list[StepSize] = []
        for _ in range(generator.randint(3, 40)):
            step = _random_step(generator)
            times.observe(times.size(step), device.seconds(step, generator.uniform(1.0, 3.0)))
            seen.append(times.size(step))
        for _ in range(50):
            step = _random_step(generator)
            size = times.size(step)
            limit_s = RULE.limit_s(times.predict(size))
            assert limit_s > device.seconds(step, 3.0), "a slow step is none that has stalled"
            largest = max(item.work for item in seen)
            if size.work <= largest and times.predict(size).known:
                assert limit_s <= max(RULE.new_kind_s, RULE.factor * device.slowest_s), "an alarm comes in time"


class _Device:
    """Times that grow with all that a step has to do."""

    def __init__(self, generator: random.Random) -> None:
        self._fixed = 10 ** generator.uniform(-4, -1.5)
        self._token = 10 ** generator.uniform(-6, -4)
        self._draw = self._token * generator.uniform(0.2, 3.0)
        self._key = self._token * generator.uniform(0.0002, 0.02)
        self._pair = self._key * generator.uniform(0.01, 0.03)
        self.slowest_s = 0.0

    def seconds(self, step: ScheduledStep, noise: float) -> float:
        plan = step.plan
        keys = sum(start + count for start, count in zip(plan.starts, plan.counts, strict=True))
        pairs = sum(c * (s + (c + 1) / 2) for s, c in zip(plan.starts, plan.counts, strict=True))
        work = self._token * plan.num_tokens + self._draw * plan.num_sampled + self._key * keys + self._pair * pairs
        seconds = noise * (self._fixed + work)
        self.slowest_s = max(self.slowest_s, seconds)
        return seconds


def _random_step(generator: random.Random) -> ScheduledStep:
    decodes = [(generator.randint(1, 4000), 1) for _ in range(generator.choice([0, 1, 8, 64]))]
    chunks = [
        (generator.choice([0, 512, 3000]), generator.randint(2, 2048)) for _ in range(generator.choice([0, 0, 1, 3]))
    ]
    return make_step(decodes + chunks or [(10, 1)])


class TestFeatures:
    def test_a_greedy_step_has_none(self) -> None:
        assert features_of(make_step([(5, 1), (0, 40)])) == set()

    @pytest.mark.parametrize(
        ("params", "features"),
        [
            (SamplingParams(), {"sampling"}),
            (SamplingParams(top_p=0.9), {"sampling", "filters"}),
            (SamplingParams(temperature=0.0, repetition_penalty=1.1), {"penalties"}),
            (SamplingParams(temperature=0.0, logit_bias=((1, 1.0),)), {"bias"}),
            (SamplingParams(temperature=0.0, logprobs=0), {"logprobs"}),
            (SamplingParams(temperature=0.0, prompt_logprobs=0), {"prompt_logprobs"}),
        ],
    )
    def test_what_a_request_asks_for(self, params: SamplingParams, features: set[str]) -> None:
        assert features_of(make_step([(0, 40)], params=params)) == features

    def test_what_a_plan_holds(self) -> None:
        step = make_step(
            [(5, 1)],
            adapter=3,
            masked=[0],
            num_drafts=[2],
            device_drafts=True,
            swap_in=[BlockCopies([1], [2])],
        )
        assert features_of(step) == {"adapter", "masks", "draft tokens", "draft model", "swap"}

    def test_a_chunk_that_draws_nothing_has_no_features_of_a_draw(self) -> None:
        assert features_of(make_step([(0, 40)], params=SamplingParams(top_p=0.5), samples=[False])) == set()

    def test_work_grows_with_tokens_and_with_context(self) -> None:
        few, many = make_step([(0, 8)]), make_step([(0, 800)])
        far = make_step([(100_000, 8)])
        assert token_work(few.plan) < token_work(far.plan) < token_work(many.plan)


def test_requests_that_are_alike_share_what_is_remembered_of_them() -> None:
    """Features of thousands of requests are kept, of few kinds."""
    known: dict[int, Any] = {}
    for uid in range(100):
        sampled = SamplingParams(temperature=1.0, top_p=0.5 + uid / 1000)
        sequence = Sequence(Request(uid, [1, 1], sampled, max_tokens=8))
        features_of(make_step([(0, 2)])._replace(rows=[sequence]), known)
    assert len(known) == 100
    assert len({id(features) for features in known.values()}) == 1
