"""Many engines behind one balancer: from one to a thousand, with skew, with shared prefixes, with deaths."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest

from inferengine.client.load_balancing import LOAD_FACTOR, LOAD_FLOOR
from inferengine.simulation.cost_model import linear_cost
from inferengine.simulation.fleet import LEASE_S, Failure, Fleet
from tests.simulation.builders import Written, make_arrival, make_options, make_workload, run


@pytest.mark.parametrize("num_engines", [1, 2, 7, 100, 1000])
def test_every_request_ends_once_whatever_the_size_of_the_fleet(num_engines: int) -> None:
    workload = make_workload(300, rate=20.0 * num_engines, output_tokens="uniform:2-12")
    report = run(Fleet(make_options(num_blocks=64), workload, num_engines=num_engines))
    assert report["requests"]["finished"] == 300
    assert report["engine"]["engines"] == num_engines


def test_more_engines_serve_proportionally_more() -> None:
    def throughput(num_engines: int) -> float:
        workload = make_workload(150 * num_engines, arrivals="at_once")
        report = run(Fleet(make_options(), workload, num_engines=num_engines, choice="round_robin"))
        return float(report["throughput"]["requests_per_s"])

    one = throughput(1)
    assert throughput(4) > 3.5 * one


def skewed_arrivals() -> Written:
    """Make every fourth request long: round robin over four engines gives them all to the same one."""
    sizes = [(1500, 60) if i % 4 == 0 else (32, 8) for i in range(240)]
    return Written(*(make_arrival(i + 1, 0.06 * i, prompt, output) for i, (prompt, output) in enumerate(sizes)))


def test_power_of_two_beats_round_robin_where_load_is_skewed() -> None:
    def p99(choice: str) -> float:
        report = run(Fleet(make_options(num_blocks=512), skewed_arrivals(), num_engines=4, choice=choice))
        return float(report["latency_ms"]["first_token"]["p99"])

    assert p99("power_of_two") < 0.5 * p99("round_robin")


def shared_prefixes(**changes: Any) -> Any:
    values = {"rate": 60.0, "num_prefixes": 24, "prefix_tokens": 256, "prompt_tokens": "uniform:16-48"}
    return make_workload(400, **{**values, **changes})


def test_prefix_affinity_raises_the_hit_rate() -> None:
    """Each engine's cache holds some of the prefixes, not all."""
    options = make_options(num_blocks=160)

    def hit_rate(choice: str) -> float:
        report = run(Fleet(options, shared_prefixes(), num_engines=8, choice=choice))
        return float(report["engine"]["prefix_hit_rate"])

    assert hit_rate("prefix_affinity") > 1.2 * hit_rate("power_of_two")


def test_prefix_affinity_holds_the_load_bound_where_all_have_one_prefix() -> None:
    workload = shared_prefixes(num_prefixes=1, arrivals="at_once")
    fleet = Fleet(make_options(max_num_seqs=64, num_blocks=512), workload, num_engines=8, choice="prefix_affinity")
    largest: list[int] = []
    assert fleet.balancer is not None
    table = fleet.balancer.loads
    sent = table.sent

    def watch(engine: int, num_prompt: int) -> None:
        sent(engine, num_prompt)
        largest.append(table.num_requests[engine])
        assert table.num_requests[engine] <= max(LOAD_FLOOR, math.ceil(LOAD_FACTOR * table.total_requests / 8))

    table.sent = watch  # type: ignore[method-assign]
    run(fleet)
    assert len(largest) == 400
    assert max(largest) > 40


def test_a_full_engine_refuses_and_another_one_takes_the_request() -> None:
    options = make_options(max_num_seqs=1, max_queued_requests=2)
    arrivals = [make_arrival(i + 1, 0.05 * i, prompt=16, output=60 if i % 4 == 0 else 2) for i in range(60)]
    alone = [item for item in arrivals if item.uid % 4 == 1]  # what round robin gives to the engine with the long ones
    refused = run(Fleet(options, Written(*alone)))["requests"]["refused"]
    assert refused["overloaded"] > 5
    fleet = Fleet(options, Written(*arrivals), num_engines=4, choice="round_robin")
    report = run(fleet)
    assert report["requests"]["refused"].get("overloaded", 0) < refused["overloaded"] / 2
    assert fleet.recorder.num_moved > 5


