"""Steps run on one CPU thread or on all, by what has been faster; short ones always on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferengine.executor.cpu_step import LAST_TRIAL, Threads
from inferengine.layers.decoder_config import DecoderConfig

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_threads(fixed: int = 0, num_layers: int = 6) -> Threads:
    config = DecoderConfig(
        model_type="llama", vocab_size=4096, hidden_size=384, intermediate_size=1024, num_layers=num_layers,
        num_heads=6, num_kv_heads=2, head_dim=64, max_position=2048, norm_eps=1e-5, windows=(None,) * num_layers,
        attention_scale=0.125,
    )  # fmt: skip
    return Threads(config, fixed)


def run(threads: Threads, num_steps: int, seconds: dict[int, float], num_tokens: int = 32) -> list[int]:
    """Run steps that take `seconds[number of threads]`. Returns the numbers chosen."""
    chosen = []
    for _ in range(num_steps):
        threads.prepare(num_tokens)
        chosen.append(torch.get_num_threads())
        threads.observe(num_tokens, seconds[chosen[-1]])
    return chosen


def test_a_step_of_one_token_of_a_tiny_model_runs_on_one():
    assert set(run(make_threads(num_layers=2), 50, {1: 0.003, 2: 0.001}, num_tokens=1)) == {1}


def test_a_trial_that_loses_much_is_followed_by_a_long_pause():
    assert run(make_threads(), 600, {1: 0.004, 2: 0.064}).count(2) == 1


def test_a_trial_that_loses_little_is_repeated():
    assert run(make_threads(), 600, {1: 0.004, 2: 0.0042}).count(2) > 3


def test_one_slow_step_of_the_better_choice_is_soon_forgiven():
    threads = make_threads()
    run(threads, 3000, {1: 0.016, 2: 0.012})
    run(threads, 1, {1: 0.016, 2: 0.1})
    assert run(threads, 150, {1: 0.016, 2: 0.012})[-1] == 2


def test_the_faster_number_is_used_all_but_seldom():
    idle, busy = {1: 0.016, 2: 0.012}, {1: 0.016, 2: 0.4}
    assert run(make_threads(), 1000, idle).count(1) <= 8
    assert run(make_threads(), 1000, busy).count(2) <= 8


def test_one_slow_step_is_enough_to_turn_away():
    threads = make_threads()
    run(threads, 100, {1: 0.016, 2: 0.012})
    assert run(threads, 12, {1: 0.016, 2: 0.4}).count(2) <= 1


def test_a_machine_that_has_calmed_down_is_noticed():
    threads = make_threads()
    run(threads, 500, {1: 0.016, 2: 0.4})
    assert run(threads, LAST_TRIAL + 100, {1: 0.016, 2: 0.012})[-1] == 2


def test_sizes_are_judged_apart():
    threads = make_threads()
    run(threads, 100, {1: 0.016, 2: 0.4}, num_tokens=32)
    assert run(threads, 100, {1: 0.2, 2: 0.1}, num_tokens=512)[-1] == 2


def test_the_configuration_has_the_last_word():
    assert set(run(make_threads(fixed=2), 20, {1: 0.1, 2: 0.4}, num_tokens=1)) == {2}
    assert set(run(make_threads(fixed=1), 20, {1: 0.1, 2: 0.01}, num_tokens=512)) == {1}
