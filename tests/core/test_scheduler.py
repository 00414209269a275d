"""The scheduler: what goes into a step, and that every way through it gives the same tokens."""

from __future__ import annotations

import pytest

from inferengine.core.executor import DeviceLost
from inferengine.engine.core import StepFailed
from tests.core.builders import Run, expected_output, make_capacity, make_request, make_scheduler
from tests.core.memory_executor import EOS

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])


def test_a_short_prompt_and_its_first_token_take_one_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=6))
    scheduled = scheduler.schedule(0.0).step
    assert scheduled is not None
    assert (scheduled.plan.starts, scheduled.plan.counts, scheduled.plan.samples) == ([0], [6], [True])


def test_a_long_prompt_is_cut_to_the_budget_and_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(make_request(prompt=25))
    chunks = []
    for _ in range(3):
        scheduled = scheduler.schedule(0.0).step
        assert scheduled is not None
        chunks.append((scheduled.plan.starts[0], scheduled.plan.counts[0], scheduled.plan.samples[0]))
    assert chunks == [(0, 10, False), (10, 10, False), (20, 5, True)]


def test_decodes_come_before_chunks_and_share_one_step() -> None:
    run = Run(budget=8).submit(make_request(1, prompt=4, max_tokens=50))
    run.step()
    run.submit(make_request(2, prompt=30))
    run.step()
    scheduled = run.scheduler.schedule(0.0).step
    assert scheduled is not None
    assert [sequence.uid for sequence in scheduled.rows] == [1, 2]
    assert scheduled.plan.num_decodes == 1
    assert scheduled.plan.counts == [1, 7]


def test_a_step_never_exceeds_its_budget_of_tokens_and_sequences() -> None:
    scheduler = make_scheduler(make_capacity(max_num_seqs=3), budget=9)
    for uid in range(1, 8):
        scheduler.add(make_request(uid, prompt=4))
    scheduled = scheduler.schedule(0.0).step
    assert scheduled is not None
    assert scheduled.plan.counts == [4, 4, 1]
    assert len(scheduler.running) == 3


def test_without_chunking_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    scheduler = make_scheduler(budget=10, chunked_prefill=False)
    scheduler.add(make_request(1, prompt=6))
    scheduler.add(make_request(2, prompt=6))
    first = scheduler.schedule(0.0).step
    assert first is not None
    assert first.plan.counts == [6]


def test_prefill_chunk_caps_each_prompt_so_that_two_share_a_step() -> None:
    scheduler = make_scheduler(budget=20, prefill_chunk=8)
    scheduler.add(make_request(1, prompt=30))
    scheduler.add(make_request(2, prompt=30))
    scheduled = scheduler.schedule(0.0).step
    assert scheduled is not None
    assert scheduled.plan.counts == [8, 8]


@OVERLAP
def test_mixed_lengths_give_exact_counts(max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=3 + uid, max_tokens=uid * 3) for uid in range(1, 9)]
    run = Run(max_in_flight=max_in_flight).submit(*requests).to_end()
    assert {uid: len(tokens) for uid, tokens in run.outputs.items()} == {uid: uid * 3 for uid in range(1, 9)}
    assert all(reason == "length" for reason, _ in run.finished.values())


@OVERLAP
@pytest.mark.parametrize("budget", [5, 64])
def test_outputs_equal_the_request_run_alone(budget: int, max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=5 * uid, max_tokens=20, eos=True) for uid in range(1, 9)]
    run = Run(make_capacity(200), budget=budget, max_in_flight=max_in_flight).submit(*requests).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


@OVERLAP
def test_demand_above_the_pool_preempts_and_every_request_finishes_right(max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=10, max_tokens=40) for uid in range(1, 9)]
    run = Run(make_capacity(24), max_in_flight=max_in_flight).submit(*requests).to_end()
    assert run.scheduler.stats.num_preemptions > 0
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


@OVERLAP
def test_eos_ends_a_sequence_and_no_token_follows(max_in_flight: int) -> None:
    request = next(
        request
        for uid in range(1, 500)
        if expected_output(request := make_request(uid, max_tokens=60, eos=True))[-1] == EOS
    )
    run = Run(max_in_flight=max_in_flight).submit(request).to_end()
    assert run.outputs[request.uid] == expected_output(request)
    assert run.finished[request.uid] == ("stop", None)


def test_a_stop_id_is_reported_and_ignored_before_min_tokens() -> None:
    output = expected_output(make_request(max_tokens=12))
    stopping = make_request(max_tokens=12, stop_token_ids=(output[3],), min_tokens=2)
    assert Run().submit(stopping).to_end().finished[1] == ("stop", output[3])
    just = make_request(max_tokens=12, stop_token_ids=(output[3],), min_tokens=4)
    assert len(Run().submit(just).to_end().outputs[1]) == 4
    patient = make_request(max_tokens=12, stop_token_ids=(output[3],), min_tokens=12)
    assert Run().submit(patient).to_end().finished[1][0] in {"length", "stop"}
    assert len(Run().submit(patient).to_end().outputs[1]) == 12


