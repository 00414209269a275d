"""n > 1: the choices share the prompt's blocks, the last of them by copy on write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferengine.sampling_params import SamplingParams, of_choice
from tests.core.builders import Run, expected_output, make_capacity, make_request

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])


def choices(count: int, prompt: int = 18, max_tokens: int = 12) -> list:  # type: ignore[type-arg]
    ids = [token % 97 for token in range(prompt)]
    return [
        make_request(uid, ids, max_tokens, seed=uid, fork_of=None if uid == 1 else 1) for uid in range(1, count + 1)
    ]


@OVERLAP
@pytest.mark.parametrize("prompt", [1, 4, 17, 18, 20, 21])
@pytest.mark.parametrize("window", [None, 7])
def test_choices_differ_by_their_seed_alone(max_in_flight: int, prompt: int, window: int | None) -> None:
    requests = choices(4, prompt)
    capacity = make_capacity(64, window=window, window_blocks=64)
    run = Run(capacity, max_in_flight=max_in_flight, budget=7).submit(*requests).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
    assert len({tuple(tokens) for tokens in run.outputs.values()}) == 4


def test_the_prompt_is_computed_once_even_without_the_prefix_cache() -> None:
    run = Run(make_capacity(64), prefix_caching=False).submit(*choices(4, prompt=18, max_tokens=5)).to_end()
    assert run.executor.num_computed_tokens == 18 + 3 * 1 + 4 * 4


def test_with_states_each_choice_computes_the_prompt_and_none_waits_for_another() -> None:
    requests = choices(4, prompt=18, max_tokens=5)
    run = Run(make_capacity(64)._replace(has_states=True)).submit(*requests)
    run.step()
    assert run.scheduler.snapshot().num_running >= 3  # of 64 tokens in a step
    run.to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
    assert run.executor.num_computed_tokens == 4 * (18 + 4)


def test_choices_hold_the_prompt_blocks_once() -> None:
    run = Run(make_capacity(64)).submit(*choices(5, prompt=20, max_tokens=30))
    for _ in range(3):
        run.step()
    assert len(run.scheduler.running) == 5
    assert run.scheduler.kv.pools[0].num_held <= 4 + 5 * 3


@OVERLAP
def test_the_first_choice_may_end_at_any_time(max_in_flight: int) -> None:
    for steps in range(8):
        requests = choices(3, prompt=15)
        run = Run(make_capacity(64), max_in_flight=max_in_flight, budget=5).submit(*requests)
        for _ in range(steps):
            run.step()
        run.cancel(1)
        run.to_end()
        for request in requests[1:]:
            assert run.outputs[request.uid] == expected_output(request)


def test_choices_that_wait_for_the_prompt_are_deferred_and_what_waits_for_a_slot_is_not() -> None:
    run = Run(make_capacity(64, max_num_seqs=1), budget=5).submit(*choices(3, prompt=15), make_request(9))
    run.step()
    snapshot = run.scheduler.snapshot()
    assert (snapshot.num_waiting, snapshot.num_deferred) == (3, 2)
    run.to_end()
    assert run.scheduler.snapshot().num_deferred == 0


def test_choices_that_wait_for_the_prompt_can_be_cancelled() -> None:
    run = Run(make_capacity(64), budget=5).submit(*choices(3, prompt=15))
    run.step()
    run.cancel(2)
    run.to_end()
    assert run.finished[2][0] == "abort"
    assert run.outputs[3] == expected_output(choices(3, prompt=15)[2])


@OVERLAP
def test_choices_survive_preemption(max_in_flight: int) -> None:
    requests = choices(6, prompt=18, max_tokens=30)
    run = Run(make_capacity(20), max_in_flight=max_in_flight).submit(*requests).to_end()
    assert run.scheduler.stats.num_preemptions > 0
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


@OVERLAP
def test_when_the_first_choice_ends_another_one_computes_the_prompt_for_all(max_in_flight: int) -> None:
    """Cancelled before its prompt was computed: the others still cost one prompt, with nothing to find in the cache."""
    requests = choices(5, prompt=40, max_tokens=6)
    run = Run(make_capacity(64), max_in_flight=max_in_flight, budget=8, prefix_caching=False).submit(*requests)
    run.step()
    run.cancel(1)
    before = run.executor.num_computed_tokens
    run.to_end()
    assert run.executor.num_computed_tokens - before <= 40 + 8 * max_in_flight + 3 * 1 + 4 * 6
    assert {uid: run.outputs[uid] for uid in range(2, 6)} == {r.uid: expected_output(r) for r in requests[1:]}


def test_the_other_choices_ask_nothing_about_the_prompt_that_they_share() -> None:
    params = SamplingParams(n=3, temperature=1.0, prompt_logprobs=5, logprobs=2)
    assert of_choice(params, 0) is params
    assert of_choice(params, 1) == SamplingParams(n=3, temperature=1.0, logprobs=2)


def test_choices_of_one_token_each_find_the_prompt_of_the_first_though_it_has_ended() -> None:
    """With log-probabilities of the prompt, which the first choice alone is asked for, it was computed n times."""
    ids = [token % 97 for token in range(41)]
    requests = [
        replace(
            make_request(uid, ids, 1, seed=uid, fork_of=None if uid == 1 else 1),
            choice=uid - 1,
            params=of_choice(SamplingParams(prompt_logprobs=0), uid - 1),
        )
        for uid in range(1, 17)
    ]
    run = Run(make_capacity(64, max_num_seqs=16)).submit(*requests).to_end()
    assert run.executor.num_computed_tokens == 41 + 15 * 1


@OVERLAP
@pytest.mark.parametrize("steps", [0, 1])
def test_when_the_first_choice_ends_another_one_tells_the_log_probabilities_of_the_prompt(
    max_in_flight: int, steps: int
) -> None:
    params = SamplingParams(prompt_logprobs=0)
    requests = [
        replace(request, params=of_choice(params, place)) for place, request in enumerate(choices(3, prompt=40))
    ]
    run = Run(make_capacity(64), max_in_flight=max_in_flight, budget=8).submit(*requests)
    for _ in range(steps):
        run.step()
    run.cancel(1)
    run.to_end()
    assert {uid: len(rows) for uid, rows in run.prompt_logprobs.items()} == {2: 39}
    assert {uid: run.outputs[uid] for uid in (2, 3)} == {r.uid: expected_output(r) for r in requests[1:]}


def test_prompt_tokens_whose_logits_are_wanted_take_twice_of_the_budget() -> None:
    run = Run(make_capacity(64), budget=32)
    run.submit(make_request(1, prompt=100, prompt_logprobs=5)).step()
    assert run.scheduler.sequences[1].num_computed == 16
