"""requests_per_minute: how many are admitted, and when a refused one is told to come again."""

from __future__ import annotations

import random

import pytest

from frontends.common.auth import WINDOW_S, ApiKey, Quotas
from frontends.common.errors import retry_after
from inferengine.errors import InferEngineError


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def wait_of(quotas: Quotas, key: ApiKey) -> int | None:
    """Return Retry-After of a request that is refused, None for one that is admitted."""
    try:
        with quotas.request(key):
            return None
    except InferEngineError as error:
        return int(retry_after(error) or 0)


@pytest.mark.parametrize("limit", [1, 2, 7, 60, 600])
@pytest.mark.parametrize("began_s", [0.0, 1.5, 59.9, 60.0, 1234.56])
def test_after_a_burst_the_next_request_is_admitted_at_the_time_told_and_no_second_sooner(
    limit: int, began_s: float
) -> None:
    clock, key = Clock(began_s), ApiKey("a", requests_per_minute=limit)
    quotas = Quotas([key], clock=clock)
    assert [wait_of(quotas, key) for _ in range(limit)] == [None] * limit
    wait = wait_of(quotas, key)
    assert wait is not None
    assert 1 <= wait <= 60, "OpenAI's SDK does not wait longer"
    clock.now = began_s + wait - 1.001
    assert wait_of(quotas, key) is not None
    clock.now = began_s + wait
    assert wait_of(quotas, key) is None


@pytest.mark.parametrize(("limit", "lines"), [(1, 1), (9, 9), (10, 9), (60, 54), (0, 100)])
def test_what_can_wait_leaves_a_tenth_of_the_rate_to_the_others(limit: int, lines: int) -> None:
    clock, key = Clock(), ApiKey("a", requests_per_minute=limit)
    quotas = Quotas([key], clock=clock)
    assert sum(quotas.try_charge(key) for _ in range(100)) == lines
    assert quotas.in_flight(key) == 0
    assert [wait_of(quotas, key) for _ in range(limit - lines)] == [None] * (limit - lines)
    assert (wait_of(quotas, key) is None) is (limit == 0)
    clock.now += 60.0
    assert quotas.try_charge(key)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_comes_again_when_told_is_admitted_whatever_came_before(seed: int) -> None:
    draw = random.Random(seed)
    clock, key = Clock(draw.uniform(0, 200)), ApiKey("a", requests_per_minute=draw.choice([1, 3, 10, 100]))
    quotas = Quotas([key], num_workers=3, clock=clock)
    for _ in range(60):
        clock.now += draw.choice([0.0, 0.01, draw.expovariate(key.requests_per_minute / 30), draw.uniform(0, 130)])
        quotas._worker = draw.randrange(3)  # as its requests arrive at any of them
        wait = wait_of(quotas, key)
        if wait is not None:
            clock.now += wait
            assert wait_of(quotas, key) is None


@pytest.mark.parametrize("seed", range(10))
def test_several_that_wait_are_all_admitted_when_they_were_told(seed: int) -> None:
    """As many clients as the limit, refused at any time: none is refused twice."""
    draw = random.Random(seed)
    clock, key = Clock(), ApiKey("a", requests_per_minute=20)
    quotas = Quotas([key], clock=clock)
    for _ in range(20):
        clock.now += draw.uniform(0, 2.5)
        assert wait_of(quotas, key) is None
    due = []
    for _ in range(20):
        if (wait := wait_of(quotas, key)) is not None:
            due.append(clock.now + wait)
        clock.now += draw.uniform(0, 0.2)
    assert len(due) > 10
    for when in sorted(due):
        clock.now = max(clock.now, when)
        assert wait_of(quotas, key) is None


@pytest.mark.parametrize("seed", range(10))
def test_no_minute_has_more_requests_than_the_limit_and_none_is_refused_below_it(seed: int) -> None:
    draw = random.Random(seed)
    clock, key = Clock(), ApiKey("a", requests_per_minute=30)
    quotas = Quotas([key], num_workers=2, clock=clock)
    admitted: list[float] = []
    for _ in range(2000):
        clock.now += draw.expovariate(1.0)
        quotas._worker = draw.randrange(2)
        last_minute = sum(int(when) > int(clock.now) - WINDOW_S for when in admitted)
        if wait_of(quotas, key) is None:
            admitted.append(clock.now)
            assert last_minute < 30
        else:
            assert last_minute == 30
    assert len(admitted) > 900
