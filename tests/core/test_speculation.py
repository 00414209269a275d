"""Speculation changes how fast tokens come, never which."""

from __future__ import annotations

import itertools

import pytest

from inferengine.core.executor import StepFuture, StepPlan
from inferengine.core.sequence import Sequence
from inferengine.core.speculation import (
    FIRST_PAUSE,
    LAST_PAUSE,
    MIN_GAIN,
    RETRY_AFTER,
    TRIAL_LENGTH,
    SpeculationController,
)
from tests.core.builders import HalfRightProposer, Run, expected_output, make_capacity, make_request
from tests.core.memory_executor import MemoryExecutor

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])
WHERE = pytest.mark.parametrize("on_device", [False, True])


def requests(count: int = 6, max_tokens: int = 40) -> list:  # type: ignore[type-arg]
    return [
        make_request(uid, prompt=3 * uid, max_tokens=max_tokens + uid, eos=True, seed=uid)
        for uid in range(1, count + 1)
    ]


@OVERLAP
@WHERE
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_blocks", [200, 26])
def test_outputs_equal_those_without_speculation(
    max_in_flight: int, on_device: bool, window: int | None, num_blocks: int
) -> None:
    run = Run(
        make_capacity(num_blocks, window=window, window_blocks=60),
        budget=20,
        max_in_flight=max_in_flight,
        proposer=HalfRightProposer(on_device=on_device),
        max_drafts=4,
    )
    run.submit(*requests()).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests()}
    assert run.scheduler.snapshot().num_drafts_accepted > 0
    assert (run.scheduler.stats.num_preemptions > 0) is (num_blocks == 26)


def test_accepted_draft_tokens_save_steps() -> None:
    def steps(**options: object) -> int:
        run = Run(make_capacity(200), **options).submit(make_request(1, max_tokens=120)).to_end()  # type: ignore[arg-type]
        return run.scheduler.stats.num_steps

    assert steps(proposer=HalfRightProposer(wrong_every=1000), max_drafts=5) < 0.3 * steps()


def test_a_draft_token_that_is_always_right_is_always_accepted() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(wrong_every=10**9), max_drafts=4)
    run.submit(make_request(1, prompt=4, max_tokens=60)).to_end()
    snapshot = run.scheduler.snapshot()
    # position 0 of every output counts as wrong with this proposer, and there is no draft token for it
    assert snapshot.num_drafts_accepted == snapshot.num_drafted > 40


def test_there_is_no_speculation_beyond_max_running() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(), max_drafts=4, max_running_to_draft=2)
    run.submit(*requests(5, max_tokens=10)).step()
    while len(run.scheduler.running) > 2:
        assert run.scheduler.snapshot().num_drafted == 0
        run.step()
    run.to_end()


@OVERLAP
def test_a_sequence_whose_draft_tokens_are_rejected_has_only_trials(max_in_flight: int) -> None:
    proposer = HalfRightProposer(wrong_every=1)
    run = Run(make_capacity(200), max_in_flight=max_in_flight, proposer=proposer, max_drafts=4)
    run.submit(make_request(1, max_tokens=200)).to_end()
    snapshot = run.scheduler.snapshot()
    assert snapshot.num_drafts_accepted == 0
    assert 2 <= snapshot.num_verified <= 12 + 200 / RETRY_AFTER
    assert run.outputs[1] == expected_output(make_request(1, max_tokens=200))


def test_a_request_ends_with_the_count_of_its_draft_tokens() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(), max_drafts=4)
    run.submit(make_request(1, max_tokens=60), make_request(2, prompt=9, max_tokens=60)).to_end()
    rows, snapshot = [run.rows[1], run.rows[2]], run.scheduler.snapshot()
    assert all(row.num_accepted > 0 and row.num_rejected > 0 for row in rows)  # type: ignore[attr-defined]
    assert sum(row.num_accepted for row in rows) == snapshot.num_drafts_accepted  # type: ignore[attr-defined]
    assert sum(row.num_accepted + row.num_rejected for row in rows) == snapshot.num_drafted  # type: ignore[attr-defined]


# -- how many draft tokens -------------------------------------------------------------------------------------------