def test_when_an_engine_dies_its_requests_go_on_elsewhere() -> None:
    """Two slots per engine: two have begun when it dies, and go on when its lease is over; the others wait."""
    options = make_options(max_num_seqs=2)
    workload = Written(*(make_arrival(i + 1, 0.0, prompt=32, output=50) for i in range(30)))
    fleet = Fleet(options, workload, num_engines=3, choice="round_robin", failures=[Failure(0.3, 1)])
    report = run(fleet)
    assert report["requests"]["finished"] == 30
    assert report["throughput"]["output_tokens"] == 30 * 50
    assert fleet.recorder.num_moved == 10
    assert sum(total_s > LEASE_S for total_s in fleet.recorder.total_s) == 2
    assert report["engine"]["failures"] == 1


@pytest.mark.parametrize("restart_s", [0.2, 3.0])
def test_an_engine_that_comes_back_works_again(restart_s: float) -> None:
    """Sooner than anybody noticed, or later."""
    workload = make_workload(400, rate=40.0)
    failures = [Failure(time_s, engine, restart_s) for time_s, engine in ((1.0, 0), (4.5, 1), (8.0, 0))]
    fleet = Fleet(make_options(), workload, num_engines=2, failures=failures)
    report = run(fleet)
    assert report["engine"]["failures"] == 3
    assert all(host.alive for host in fleet.hosts)
    assert report["requests"]["finished"] > 350
    assert set(report["requests"]["refused"]) <= {"engine_restarted", "engine_unavailable"}


def test_when_all_engines_are_dead_requests_are_refused_not_kept() -> None:
    failures = [Failure(0.5, 0), Failure(0.5, 1)]
    report = run(Fleet(make_options(), make_workload(200, rate=50.0), num_engines=2, failures=failures))
    assert report["requests"]["refused"]["engine_unavailable"] > 100


@pytest.mark.parametrize("seed", range(6))
def test_deaths_at_any_moment_leave_exactly_one_end_each(seed: int) -> None:
    failures = [Failure(0.1 + 0.37 * i + 0.013 * seed, (i + seed) % 5, 0.05 * (i + 1)) for i in range(12)]
    workload = make_workload(300, rate=70.0, turns=3, think_s=0.2, seed=seed)
    run(Fleet(make_options(num_blocks=48), workload, num_engines=5, choice="prefix_affinity", failures=failures))


def test_each_turn_of_a_conversation_finds_the_turns_before_it_in_the_cache() -> None:
    workload = make_workload(100, rate=1.0, turns=10, think_s=0.5, prompt_tokens="64", output_tokens="48")
    report = run(Fleet(make_options(num_blocks=2000), workload))
    assert report["requests"]["finished"] == 100
    assert report["engine"]["prefix_hit_rate"] > 0.75  # of ten turns nine repeat all before them


def test_fair_share_shields_a_small_tenant_from_a_large_one() -> None:
    """What the policy is for, seen in virtual time: one tenant sends ten times what the other does."""

    def wait(policy: str) -> float:
        large = [make_arrival(i + 1, 0.0, prompt=64, output=32, tenant="large") for i in range(100)]
        small = [make_arrival(i + 1000, 0.5 + i * 0.5, prompt=64, output=32, tenant="small") for i in range(10)]
        fleet = Fleet(make_options(policy=policy), Written(*large, *small))
        waits: list[float] = []
        finished = fleet.recorder.finished

        def watch(row: Any) -> None:
            finished(row)
            if row.tenant == "small":
                waits.append(row.queued_s)

        fleet.recorder.finished = watch  # type: ignore[method-assign]
        run(fleet)
        return sum(waits) / len(waits)

    assert wait("fair") < 0.25 * wait("fcfs")


