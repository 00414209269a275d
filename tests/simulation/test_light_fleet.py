"""Light engines: what they share with the engine's own scheduler, and fleets of them under deaths."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from inferengine.client.load_balancing import BOUNDARIES
from inferengine.simulation.fleet import LEASE_S, Failure, Fleet
from inferengine.simulation.light_engine import LightEngine, PartCache
from inferengine.simulation.light_fleet import CHOICES, LightFleet, deaths, summary
from inferengine.simulation.policies import COMPARED, CacheAware
from inferengine.simulation.report import RunRecorder
from inferengine.simulation.traces import TRACES, Trace, TraceRequest, WrittenTrace
from inferengine.simulation.virtual_engine import EngineOptions
from tests.simulation.builders import make_options


def options() -> EngineOptions:
    """Return options of engines that serve the traces' prompts."""
    made = make_options(num_blocks=6000, max_num_seqs=32, budget=2048)
    return made._replace(limits=made.limits.__class__(1 << 20, 96_000, 10_000, 10**9))


def make_trace(name: str, *, num_engines: int = 2, load: float = 0.1, seed: int = 0) -> Trace:
    return Trace(TRACES[name], num_engines=num_engines, duration_s=20.0, load=load, seed=seed)


def all_requests(trace: Trace) -> list[TraceRequest]:
    """Return every request, if each is answered at once."""
    found: list[TraceRequest] = []
    for request in trace.arrivals():
        following: TraceRequest | None = request
        while following is not None:
            found.append(following)
            following = trace.follow_up(following, following.arrival_s)
    return found


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_its_seed(name: str) -> None:
    one, same, other = (all_requests(make_trace(name, seed=seed)) for seed in (1, 1, 2))
    assert [request[:4] for request in one] == [request[:4] for request in same]
    assert [request.chain for request in one] != [request.chain for request in other]


@pytest.mark.parametrize("name", TRACES)
def test_chains_tokens_and_keys_agree_on_what_two_prompts_share(name: str) -> None:
    requests = all_requests(make_trace(name))[:60]
    for one, other in pairwise(requests):
        shared = 0
        for part, its in zip(one.chain, other.chain, strict=False):
            if part != its:
                break
            shared += part[1]
        ids = [request.arrival().prompt_ids for request in (one, other)]
        assert ids[0][:shared] == ids[1][:shared]
        assert len(ids[0]) == one.prompt.num_tokens
        common = sum(key == its for key, its in zip(one.prompt.keys, other.prompt.keys, strict=False))
        assert common == sum(boundary <= shared for boundary in BOUNDARIES)


@pytest.mark.parametrize("name", TRACES)
def test_a_light_engine_is_near_the_engines_own_scheduler(name: str) -> None:
    load = 8.0 if name == "batch" else 0.1
    light = LightFleet(options(), make_trace(name, num_engines=1, load=load), num_engines=1)
    light.run()
    recorder = RunRecorder()
    report = Fleet(options(), WrittenTrace(make_trace(name, num_engines=1, load=load)), recorder=recorder).run()
    found = summary(light, begin_s=0.0)
    assert found["ended"] == found["submitted"]
    assert found["submitted"] == pytest.approx(recorder.num_submitted, rel=0.02)
    assert found["hit_rate"] == pytest.approx(report["engine"]["prefix_hit_rate"], abs=0.05)
    assert found["total_ms"]["p50"] == pytest.approx(report["latency_ms"]["end_to_end"]["p50"], rel=0.1)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_request_ends_once_whatever_the_policy(choice: str) -> None:
    fleet = LightFleet(options(), make_trace("chat", num_engines=5), num_engines=5, choice=choice, num_front_ends=2)
    fleet.run()
    assert len(fleet.records) == fleet.num_submitted > 20
    assert not any(host.engine.num_requests for host in fleet.hosts)


