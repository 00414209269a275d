"""Preemption: which sequence makes room and how, and that no output changes by it."""

from __future__ import annotations

import pytest

from inferengine.core.executor import Capacity
from inferengine.engine.core import StepFailed
from tests.core.builders import HalfRightProposer, Run, expected_output, make_capacity, make_request

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])


def demanding(count: int = 8) -> list:  # type: ignore[type-arg]
    return [make_request(uid, prompt=10, max_tokens=40, seed=uid) for uid in range(1, count + 1)]


@OVERLAP
@pytest.mark.parametrize("window", [None, 9])
def test_swapped_sequences_continue_where_they_were(max_in_flight: int, window: int | None) -> None:
    capacity = make_capacity(24, host_blocks=64, window=window, window_blocks=24)
    run = (
        Run(capacity, max_in_flight=max_in_flight, preemption="swap", prefix_caching=False)
        .submit(*demanding())
        .to_end()
    )
    assert run.outputs == {request.uid: expected_output(request) for request in demanding()}
    assert run.scheduler.stats.num_preemptions > 0
    snapshot = run.scheduler.snapshot()
    assert snapshot.num_blocks_swapped_in == snapshot.num_blocks_swapped_out > 0
    assert run.executor.num_computed_tokens == sum(10 + 40 - 1 for _ in range(8))  # nothing was computed twice


@pytest.mark.parametrize("num_blocks", [18, 20, 24])
def test_a_swapped_sequence_comes_back_when_the_blocks_of_its_draft_tokens_fit_too(num_blocks: int) -> None:
    """With 18 blocks a sequence once came back to fewer free blocks than it had left with, and the step failed."""
    run = Run(
        make_capacity(num_blocks, host_blocks=64), preemption="swap", prefix_caching=False, max_drafts=4,
        proposer=HalfRightProposer(wrong_every=3),
    )  # fmt: skip
    run.submit(*demanding()).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in demanding()}
    assert run.scheduler.snapshot().num_blocks_swapped_in > 0


def test_a_full_host_pool_falls_back_to_computing_again() -> None:
    run = Run(make_capacity(24, host_blocks=4), preemption="swap", prefix_caching=False).submit(*demanding()).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in demanding()}
    assert run.executor.num_computed_tokens > sum(10 + 40 - 1 for _ in range(8))


@pytest.mark.parametrize(("swap_block_s", "swapped"), [(1.0, False), (1e-6, True)])
def test_the_cheaper_way_is_taken(swap_block_s: float, swapped: bool) -> None:
    base = make_capacity(24, host_blocks=64)
    capacity: Capacity = base._replace(swap_block_s=swap_block_s, prefill_token_s=1e-3)
    run = Run(capacity, preemption="swap").submit(*demanding()).to_end()
    assert (run.scheduler.snapshot().num_blocks_swapped_out > 0) is swapped
    assert run.outputs == {request.uid: expected_output(request) for request in demanding()}


@OVERLAP
def test_rejecting_ends_the_latest_with_overloaded_and_the_rest_finish_right(max_in_flight: int) -> None:
    run = Run(make_capacity(24), max_in_flight=max_in_flight, preemption="reject").submit(*demanding()).to_end()
    ended = {uid: detail[0] for uid, (reason, detail) in run.finished.items() if reason == "error"}  # type: ignore[index]
    assert set(ended.values()) == {"overloaded"}
    assert 1 not in ended
    for request in demanding():
        if request.uid not in ended:
            assert run.outputs[request.uid] == expected_output(request)
    assert set(run.finished) == {request.uid for request in demanding()}


@OVERLAP
def test_cancelling_a_swapped_sequence_frees_its_host_blocks(max_in_flight: int) -> None:
    run = Run(make_capacity(24, host_blocks=64), max_in_flight=max_in_flight, preemption="swap").submit(*demanding())
    while not any(sequence.host_tables for sequence in run.scheduler.sequences.values()):
        run.step()
    for uid in range(1, 9):
        run.cancel(uid)
    assert all(pool.num_held == 0 for pool in run.scheduler.kv.swap.pools)
    run.to_end()


def test_a_step_that_fails_costs_a_swapped_sequence_nothing_but_time() -> None:
    run = Run(make_capacity(24, host_blocks=64), max_in_flight=2, preemption="swap").submit(*demanding())
    while not any(sequence.host_tables for sequence in run.scheduler.sequences.values()):
        run.step()
    run.executor.fail_with = StepFailed("one bad row", rows=[0])
    run.to_end()
    errors = [uid for uid, (reason, _) in run.finished.items() if reason == "error"]
    assert len(errors) == 1
    for request in demanding():
        if request.uid not in errors:
            assert run.outputs[request.uid] == expected_output(request)


def test_admission_keeps_a_reserve_for_those_that_run() -> None:
    run = Run(make_capacity(20, max_num_seqs=4), watermark=0.25)
    run.submit(make_request(1, prompt=40, max_tokens=4), make_request(2, prompt=36, max_tokens=4)).step()
    assert [sequence.uid for sequence in run.scheduler.running] == [1]
    eager = Run(make_capacity(20, max_num_seqs=4), watermark=0.0)
    eager.submit(make_request(1, prompt=40, max_tokens=4), make_request(2, prompt=36, max_tokens=4)).step()
    assert [sequence.uid for sequence in eager.scheduler.running] == [1, 2]


def test_contiguous_reserves_the_longest_length_for_each() -> None:
    capacity = make_capacity(24, max_model_len=32)  # 8 blocks each: three fit, though their tokens would fill 12
    requests = [make_request(uid, prompt=4, max_tokens=4) for uid in range(1, 5)]
    run = Run(capacity, contiguous=True, prefix_caching=False).submit(*requests)
    run.step()
    assert len(run.scheduler.running) == 3
    assert run.scheduler.snapshot().internal_fragmentation > 0.8
    run.to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


def test_gauges_are_right_while_blocks_run_out() -> None:
    run = Run(make_capacity(24)).submit(*demanding())
    for _ in range(12):
        run.step()
    snapshot = run.scheduler.snapshot()
    held = sum(sequence.num_computed for sequence in run.scheduler.running)
    assert snapshot.num_blocks_held + snapshot.num_blocks_free + snapshot.num_blocks_cached == 24
    assert snapshot.num_tokens_held == held
    assert snapshot.internal_fragmentation == pytest.approx(1 - held / (snapshot.num_blocks_held * 4))
    assert snapshot.kv_usage == snapshot.num_blocks_held / 24
    run.to_end()
    assert run.scheduler.stats.num_failed_allocations >= run.scheduler.stats.num_preemptions > 0
    assert run.scheduler.snapshot().kv_usage == 0.0