def test_a_flood_of_800_requests_holds_another_tenant_up_for_a_few_steps_and_costs_it_nothing() -> None:
    """Against first come: the single request is there before a thousandth of the flood's time has passed, and the flood
    takes no longer."""

    def times(policy: str) -> tuple[float, float]:
        flood = [make_arrival(i + 1, 0.0, prompt=32, output=128, tenant="loud") for i in range(800)]
        quiet = [make_arrival(1000 + i, 5.0 + 3.0 * i, prompt=32, output=8, tenant="quiet") for i in range(10)]
        fleet = Fleet(make_options(policy=policy, num_blocks=4000), Written(*flood, *quiet))
        waits: list[float] = []
        last = [0.0]
        finished = fleet.recorder.finished

        def watch(row: Any) -> None:
            finished(row)
            if row.tenant == "quiet":
                waits.append(row.first_token_s)
            last[0] = max(last[0], fleet.now)

        fleet.recorder.finished = watch  # type: ignore[method-assign]
        run(fleet)
        return max(waits), last[0]

    (fair_s, fair_end_s), (fcfs_s, fcfs_end_s) = times("fair"), times("fcfs")
    assert fair_s < 0.02 * fcfs_s
    assert fair_end_s < 1.05 * fcfs_end_s


def test_chunked_prefill_bounds_the_time_between_tokens() -> None:
    arrivals = [make_arrival(1, 0.0, prompt=16, output=200)]
    arrivals += [make_arrival(i + 2, 1.5 * i, prompt=1500, output=1) for i in range(5)]
    cost = linear_cost(step_s=0.005, token_s=0.0005)

    def slowest(**options: Any) -> float:
        settings = make_options(cost=cost, num_blocks=512, budget=2048, **options)
        return float(run(Fleet(settings, Written(*arrivals)))["latency_ms"]["between_tokens"]["max"])

    assert slowest(prefill_chunk=100) < 60 < 700 < slowest(chunked_prefill=False)


def test_a_simulation_leaves_no_cycles_behind() -> None:
    """The command runs without looking for them: a million requests would fill the memory."""
    workload = make_workload(60, rate=100.0, turns=2, think_s=0.1, num_prefixes=2, deadline_s=5.0)
    fleet = Fleet(make_options(), workload, num_engines=3, choice="prefix_affinity", failures=[Failure(0.2, 1, 0.1)])
    gc.collect()
    gc.disable()
    try:
        run(fleet)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("choice", ["power_of_two", "prefix_affinity"])
def test_a_tenants_flood_on_all_engines_does_not_starve_another_tenant(choice: str) -> None:
    """The engines' queues are fair each for itself, and that is enough: wherever the other tenant's request goes, it
    waits for steps and not for the flood."""

    def latest_first_token_s(flood: int) -> float:
        arrivals = [make_arrival(i + 1, 1.0 + 0.1 * i, prompt=200, output=20, tenant="small") for i in range(40)]
        arrivals += [make_arrival(1000 + i, 0.5 + 0.001 * i, 200, 20, tenant="flood") for i in range(flood)]
        options = make_options(policy="fair")
        fleet = Fleet(options, Written(*arrivals), num_engines=4, choice=choice)
        first: list[float] = []
        finished = fleet.recorder.finished
        fleet.recorder.finished = lambda row: (  # type: ignore[method-assign]
            first.append(row.first_token_s or 0.0) if row.tenant == "small" else None,
            finished(row),
        )[1]
        run(fleet)
        assert len(first) == 40
        return max(first)

    assert latest_first_token_s(1200) < latest_first_token_s(0) + 0.5


@pytest.mark.parametrize("choice", ["power_of_two", "prefix_affinity"])
@pytest.mark.parametrize(("policy", "is_fair"), [("fair", True), ("fcfs", False)])
def test_tenants_that_always_have_work_get_equal_shares_of_all_engines(choice: str, policy: str, is_fair: bool) -> None:
    """One tenant asks four times as much: while the other waits as well, both get as many answers."""
    arrivals = [make_arrival(i + 1, 0.5 + 0.001 * i, 200, 20, tenant="small") for i in range(200)]
    arrivals += [make_arrival(1000 + i, 0.5 + 0.00025 * i, 200, 20, tenant="large") for i in range(800)]
    fleet = Fleet(make_options(policy=policy), Written(*arrivals), num_engines=4, choice=choice)
    ended: list[str] = []
    finished = fleet.recorder.finished
    fleet.recorder.finished = lambda row: (ended.append(row.tenant), finished(row))[1]  # type: ignore[method-assign, func-returns-value]
    run(fleet)
    assert len(ended) == 1000
    num_small = list(itertools.accumulate(tenant == "small" for tenant in ended))
    num_large = num_small.index(150) + 1 - 150  # when the other has had 150 of its 200
    assert (110 < num_large < 190) == is_fair
