"""Choosing an engine: by load, by prefix, never by one that is away, and within the load bound."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter

import pytest

from inferengine.client.load_balancing import LOAD_FACTOR, POLICIES, LoadBalancer, mix, prefix_key


def make_balancer(policy: str, num_engines: int, seed: int = 0) -> LoadBalancer:
    return LoadBalancer([f"engine-{i}" for i in range(num_engines)], policy, generator=random.Random(seed))


def choose_for_prompts(balancer: LoadBalancer, prompts: list[array[int]]) -> list[int]:
    """Requests that come one after the other; nothing ends, nobody reports."""
    chosen: list[int] = []
    for prompt in prompts:
        engine = balancer.choose(prompt)
        assert engine is not None
        balancer.loads.sent(engine, len(prompt))
        chosen.append(engine)
    return chosen


def make_prompts(count: int, seed: int = 1, length: int = 32) -> list[array[int]]:
    generator = random.Random(seed)
    return [array("I", (generator.randrange(1 << 20) for _ in range(length))) for _ in range(count)]


def test_round_robin_gives_every_engine_the_same_number() -> None:
    chosen = choose_for_prompts(make_balancer("round_robin", 7), make_prompts(70))
    assert set(Counter(chosen).values()) == {10}


def test_power_of_two_prefers_fewer_waiting_tokens_and_then_fewer_requests() -> None:
    balancer = make_balancer("power_of_two", 2)
    balancer.loads.report(0, waiting_tokens=100, num_requests=1)
    balancer.loads.report(1, waiting_tokens=99, num_requests=50)
    assert balancer.choose() == 1
    balancer.loads.report(1, waiting_tokens=100, num_requests=0)
    assert balancer.choose() == 1


def test_power_of_two_counts_what_it_sent_since_the_last_status() -> None:
    chosen = choose_for_prompts(make_balancer("power_of_two", 2), make_prompts(100))
    assert Counter(chosen) == {0: 50, 1: 50}


def test_power_of_two_keeps_the_largest_queue_near_the_average() -> None:
    """The theorem: one choice at random leaves log n / log log n above the average, two leave log log n."""
    count = 1000
    most = max(
        Counter(choose_for_prompts(make_balancer("power_of_two", count), make_prompts(count, length=4))).values()
    )
    generator = random.Random(2)
    most_of_one = max(Counter(generator.randrange(count) for _ in range(count)).values())
    assert most <= 3 < most_of_one


def test_affinity_sends_equal_beginnings_to_one_engine_while_the_load_allows() -> None:
    balancer = make_balancer("prefix_affinity", 8)
    beginning = make_prompts(1, length=256)[0]
    engines = {balancer.choose(beginning + tail) for tail in make_prompts(50, seed=3)}
    assert len(engines) == 1


def test_affinity_keeps_salts_apart() -> None:
    balancer = make_balancer("prefix_affinity", 64)
    prompt = make_prompts(1)[0]
    assert len({balancer.choose(prompt, salt) for salt in (b"", b"a", b"b", b"ab")}) > 1
    assert prefix_key(prompt, b"") != prefix_key(prompt, b"a")


def test_affinity_moves_only_the_prefixes_of_the_engine_that_left() -> None:
    balancer = make_balancer("prefix_affinity", 10)
    prompts = make_prompts(500)
    before = [balancer.choose(prompt) for prompt in prompts]
    balancer.loads.set_available([engine for engine in range(10) if engine != 4])
    after = [balancer.choose(prompt) for prompt in prompts]
    assert all(new == old for new, old in zip(after, before, strict=True) if old != 4)
    assert 4 not in after
    balancer.loads.set_available(range(10))
    assert [balancer.choose(prompt) for prompt in prompts] == before


def test_affinity_spreads_prefixes_evenly() -> None:
    balancer = make_balancer("prefix_affinity", 10)
    counts = Counter(balancer.choose(prompt) for prompt in make_prompts(5000))
    expected = 500
    assert sum((counts[engine] - expected) ** 2 / expected for engine in range(10)) < 27.9  # chi-square, p = 0.001


@pytest.mark.parametrize("num_engines", [1, 2, 3, 10, 100])
def test_affinity_never_exceeds_the_load_bound(num_engines: int) -> None:
    """Everybody has the same prefix: without the bound one engine would get it all."""
    balancer = make_balancer("prefix_affinity", num_engines)
    prompt = make_prompts(1)[0]
    loads: Counter[int] = Counter()
    for number in range(1, 400):
        engine = balancer.choose(prompt)
        assert engine is not None
        balancer.loads.sent(engine, len(prompt))
        loads[engine] += 1
        assert max(loads.values()) <= math.ceil(LOAD_FACTOR * number / num_engines)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_away_or_refused_is_not_chosen(policy: str) -> None:
    balancer = make_balancer(policy, 4)
    balancer.loads.set_available([0, 2, 3])
    assert {balancer.choose(prompt, avoid={0}) for prompt in make_prompts(100)} == {2, 3}
    assert balancer.choose(avoid={0, 2, 3}) is None
    balancer.loads.set_available(())
    assert balancer.choose() is None


def test_totals_follow_reports_and_availability() -> None:
    loads = make_balancer("prefix_affinity", 3).loads
    loads.report(0, 0, 5)
    loads.sent(1, 10)
    loads.set_available([1, 2])
    loads.report(2, 0, 7)
    loads.report(0, 0, 100)  # away: does not count
    assert loads.total_requests == 8
    loads.set_available([0, 1, 2])
    assert loads.total_requests == 108


def test_text_is_hashed_by_its_beginning() -> None:
    assert prefix_key("x" * 1024 + "one", b"") == prefix_key("x" * 1024 + "two", b"")
    assert prefix_key("one", b"") != prefix_key("two", b"")


def test_mix_changes_half_of_the_bits_for_each_bit_of_its_input() -> None:
    generator = random.Random(5)
    flips = [
        (mix(value) ^ mix(value ^ 1 << bit)).bit_count()
        for value in (generator.getrandbits(64) for _ in range(50))
        for bit in range(64)
    ]
    assert 31 < sum(flips) / len(flips) < 33
    assert min(flips) > 8