def make_control(
    plain_s: float = 1.0, fixed_s: float = 0.0, slope_s: float = 0.1, num_rows: int = 1
) -> SpeculationController:
    """Return a controller that has seen steps of this cost."""
    control = SpeculationController(max_drafts=8, max_running=64)
    control.cost.observe(num_rows, 0, plain_s)
    for num_draft_tokens in (1, 4, 8, 2, 6) * 4:
        control.cost.observe(num_rows, num_draft_tokens, plain_s + fixed_s + slope_s * num_draft_tokens)
    return control


def make_sequences(*rates: float) -> list[Sequence]:
    sequences = [Sequence(make_request(uid + 1)) for uid in range(len(rates))]
    for sequence, rate in zip(sequences, rates, strict=True):
        sequence.acceptance_rate = rate
    return sequences


def chosen(control: SpeculationController, *rates: float) -> list[int]:
    """Return how many of 8 offered draft tokens each sequence gets, all in one step."""
    sequences = make_sequences(*rates)
    control.begin(len(sequences))
    lengths = control.choose(dict.fromkeys(sequences, 8), len(sequences), on_device=False)
    return [lengths.get(sequence, 0) for sequence in sequences]


@pytest.mark.parametrize("rate", [0.95, 0.8, 0.6])
@pytest.mark.parametrize(("fixed_s", "slope_s"), [(0.0, 0.001), (0.0, 0.1), (0.1, 0.2)])
def test_the_length_is_that_with_the_most_tokens_per_second(rate: float, fixed_s: float, slope_s: float) -> None:
    def value(length: int) -> float:
        return sum(rate**place for place in range(length + 1)) / (1 + fixed_s + slope_s * length) ** MIN_GAIN

    assert chosen(make_control(1.0, fixed_s, slope_s), rate) == [max(range(1, 9), key=value)]


def test_the_draft_tokens_of_a_step_are_those_with_the_most_tokens_per_second_over_all_sequences() -> None:
    rates, fixed_s, slope_s = (0.95, 0.8, 0.2), 0.1, 0.1

    def value(lengths: tuple[int, ...]) -> float:
        tokens = sum(rate**place for rate, length in zip(rates, lengths, strict=True) for place in range(length + 1))
        return tokens / (1 + fixed_s + slope_s * sum(lengths)) ** MIN_GAIN

    best = max(itertools.product(range(9), repeat=3), key=value)
    lengths = chosen(make_control(1.0, fixed_s, slope_s, num_rows=3), *rates)
    assert value(tuple(lengths)) > 0.99 * value(best)
    assert lengths[0] > lengths[1] > 0


@pytest.mark.parametrize("costs", [{"slope_s": 1.5}, {"fixed_s": 5.0}])
def test_where_speculation_does_not_pay_there_are_only_trials_which_become_rare(costs: dict[str, float]) -> None:
    control = make_control(**costs)
    trials = [step for step in range(600) if control.begin(1) and control.choose(offer(), 1, on_device=False)]
    assert trials[:4] == [0, FIRST_PAUSE, 3 * FIRST_PAUSE, 7 * FIRST_PAUSE]
    assert max(after - before for before, after in itertools.pairwise(trials)) == LAST_PAUSE


def test_a_trial_of_a_draft_model_that_has_much_to_read_first_is_two_steps() -> None:
    control = make_control(slope_s=1.5)
    unread = Sequence(make_request(1, prompt=20))
    trials = [step for step in range(40) if control.begin(1) and control.choose({unread: 8}, 1, on_device=True)]
    second = 1 + FIRST_PAUSE
    assert trials[:5] == [0, 1, second, second + 1, second + 1 + 2 * FIRST_PAUSE]


class ReadingDraft(MemoryExecutor):
    """Takes a second for a step, and longer if its draft model has tokens to read."""

    timed: Run
    num_read = 0

    def execute(self, plan: StepPlan) -> StepFuture:
        self.timed.now += 1.0
        if plan.device_drafts:
            end = plan.starts[0] + 1
            self.timed.now += 0.1 * (end - self.num_read) + 0.02 * sum(plan.num_drafts)
            self.num_read = end + sum(plan.num_drafts)
        return super().execute(plan)