@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_any_moment_leave_exactly_one_end_each(seed: int) -> None:
    generator = random.Random(seed)
    failures = [
        Failure(generator.uniform(0.0, 20.0), generator.randrange(4), generator.uniform(0.1, 15.0)) for _ in range(12)
    ]
    fleet = LightFleet(
        options(), make_trace("agents", num_engines=4, load=0.5, seed=seed), num_engines=4, failures=failures
    )
    fleet.run()
    assert len(fleet.records) == fleet.num_submitted
    assert not any(host.engine.num_requests for host in fleet.hosts)
    assert any(record.is_interrupted for record in fleet.records)


def test_a_request_of_a_dead_engine_goes_on_elsewhere_after_the_lease() -> None:
    failures = [Failure(time_s, 0) for time_s in (10.0,)]
    fleet = LightFleet(options(), make_trace("chat"), num_engines=2, failures=failures)
    fleet.run()
    interrupted = [record for record in fleet.records if record.is_interrupted]
    assert interrupted
    assert all(record.total_s > LEASE_S for record in interrupted)
    assert fleet.hosts[0].engine.num_prompt_tokens == 0  # a new one, which was never asked


def test_deaths_are_the_named_share_of_engines_each_minute() -> None:
    failures = deaths(1000, 120.0, share_per_minute=0.01, restart_s=60.0, seed=0)
    assert len(failures) == 20
    assert all(0 < failure.time_s < 120 for failure in failures)


def test_parts_are_known_when_they_are_computed_and_go_when_room_is_needed() -> None:
    cache = PartCache(100)
    first, second, third = ((1, 40), (2, 20)), ((1, 40), (3, 10)), ((4, 60),)
    assert cache.take(first, 5)
    assert cache.num_known(first) == 0
    cache.computed(first, 0, 50)
    assert cache.num_known(second) == 40
    cache.computed(first, 50, 60)
    assert cache.num_known(first) == 60
    assert cache.take(second, 5)
    assert not cache.take(third, 5)  # all that is there is in use
    cache.give(first, 11, 5)
    assert not cache.take(third, 5)
    cache.give(second, 13, 5)
    assert cache.take(third, 5)
    assert cache.num_known(first) <= 40


def test_the_published_policy_follows_the_tree_until_the_loads_are_unequal() -> None:
    fleet = LightFleet(options(), make_trace("chat"), num_engines=2)
    policy = CacheAware(random.Random(0), balance_abs_threshold=4)
    loads, prompt = fleet.balancers[0].loads, all_requests(make_trace("rag"))[0].prompt
    engines = [policy.pick(loads, loads.available, prompt).engine for _ in range(6)]
    assert engines == [engines[0]] * 5 + [1 - engines[0]]


def hit_rate(choice: str, **options_: object) -> float:
    """Return the hit rate of conversations with pauses, through four front ends."""
    trace = make_trace("agents", num_engines=24, load=0.4)
    fleet = LightFleet(options(), trace, num_engines=24, choice=choice, num_front_ends=4, **options_)  # type: ignore[arg-type]
    fleet.run()
    found: float = summary(fleet, begin_s=0.0)["hit_rate"]
    return found


def test_front_ends_that_are_told_of_each_others_requests_find_what_is_cached() -> None:
    assert hit_rate("prefix_affinity") > hit_rate("prefix_affinity", tells_placements=False) + 0.05


def test_sessions_that_are_named_are_found_without_looking_at_prompts() -> None:
    assert hit_rate("power_of_two", names_sessions=True) > hit_rate("power_of_two") + 0.2


def test_policies_of_others_are_not_offered_to_users() -> None:
    assert set(COMPARED) - {"random", "least_loaded", "cache_aware"} == {
        "round_robin",
        "power_of_two",
        "prefix_affinity",
    }


def test_a_light_engine_without_work_asks_for_nothing() -> None:
    engine = LightEngine(options())
    assert engine.step_end(1.0) is None
    assert engine.num_requests == 0
