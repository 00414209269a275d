"""n > 1: the choices share the prompt's blocks, the last of them by copy on write."""

from __future__ import annotations

import pytest

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


def test_choices_hold_the_prompt_blocks_once() -> None:
    run = Run(make_capacity(64)).submit(*choices(5, prompt=20, max_tokens=30))
    for _ in range(3):
        run.step()
    assert len(run.scheduler.running) == 5
    assert run.scheduler.kv.pools[0].num_held <= 4 + 5 * 3


@OVERLAP
def test_the_first_choice_may_go_at_any_time(max_in_flight: int) -> None:
    for steps in range(8):
        requests = choices(3, prompt=15)
        run = Run(make_capacity(64), max_in_flight=max_in_flight, budget=5).submit(*requests)
        for _ in range(steps):
            run.step()
        run.cancel(1)
        run.to_end()
        for request in requests[1:]:
            assert run.outputs[request.uid] == expected_output(request)


def test_choices_that_wait_for_the_prompt_can_be_cancelled() -> None:
    run = Run(make_capacity(64), budget=5).submit(*choices(3, prompt=15))
    run.step()
    run.cancel(2)
    run.to_end()
    assert run.finished[2][0] == "abort"
    assert run.outputs[3] == expected_output(choices(3, prompt=15)[2])


@OVERLAP
def test_choices_survive_pressure(max_in_flight: int) -> None:
    requests = choices(6, prompt=18, max_tokens=30)
    run = Run(make_capacity(20), max_in_flight=max_in_flight).submit(*requests).to_end()
    assert run.scheduler.stats.num_preemptions > 0
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