def test_reading_to_catch_up_is_no_cost_of_draft_tokens() -> None:
    run = Run(make_capacity(400), proposer=HalfRightProposer(on_device=True, wrong_every=10**9), max_drafts=4)
    run.core.executor = executor = ReadingDraft(run.capacity)
    executor.timed = run
    run.submit(make_request(1, prompt=50, max_tokens=300))
    control = run.scheduler.speculator.controller
    control.begin(1)
    control._history(1).resume_at = 150  # speculation pauses for half of the output: there is much to read then
    run.to_end()
    assert control.num_accepted > 80


def offer() -> dict[Sequence, int]:
    return dict.fromkeys(make_sequences(0.9), 8)


def test_a_trial_with_better_times_starts_speculation_again() -> None:
    control = make_control(slope_s=1.5)
    asked = 0
    for _ in range(600):
        if control.begin(1):
            drafts = sum(control.choose(offer(), 1, on_device=False).values())
            asked += drafts
            control.cost.observe(1, drafts, 1.0 + 0.01 * drafts)
        else:
            control.cost.observe(1, 0, 1.0)
    assert asked > 8 * 300


def test_a_plain_step_is_measured_before_any_draft_tokens_and_again_now_and_then() -> None:
    control = SpeculationController(max_drafts=4, max_running=8)
    assert not control.begin(1)
    control.cost.observe(1, 0, 1.0)
    speculating = []
    for _ in range(200):
        speculating.append(control.begin(1))
        if speculating[-1]:
            drafts = sum(control.choose(offer(), 1, on_device=False).values())
            control.cost.observe(1, drafts, 1.0)
    assert 2 <= speculating.count(False) <= 4


def test_one_slow_step_changes_little() -> None:
    control = make_control()
    before = control.cost.estimate(1)
    control.cost.observe(1, 4, 400.0)
    after = control.cost.estimate(1)
    assert before is not None
    assert after is not None
    assert after.fixed_s + 4 * after.slope_s < before.plain_s


def test_batches_of_other_sizes_are_judged_by_themselves() -> None:
    control = make_control(num_rows=1)
    assert control.cost.estimate(32) is None
    control.cost.observe(32, 0, 4.0)
    control.cost.observe(32, 64, 40.0)
    assert chosen(control, *[0.9] * 32) == [TRIAL_LENGTH] * 32
    assert chosen(control, 0.9) == [8]


def test_draft_tokens_leave_every_other_sequence_its_token() -> None:
    run = Run(make_capacity(200), budget=9, proposer=HalfRightProposer(wrong_every=10**9), max_drafts=8)
    run.submit(*(make_request(uid, prompt=3, max_tokens=60) for uid in range(1, 9)))
    while not all(run.outputs.values()):
        run.step()
    for _ in range(10):
        before = {uid: len(tokens) for uid, tokens in run.outputs.items()}
        run.step()
        assert all(len(run.outputs[uid]) > count for uid, count in before.items())
    assert run.scheduler.snapshot().num_drafts_accepted > 0


def test_a_stop_inside_accepted_draft_tokens_ends_the_sequence_there() -> None:
    output = expected_output(make_request(max_tokens=30))
    request = make_request(max_tokens=30, stop_token_ids=(output[13],))
    run = Run(proposer=HalfRightProposer(wrong_every=10**9), max_drafts=8).submit(request).to_end()
    first = output.index(output[13])
    assert run.outputs[1] == output[: first + 1]
    assert run.finished[1] == ("stop", output[13])


def test_prefix_blocks_of_verified_tokens_are_exact() -> None:
    first = make_request(1, prompt=8, max_tokens=30)
    run = Run(make_capacity(64), proposer=HalfRightProposer(), max_drafts=4).submit(first).to_end()
    second = make_request(2, [*first.prompt_ids, *run.outputs[1], 5], max_tokens=10)
    run.submit(second).to_end()
    assert run.rows[2].num_cached >= 32  # type: ignore[attr-defined]
    assert run.outputs[2] == expected_output(second)
