"""How many engines a fleet needs."""

from __future__ import annotations

import random

import pytest

from inferengine.fleet.scaling import LOWER_AFTER_S, RAISE_AFTER_S, Load, ScalingPolicy


def make_policy(*, least: int = 1, most: int = 8, queue: float = 4.0, first_token_ms: float = 0.0) -> ScalingPolicy:
    return ScalingPolicy(least, most, queue, first_token_ms)


def after(policy: ScalingPolicy, seconds: float, loads: list[Load], wanted: int) -> int:
    """Return what is wanted after so many seconds of this load, asked once a second."""
    for second in range(int(seconds) + 1):
        wanted = policy.wanted(float(second), loads, wanted)
    return wanted


def test_a_queue_above_its_target_raises_the_fleet_in_proportion_after_a_while() -> None:
    loads = [Load(running=64, waiting=6)] * 2
    assert after(make_policy(), RAISE_AFTER_S - 1, loads, 2) == 2
    assert after(make_policy(), RAISE_AFTER_S, loads, 2) == 3


def test_a_fleet_at_most_doubles_and_keeps_its_bound() -> None:
    loads = [Load(waiting=1000)] * 3
    assert after(make_policy(), RAISE_AFTER_S, loads, 3) == 6
    assert after(make_policy(most=4), RAISE_AFTER_S, loads, 3) == 4


def test_a_slow_first_token_raises_the_fleet_though_nothing_waits() -> None:
    loads = [Load(running=4, first_token_s=0.2), Load(running=9, first_token_s=0.9)]
    assert after(make_policy(first_token_ms=500), RAISE_AFTER_S, loads, 2) == 4
    assert after(make_policy(), RAISE_AFTER_S, loads, 2) == 2


def test_nothing_is_added_before_what_was_added_serves() -> None:
    assert after(make_policy(), 10 * RAISE_AFTER_S, [Load(waiting=100)], 2) == 2


def test_a_short_queue_changes_nothing() -> None:
    policy = make_policy()
    for second in range(60):
        loads = [Load(waiting=100 if second % 10 < 5 else 0, kv_usage=0.9)]
        assert policy.wanted(float(second), loads, 1) == 1


def test_a_fleet_with_room_loses_one_engine_after_a_long_while() -> None:
    loads = [Load(running=1, kv_usage=0.1)] * 3
    assert after(make_policy(), LOWER_AFTER_S - 1, loads, 3) == 3
    assert after(make_policy(), LOWER_AFTER_S, loads, 3) == 2


@pytest.mark.parametrize("load", [Load(kv_usage=0.4), Load(waiting=2), Load(first_token_s=0.4)])
def test_a_fleet_stays_where_one_engine_fewer_would_not_do(load: Load) -> None:
    assert after(make_policy(first_token_ms=500), 3 * LOWER_AFTER_S, [load] * 3, 3) == 3


def test_the_bounds_hold_at_once() -> None:
    assert make_policy(least=3).wanted(0.0, [Load()], 1) == 3
    assert make_policy(most=3).wanted(0.0, [Load()] * 5, 5) == 3


@pytest.mark.parametrize("seed", range(10))
def test_under_any_load_the_number_stays_within_its_bounds_and_moves_by_steps(seed: int) -> None:
    generator = random.Random(seed)
    policy, wanted = make_policy(least=2, most=6, first_token_ms=300), 2
    for second in range(0, 4000, 2):
        busy = generator.random() if second % 500 < 250 else 0.0
        loads = [Load(int(busy * 64), int(busy * 12), busy, busy) for _ in range(generator.randint(1, wanted))]
        before, wanted = wanted, policy.wanted(float(second), loads, wanted)
        assert 2 <= wanted <= 6
        assert before - 1 <= wanted <= 2 * before
