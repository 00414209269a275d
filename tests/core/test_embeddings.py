"""Embedding requests in the scheduler: prompts like any other that end with a vector instead of tokens."""

from __future__ import annotations

import pytest

from inferengine.engine.core import StepFailed
from tests.core.builders import Run, expected_embedding, expected_output, make_capacity, make_request

POOLINGS = ("last", "mean")


def check(run: Run, *requests) -> None:
    for request in requests:
        if request.pooling is None:
            assert run.outputs[request.uid] == expected_output(request)
        else:
            assert run.embeddings[request.uid] == expected_embedding(request)
            assert run.finished[request.uid] == ("stop", None)
            assert run.outputs[request.uid] == []
    assert run.scheduler.snapshot().num_blocks_held == 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_step_computes_a_short_prompt_and_ends_it(pooling: str) -> None:
    request = make_request(1, 9, pooling=pooling)
    run = Run().submit(request)
    run.step()
    check(run, request)
    assert run.scheduler.stats.num_steps == 1


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("options", [{}, {"max_num_decodes": 2}, {"chunked_prefill": False}])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_chunk_may_leave_a_single_token(pooling: str, options: dict[str, object], max_in_flight: int) -> None:
    requests = [make_request(1, 5, 9), make_request(2, 9, pooling=pooling), make_request(3, 17, pooling=pooling)]
    run = Run(budget=5, max_in_flight=max_in_flight, **options).submit(*requests).to_end()
    check(run, *requests)


def test_a_step_without_embeddings_carries_nothing_of_them() -> None:
    run = Run().submit(make_request(1, 9, 3))
    plans = []
    execute = run.executor.execute
    run.executor.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign]
    run.to_end()
    assert len(plans) == 3
    assert not any(plan.pooled for plan in plans)


def test_a_last_token_takes_a_cached_prefix_and_a_mean_takes_none() -> None:
    prompt = list(range(17))
    first = make_request(1, prompt, 2)
    run = Run().submit(first).to_end()
    last, mean = make_request(2, prompt, pooling="last"), make_request(3, prompt, pooling="mean")
    run.submit(last, mean).to_end()
    check(run, first, last, mean)
    assert (run.rows[2].num_cached, run.rows[3].num_cached) == (16, 0)  # type: ignore[attr-defined]


def test_its_blocks_are_reused_by_other_requests() -> None:
    prompt = list(range(17))
    embedded, generated = make_request(1, prompt, pooling="mean"), make_request(2, prompt, 3)
    run = Run().submit(embedded).to_end().submit(generated).to_end()
    check(run, embedded, generated)
    assert run.rows[2].num_cached == 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("preemption", ["preempt", "swap"])
def test_a_preempted_one_starts_over(pooling: str, preemption: str) -> None:
    capacity = make_capacity(20, max_num_seqs=4, host_blocks=40)
    run = Run(capacity, budget=4, preemption=preemption, prefix_caching=False)
    growing = [make_request(uid, 4, 40) for uid in (1, 2)]
    run.submit(*growing)
    for _ in range(12):
        run.step()
    embedded = make_request(3, 44, pooling=pooling)
    run.submit(embedded).to_end()
    check(run, *growing, embedded)
    assert run.rows[3].num_preemptions > 0  # type: ignore[attr-defined]


def test_cancelled_or_late_it_gives_its_blocks_back_and_no_vector() -> None:
    run = Run(budget=4)
    cancelled, late = make_request(1, 30, pooling="mean"), make_request(2, 30, pooling="last", deadline_s=3.0)
    run.submit(cancelled, late)
    run.step()
    run.cancel(1)
    run.to_end()
    assert run.finished[1][0] == "abort"
    assert run.finished[2] == ("error", ("deadline_exceeded", "The request's deadline passed."))
    assert run.embeddings == {}
    assert run.scheduler.snapshot().num_blocks_held == 0


def test_a_failed_step_is_computed_again_for_requests_not_at_fault() -> None:
    at_fault, other = make_request(1, 6, pooling="last"), make_request(2, 6, pooling="mean")
    run = Run().submit(at_fault, other)
    run.executor.fail_with = StepFailed("a row failed", rows=[0])
    run.to_end()
    assert run.finished[1][0] == "error"
    check(run, other)


def test_a_device_that_gives_no_vector_fails_the_request() -> None:
    run = Run().submit(make_request(1, 6, pooling="last"))
    run.executor._pool = lambda plan: {}  # type: ignore[method-assign]
    run.to_end()
    assert run.finished[1] == ("error", ("engine_error", "The device gave no embedding."))
