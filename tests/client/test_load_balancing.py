"""Choosing an engine: by load, by prefix, never by one that is away, and within the load bound."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from inferengine.client import load_balancing
from inferengine.client.load_balancing import (
    AFFINITY_TOKENS,
    BOUNDARIES,
    LOAD_FACTOR,
    LOAD_FLOOR,
    POLICIES,
    LoadBalancer,
    PrefixAffinity,
    make_prompt,
    mix,
    prefix_key,
    remembered_beginnings,
    session_key,
)


def make_balancer(policy: str, num_engines: int, seed: int = 0) -> LoadBalancer:
    return LoadBalancer([f"engine-{i}" for i in range(num_engines)], policy, generator=random.Random(seed))


def choose(balancer: LoadBalancer, prompt: Sequence[int] = (), salt: bytes = b"", avoid: Sequence[int] = ()) -> int:
    """Return the chosen engine; there is one."""
    choice = balancer.choose(prompt, salt, avoid=avoid)
    assert choice is not None
    return choice.engine


def choose_for_prompts(balancer: LoadBalancer, prompts: list[array[int]]) -> list[int]:
    """Return the engines of requests that come one after the other; nothing ends, nobody reports."""
    chosen: list[int] = []
    for prompt in prompts:
        engine = choose(balancer, prompt)
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
    assert choose(balancer) == 1
    balancer.loads.report(1, waiting_tokens=100, num_requests=0)
    assert choose(balancer) == 1


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
    engines = {choose(balancer, beginning + tail) for tail in make_prompts(50, seed=3)}
    assert len(engines) == 1


def test_affinity_keeps_salts_apart() -> None:
    balancer = make_balancer("prefix_affinity", 64)
    prompt = make_prompts(1)[0]
    assert len({choose(balancer, prompt, salt) for salt in (b"", b"a", b"b", b"ab")}) > 1
    assert prefix_key(prompt, b"") != prefix_key(prompt, b"a")


def test_affinity_moves_only_the_prefixes_of_the_engine_that_left() -> None:
    balancer = make_balancer("prefix_affinity", 10)
    prompts = make_prompts(500)
    before = [choose(balancer, prompt) for prompt in prompts]
    balancer.loads.set_available([engine for engine in range(10) if engine != 4])
    after = [choose(balancer, prompt) for prompt in prompts]
    assert all(new == old for new, old in zip(after, before, strict=True) if old != 4)
    assert 4 not in after
    balancer.loads.set_available(range(10))
    assert [choose(balancer, prompt) for prompt in prompts] == before


def test_homes_are_spread_evenly() -> None:
    """With NUM_PROBES probes no engine is the home of much more than its share."""
    balancer = make_balancer("prefix_affinity", 10)
    counts = Counter(choose(balancer, prompt) for prompt in make_prompts(5000))
    assert all(0.75 < counts[engine] / 500 < 1.25 for engine in range(10))


def test_a_conversation_stays_at_its_engine_though_all_share_a_system_prompt() -> None:
    balancer = make_balancer("prefix_affinity", 16)
    system = make_prompts(1, length=400)[0]
    turns = [system + question for question in make_prompts(48, seed=9, length=100)]
    answer = make_prompts(1, seed=99, length=300)[0]
    homes = choose_for_prompts(balancer, turns)
    assert len(set(homes)) > 8
    for engine in range(16):
        balancer.loads.report(engine, waiting_tokens=0, num_requests=0)  # all are answered
    assert [choose(balancer, turn + answer) for turn in turns] == homes


def test_a_popular_document_is_read_at_several_engines_and_others_at_one() -> None:
    balancer = make_balancer("prefix_affinity", 32)
    popular, *others = make_prompts(9, length=3000)
    questions = make_prompts(320, seed=2, length=50)
    asked = [popular + question for question in questions[:256]]
    asked += [others[place % 8] + question for place, question in enumerate(questions[256:])]
    random.Random(4).shuffle(asked)
    readers: dict[int, set[int]] = {}
    for prompt, engine in zip(asked, choose_for_prompts(balancer, asked), strict=True):
        readers.setdefault(prompt[0], set()).add(engine)
    assert len(readers[popular[0]]) > 8
    assert sum(len(readers[other[0]]) for other in others) <= 24


def test_a_known_beginning_is_left_where_more_waits_than_it_saves() -> None:
    balancer = make_balancer("prefix_affinity", 2)
    prompt = make_prompts(1, length=1024)[0]
    home = choose(balancer, prompt)
    balancer.loads.report(home, waiting_tokens=500, num_requests=1)
    assert choose(balancer, prompt) == home
    balancer.loads.report(home, waiting_tokens=100_000, num_requests=1)
    assert choose(balancer, prompt) == 1 - home


def test_a_choice_says_how_many_tokens_are_to_be_computed() -> None:
    balancer = make_balancer("prefix_affinity", 4)
    prompt, tail = make_prompts(2, length=1000)
    assert [
        choice.num_new_tokens for choice in (balancer.choose(prompt), balancer.choose(prompt + tail)) if choice
    ] == [
        1000 - AFFINITY_TOKENS,  # every front end expects an unknown prompt at its home
        2000 - 960,  # the last boundary within the first 1,000
    ]


def test_prompts_have_keys_for_the_beginnings_that_they_share() -> None:
    one, other = make_prompts(2, length=1000)
    first, second = make_prompt(one + other, b""), make_prompt(one + one, b"")
    shared = sum(boundary <= 1000 for boundary in BOUNDARIES)
    assert first.keys[:shared] == second.keys[:shared]
    assert not set(first.keys[shared:]) & set(second.keys[shared:])
    assert not set(first.keys) & set(make_prompt(one + other, b"salt").keys)


def test_remembered_beginnings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancing, "REMEMBERED_BEGINNINGS", 50)
    policy = PrefixAffinity(random.Random(0))
    balancer = LoadBalancer([f"engine-{i}" for i in range(4)], policy)
    for prompt in make_prompts(200, length=300):
        choose(balancer, prompt)
    assert len(policy._engines) == 50


@pytest.mark.parametrize("num_engines", [1, 2, 3, 10, 100])
def test_affinity_never_exceeds_the_load_bound(num_engines: int) -> None:
    """Everybody has the same prefix: without the bound one engine would get it all."""
    balancer = make_balancer("prefix_affinity", num_engines)
    prompt = make_prompts(1)[0]
    loads: Counter[int] = Counter()
    for number in range(1, 400):
        engine = choose(balancer, prompt)
        balancer.loads.sent(engine, len(prompt))
        loads[engine] += 1
        assert max(loads.values()) <= max(LOAD_FLOOR, math.ceil(LOAD_FACTOR * number / num_engines))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_away_or_refused_is_not_chosen(policy: str) -> None:
    balancer = make_balancer(policy, 4)
    balancer.loads.set_available([0, 2, 3])
    assert {choose(balancer, prompt, avoid=[0]) for prompt in make_prompts(100)} == {2, 3}
    assert balancer.choose(avoid={0, 2, 3}) is None
    balancer.loads.set_available(())
    assert balancer.choose() is None


def engines_of_session(balancer: LoadBalancer, count: int, *, avoid: Sequence[int] = ()) -> list[int]:
    """Return the engines of requests of one session, whose prompts have nothing in common."""
    key = session_key("a conversation")
    choices = [balancer.choose(prompt, session=key, avoid=avoid) for prompt in make_prompts(count, length=300)]
    return [choice.engine for choice in choices if choice is not None]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_stays_at_its_engine(policy: str) -> None:
    assert len(set(engines_of_session(make_balancer(policy, 16), 20))) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hindrance", ["away", "refused", "full", "long queue"])
def test_a_session_whose_engine_cannot_take_it_moves_and_stays_there(policy: str, hindrance: str) -> None:
    balancer = make_balancer(policy, 4)
    (first,) = engines_of_session(balancer, 1)
    avoid: list[int] = []
    if hindrance == "away":
        balancer.loads.set_available([engine for engine in range(4) if engine != first])
    elif hindrance == "refused":
        avoid = [first]
    elif hindrance == "full":
        balancer.loads.report(first, 0, LOAD_FLOOR)
    else:
        balancer.loads.report(first, 100_000, 1)
    (second,) = engines_of_session(balancer, 1, avoid=avoid)
    balancer.loads.set_available(range(4))
    balancer.loads.report(first, 0, 0)
    assert second != first
    assert set(engines_of_session(balancer, 10)) == {second}


def test_sessions_never_exceed_the_load_bound() -> None:
    """Everything is one session: without the bound one engine would get it all."""
    balancer = make_balancer("power_of_two", 10)
    loads: Counter[int] = Counter()
    for number in range(1, 400):
        choice = balancer.choose([1] * 8, session=7)
        assert choice is not None
        balancer.loads.sent(choice.engine, 0)
        loads[choice.engine] += 1
        assert max(loads.values()) <= max(LOAD_FLOOR, math.ceil(LOAD_FACTOR * number / 10))


def test_tenants_sessions_of_one_name_are_apart() -> None:
    names = [("s", ""), ("s", "acme"), ("s", "other"), ("acmes", ""), ("es", "acm")]
    assert len({session_key(*name) for name in names}) == len(names)
    assert session_key("", "acme") is None


def test_remembered_sessions_are_bounded_and_the_latest_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancing, "REMEMBERED_SESSIONS", 50)
    balancer = make_balancer("round_robin", 64)
    first = [balancer.choose(session=key) for key in range(60)]
    assert len(balancer._sessions._engines) == 50
    assert [balancer.choose(session=key) for key in range(10, 60)] == first[10:]


def test_a_front_end_goes_where_another_sent_the_beginning() -> None:
    """That one sent a document to an engine that is not its home."""
    one, informed, ignorant = (make_balancer("prefix_affinity", 16, seed) for seed in (1, 2, 3))
    document, question = make_prompts(2, length=3000)
    home = choose(one, document)
    engine = choose(one, document, avoid=[home])
    informed.learn(engine, remembered_beginnings(make_prompt(document, b"").keys), ())
    assert choose(informed, document + question) == engine
    assert choose(ignorant, document + question) == home


def test_a_front_end_goes_where_another_sent_the_session() -> None:
    one, other = (make_balancer("power_of_two", 64, seed) for seed in (1, 2))
    (engine,) = engines_of_session(one, 1)
    key = session_key("a conversation")
    assert key is not None
    other.learn(engine, (), [key])
    assert set(engines_of_session(other, 5)) == {engine}


def test_what_is_learnt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancing, "REMEMBERED_BEGINNINGS", 50)
    policy = PrefixAffinity(random.Random(0))
    balancer = LoadBalancer(["one", "other"], policy)
    balancer.learn(1, range(200), ())
    assert len(policy._engines) == 50


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
