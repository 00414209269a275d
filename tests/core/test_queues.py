"""Waiting queues: each policy's order, and that no request starves under any."""

from __future__ import annotations

import gc
import random

import pytest

from inferengine.config import keys
from inferengine.core.kv_cache import EVICTION
from inferengine.core.scheduler.planner import MINIMUM_CHUNK, PREEMPTION_POLICIES, ChunkedPrefillController
from inferengine.core.scheduler.queues import MAX_IDLE_NAMES, POLICIES, FairShare
from inferengine.core.sequence import Sequence
from tests.core.builders import Run, expected_output, make_capacity, make_request


def order_of_ends(policy: str, *requests: object, slots: int = 1) -> list[int]:
    run = Run(make_capacity(max_num_seqs=slots), policy=policy).submit(*requests).to_end()  # type: ignore[arg-type]
    return list(run.finished)


def test_the_configuration_offers_exactly_what_there_is() -> None:
    choices = {name: set(item.metadata["choices"]) for name, item in keys().items()}
    assert choices["scheduler.policy"] == set(POLICIES)
    assert choices["scheduler.preemption"] == set(PREEMPTION_POLICIES)
    assert choices["cache.eviction"] == set(EVICTION)


def test_priority_runs_lower_numbers_first() -> None:
    requests = [make_request(1, priority=5), make_request(2, priority=-1), make_request(3, priority=0)]
    assert order_of_ends("priority", *requests) == [2, 3, 1]


def test_the_most_urgent_priority_there_is_delays_others_by_minutes_and_no_more() -> None:
    """Anybody may ask for -2^31: a request without a priority is served before those that arrive 5 minutes later."""
    first, soon, later = (
        make_request(1),
        make_request(2, priority=-(2**31), arrival_s=299.0),
        make_request(3, priority=-(2**31), arrival_s=301.0),
    )
    assert order_of_ends("priority", later, soon, first) == [2, 1, 3]


def test_priority_ages_so_that_long_waiting_beats_a_better_level() -> None:
    early = make_request(1, priority=2, arrival_s=0.0)
    late = make_request(2, priority=0, arrival_s=30.0)
    assert order_of_ends("priority", late, early) == [1, 2]


def test_shortest_runs_the_least_work_first() -> None:
    requests = [make_request(1, max_tokens=30), make_request(2, max_tokens=3), make_request(3, max_tokens=10)]
    assert order_of_ends("shortest", *requests) == [2, 3, 1]


def test_deadlines_run_earliest_first_and_a_request_without_one_comes_last() -> None:
    requests = [make_request(1), make_request(2, deadline_s=50.0), make_request(3, deadline_s=20.0)]
    assert order_of_ends("deadline", *requests) == [3, 2, 1]


def test_a_static_batch_admits_no_request_until_its_last_one_ended() -> None:
    run = Run(make_capacity(max_num_seqs=4), policy="static")
    run.submit(make_request(1, max_tokens=2), make_request(2, max_tokens=9)).step()
    run.submit(make_request(3))
    while 2 not in run.finished:
        assert run.outputs[3] == []
        run.step()
    run.to_end()
    assert run.outputs[3] == expected_output(make_request(3))


def test_fair_share_gives_a_quiet_tenant_its_turn_before_a_flood() -> None:
    flood = [make_request(uid, tenant="loud", max_tokens=10) for uid in range(1, 21)]
    ends = order_of_ends("fair", *flood, make_request(99, tenant="quiet", max_tokens=10))
    assert ends.index(99) <= 1


def test_two_busy_tenants_get_service_within_one_request_of_each_other() -> None:
    draw = random.Random(3)
    requests = [
        make_request(uid, prompt=draw.randrange(1, 20), max_tokens=draw.randrange(1, 30), tenant="ab"[uid % 5 == 0])
        for uid in range(1, 200)
    ]
    run = Run(make_capacity(max_num_seqs=2), policy="fair").submit(*requests)
    queue = run.scheduler.waiting.inner
    assert isinstance(queue, FairShare)
    largest_request = 1.0 * 20 + 2.0 * 30
    while {s.request.tenant for s in queue} == {"a", "b"}:
        run.step()
        assert abs(queue.service("a") - queue.service("b")) <= 2 * largest_request
    run.to_end()