@OVERLAP
def test_a_cancelled_request_frees_its_blocks_at_once_in_every_phase(max_in_flight: int) -> None:
    for steps in range(6):
        run = Run(make_capacity(8, max_num_seqs=2), budget=6, max_in_flight=max_in_flight)
        run.submit(make_request(1, prompt=15, max_tokens=9), make_request(2, prompt=9), make_request(3, prompt=9))
        for _ in range(steps):
            run.step()
        for uid in (1, 2, 3):
            run.cancel(uid)
        assert run.scheduler.kv.pools[0].num_held == 0
        run.to_end()
        assert set(run.finished) == {1, 2, 3}


def test_cancel_is_idempotent_and_of_the_unknown_is_nothing() -> None:
    run = Run().submit(make_request())
    assert run.core.cancel(1) is not None
    assert run.core.cancel(1) is None
    assert run.core.cancel(99) is None


@OVERLAP
def test_a_failing_step_ends_the_request_at_fault_alone(max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=6, max_tokens=12) for uid in (1, 2, 3)]
    run = Run(max_in_flight=max_in_flight).submit(*requests)
    run.executor.fail_on_step, run.executor.fail_with = 4, StepFailed("bad row", rows=[1])
    run.to_end()
    assert run.finished[2] == ("error", ("engine_error", "The engine failed while computing this request."))
    for request in (requests[0], requests[2]):
        assert run.outputs[request.uid] == expected_output(request)


@OVERLAP
def test_a_device_that_is_lost_ends_the_step(max_in_flight: int) -> None:
    run = Run(max_in_flight=max_in_flight).submit(make_request(1), make_request(2))
    run.executor.fail_with = DeviceLost("gone")
    run.to_end()
    assert {reason for reason, _ in run.finished.values()} == {"error"}
    assert run.core.num_failed_steps == 1


def test_deadlines_of_requests_that_have_ended_are_not_kept_until_they_pass() -> None:
    """A client may name one that is weeks away."""
    run = Run()
    for uid in range(1, 3000):
        run.submit(make_request(uid, max_tokens=1, deadline_s=1e9))
        run.cancel(uid)
    assert len(run.core._deadlines) < 1100


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    run = Run(make_capacity(max_num_seqs=1))
    run.submit(
        make_request(1, max_tokens=50, deadline_s=5.0), make_request(2, deadline_s=4.0), make_request(3)
    ).to_end()
    assert run.finished[1][1] == run.finished[2][1] == ("deadline_exceeded", "The request's deadline passed.")
    assert run.finished[3][0] == "length"


def test_a_burst_is_answered_in_order_and_the_first_long_before_the_last() -> None:
    requests = [make_request(uid, prompt=8, max_tokens=8) for uid in range(1, 101)]
    run = Run(make_capacity(64, max_num_seqs=8)).submit(*requests).to_end()
    first, last = run.rows[1], run.rows[100]
    assert first.total_s * 5 < last.total_s  # type: ignore[attr-defined]
    assert list(run.finished) == sorted(run.finished)


def test_the_layout_number_is_kept_while_the_batch_is_the_same() -> None:
    run = Run().submit(make_request(1, max_tokens=10), make_request(2, max_tokens=4))
    layouts = []
    while run.core.has_work:
        output = run.core.step()
        assert output is not None
        layouts.append((output.layout, tuple(output.uids)))
    assert len({layout for layout, _ in layouts}) == len(set(layouts)) == 2


@OVERLAP
def test_sliding_window_group_gives_blocks_back_and_outputs_stay_right(max_in_flight: int) -> None:
    capacity = make_capacity(64, window=9, window_blocks=24, max_num_seqs=4)
    requests = [make_request(uid, prompt=12, max_tokens=40) for uid in range(1, 5)]
    run = Run(capacity, budget=7, max_in_flight=max_in_flight).submit(*requests)
    most = 0
    while run.core.has_work:
        run.step()
        most = max(most, run.scheduler.kv.pools[1].num_held)
    assert most <= 24 < 4 * 13
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"prompt_logprobs": 0}])
def test_a_request_whose_log_probabilities_are_left_out_ends_with_an_error(asked: dict[str, int]) -> None:
    """It alone: what does not ask for any is not concerned."""
    run = Run()
    run.executor.leaves_out_logprobs = True
    other = make_request(2, 9, 6)
    run.submit(make_request(1, 9, 6, **asked), other).to_end()
    assert run.finished[1] == ("error", ("engine_error", "The device gave no log-probabilities."))
    assert run.outputs[1] == []
    assert (run.finished[2], run.outputs[2]) == (("length", None), expected_output(other))


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"prompt_logprobs": 0}, {"logprobs": 0, "prompt_logprobs": 2}])
def test_log_probabilities_survive_chunks_and_preemption(asked: dict[str, int]) -> None:
    run = Run(make_capacity(14, max_num_seqs=4), budget=8)
    requests = [make_request(uid, 13, 12, **asked) for uid in range(1, 5)]
    run.submit(*requests).to_end()
    assert run.scheduler.stats.num_preemptions > 0
    assert set(run.finished.values()) == {("length", None)}
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


def test_nothing_is_kept_of_a_prompt_that_is_cancelled_half_way() -> None:
    """Its log-probabilities may be many, and the next step may be far off."""
    run = Run(make_capacity(64), budget=8).submit(make_request(1, 40, prompt_logprobs=0))
    run.step()
    run.step()
    assert run.scheduler._prompt_logprobs
    run.cancel(1)
    assert not run.scheduler._prompt_logprobs