def test_fair_share_forgets_idle_tenants_whose_names_come_from_outside() -> None:
    queue = FairShare()
    for uid in range(1, MAX_IDLE_NAMES * 2):
        sequence = Sequence(make_request(uid, tenant=f"tenant {uid}"), num_groups=1)
        queue.push(sequence)
        assert queue.peek(0.0, 0) is sequence
        assert queue.pop() is sequence
    assert len(queue._counters) <= MAX_IDLE_NAMES + 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_starves_while_better_ones_keep_coming(policy: str) -> None:
    """One request with the worst key of its policy against an endless stream of the best."""
    run = Run(make_capacity(max_num_seqs=2), policy=policy)
    victim = make_request(1, prompt=20, max_tokens=20, priority=3, tenant="victim", deadline_s=10_000.0)
    run.submit(make_request(2, max_tokens=4), make_request(3, max_tokens=4), victim)
    uid = 3
    for _ in range(20_000):
        if victim.uid in run.finished:
            break
        while len(run.scheduler.waiting) < 4:
            uid += 1
            deadline = run.now + 2_000.0
            run.submit(make_request(uid, max_tokens=4, arrival_s=run.now, tenant="stream", deadline_s=deadline))
        run.step()
    assert run.finished[victim.uid] == ("length", None)
    assert run.outputs[victim.uid] == expected_output(victim)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_counts_of_a_queue_are_exact_under_any_history(policy: str) -> None:
    draw = random.Random(11)
    run = Run(make_capacity(20, max_num_seqs=3), policy=policy)
    for uid in range(1, 120):
        deadline = None if draw.random() < 0.5 else run.now + 500.0
        tenant, priority = draw.choice("abc"), draw.randrange(3)
        prompt, max_tokens = draw.randrange(1, 30), draw.randrange(1, 12)
        run.submit(make_request(uid, prompt, max_tokens, tenant=tenant, priority=priority, deadline_s=deadline))
        if draw.random() < 0.3:
            run.cancel(draw.randrange(1, uid + 1))
        run.step()
        queue = run.scheduler.waiting
        assert len(queue) == len(list(queue))
        assert queue.num_tokens == sum(sequence.num_prompt for sequence in queue)
    run.to_end()
    assert (len(run.scheduler.waiting), run.scheduler.waiting.num_tokens) == (0, 0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_cancelled_requests_are_dropped_while_none_is_admitted(policy: str) -> None:
    """One slot, one that holds it, one that waits for it, and somebody who sends and cancels: the queue's limits count
    the living, so the dead must not fill the memory."""
    gc.collect()  # those of other tests
    run = Run(make_capacity(max_num_seqs=1), policy=policy)
    run.submit(make_request(1, max_tokens=60))
    run.step()
    run.submit(make_request(2, max_tokens=3))
    for uid in range(3, 800):
        run.submit(make_request(uid, prompt=9, max_tokens=5, priority=5, tenant=f"tenant {uid % 400}"))
        run.cancel(uid)
    kept = sum(type(item) is Sequence for item in gc.get_objects())
    assert kept < 200
    assert [sequence.uid for sequence in run.scheduler.waiting] == [2]
    run.to_end()
    assert len(run.outputs[2]) == 3


def test_fair_share_keeps_nothing_of_tenants_that_come_and_cancel() -> None:
    queue = FairShare()
    waits = Sequence(make_request(0, tenant="waits"), num_groups=1)
    queue.push(waits)
    for uid in range(1, 3000):
        sequence = Sequence(make_request(uid, tenant=f"tenant {uid}"), num_groups=1)
        queue.push(sequence)
        queue.remove(sequence)
    assert len(queue._queues) == 1
    assert len(queue._idle) + len(queue._busy) < 100
    assert queue.peek(0.0, 0) is waits


def test_a_cap_on_decodes_lets_all_take_turns() -> None:
    requests = [make_request(uid, max_tokens=12) for uid in range(1, 7)]
    run = Run(make_capacity(max_num_seqs=6), max_num_decodes=2).submit(*requests)
    run.step()
    most = 0
    while run.core.has_work:
        before = run.scheduler.stats.num_scheduled_rows
        run.step()
        most = max(most, run.scheduler.stats.num_scheduled_rows - before)
    assert most == 2
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


def test_chunks_are_cut_so_that_a_step_with_decodes_stays_under_the_target() -> None:
    controller = ChunkedPrefillController(target_s=0.010)
    for _ in range(200):  # a device with 4 ms per step and 20 us per prompt token
        controller.observe(8, 0, 0.004)
        controller.observe(8, 100, 0.004 + 100 * 20e-6)
    assert controller.limit(8, 8192) == pytest.approx(300, rel=0.02)
    assert controller.limit(0, 8192) == 8192


def test_prompts_advance_even_when_the_target_cannot_be_met() -> None:
    controller = ChunkedPrefillController(target_s=0.001)
    controller.observe(8, 0, 0.004)
    controller.observe(8, 100, 0.020)
    assert controller.limit(8, 8192) == MINIMUM_CHUNK


def test_a_slow_device_gives_prompts_their_share_beyond_the_target() -> None:
    controller = ChunkedPrefillController(target_s=0.060, base_factor=3.0)
    for _ in range(100):  # decoding alone takes longer than the target
        controller.observe(8, 0, 0.100)
        controller.observe(8, 100, 0.100 + 100 * 1e-3)
    assert controller.limit(8, 8192) == pytest.approx(200, rel=0.02)


def test_a_few_tokens_that_cost_a_whole_step_do_not_pass_for_the_price_of_a_token() -> None:
    controller = ChunkedPrefillController(target_s=0.060)
    controller.observe(0, 16, 0.005)  # 0.3 ms a token
    controller.observe(0, 8000, 0.180)  # 22 us a token
    assert controller.limit(8, 8192) > 1000


def test_the_target_reaches_the_plan() -> None:
    run = Run(make_capacity(200), budget=64, itl_target_s=0.5)
    run.submit(make_request(1, max_tokens=60))
    for _ in range(5):
        run.step()
    run.submit(make_request(2, prompt=200))
    counts = []
    original = run.executor.run

    def slow(plan, words):  # type: ignore[no-untyped-def]
        counts.append(plan.num_tokens - plan.num_decodes)
        run.now += plan.num_tokens * 0.02
        return original(plan, words)

    run.executor.run = slow  # type: ignore[method-assign]
    run.to_end()
    chunks = [count for count in counts if count]
    assert chunks[0] == 63
    assert all(count <= 25 for count in chunks[1:])
    assert run.outputs[2] == expected_output(make_request(2, prompt=200))
