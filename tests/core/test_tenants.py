"""Tenants share the engine: one that floods it does not delay the others, and one alone sees no difference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferengine.core.scheduler import queues
from inferengine.core.scheduler.queues import OUTPUT_WEIGHT, Claim, FairShare
from inferengine.core.sequence import Request, Sequence, SequenceStatus, make_share
from tests.core.builders import Run, expected_output, make_capacity, make_request
from tests.core.plain_fair_share import PlainFairShare

QUIET = 10_000


def make_flood(count: int, *, prompt: int = 6, max_tokens: int = 40, tenant: str = "loud") -> list[Request]:
    return [make_request(uid, prompt, max_tokens, tenant=tenant) for uid in range(1, count + 1)]


def make_user(uid: int, *, prompt: int = 6, max_tokens: int = 40, user: str, address: str = "address") -> Request:
    return make_request(uid, prompt, max_tokens, tenant=address, within=(user,))


def make_quiet(uid: int = QUIET, *, prompt: int = 6, max_tokens: int = 4) -> Request:
    return make_request(uid, prompt, max_tokens, tenant="quiet")


def steps_to_first_token(run: Run, request: Request) -> int:
    run.submit(request)
    for step in range(1, 10_000):
        run.step()
        if run.outputs[request.uid]:
            return step
    raise AssertionError("no token")


def plans_of(run: Run) -> list[tuple[Any, ...]]:
    """Return a record of what every step computes; the list grows as the run goes on."""
    plans: list[tuple[Any, ...]] = []
    original = run.executor.execute

    def execute(plan: Any) -> Any:
        plans.append((plan.slots, plan.starts, plan.counts, plan.samples, [item.slot for item in plan.admitted]))
        return original(plan)

    run.executor.execute = execute  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("seed", range(12))
def test_with_one_tenant_fair_share_plans_the_very_steps_of_first_come(seed: int) -> None:
    """Whatever comes, is cancelled, forks or has to make room: every step of one tenant is the same."""
    recorded = []
    for policy in ("fcfs", "fair"):
        draw = random.Random(seed)
        capacity = make_capacity(draw.choice([24, 60]), max_num_seqs=draw.choice([2, 5]))
        preemption = draw.choice(["preempt", "preempt", "reject"])
        run = Run(
            capacity,
            budget=draw.choice([8, 32]),
            max_in_flight=draw.choice([1, 2]),
            policy=policy,
            preemption=preemption,
        )
        plans = plans_of(run)
        uid = 0
        for _ in range(150):
            if draw.random() < 0.4:
                uid += 1
                prompt, max_tokens, first = draw.randrange(1, 40), draw.randrange(1, 30), uid
                run.submit(make_request(uid, prompt, max_tokens, seed=uid, tenant="only"))
                ids = list(run.scheduler.sequences[first].request.prompt_ids)
                for _ in range(draw.choice([0, 0, 2])):
                    uid += 1
                    run.submit(make_request(uid, ids, max_tokens, seed=uid, fork_of=first, tenant="only"))
            if uid and draw.random() < 0.1:
                run.cancel(draw.randrange(1, uid + 1))
            run.step()
        run.to_end()
        recorded.append((plans, run.outputs, run.finished))
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_tenant_with_nothing_running_gets_its_first_token_in_the_next_steps(
    max_in_flight: int,
) -> None:
    run = Run(make_capacity(2000, max_num_seqs=16), max_in_flight=max_in_flight, policy="fair", budget=256)
    run.submit(*make_flood(300))
    for _ in range(7):
        run.step()
    assert steps_to_first_token(run, make_quiet()) <= 3 * max_in_flight
    assert run.scheduler.stats.num_preemptions == 1
    run.to_end()
    assert run.outputs[QUIET] == expected_output(make_quiet())


def test_a_claimed_slot_costs_the_other_tenant_one_step() -> None:
    """One gives way, and what it has computed it finds again: nothing but the block in which it stopped is lost."""
    alone = Run(make_capacity(2000, max_num_seqs=16), policy="fair", budget=256).submit(*make_flood(60)).to_end()
    run = Run(make_capacity(2000, max_num_seqs=16), policy="fair", budget=256).submit(*make_flood(60))
    for _ in range(20):
        run.step()
    run.submit(make_quiet(max_tokens=1)).to_end()
    more = run.executor.num_computed_tokens - alone.executor.num_computed_tokens
    assert more <= 6 + run.capacity.block_size
    assert {uid: run.outputs[uid] for uid in alone.outputs} == alone.outputs


@pytest.mark.parametrize("num_loud", [1, 3])
def test_a_claim_frees_blocks_up_to_the_tenants_share(num_loud: int) -> None:
    run = Run(make_capacity(60, max_num_seqs=32, block_size=4), policy="fair", budget=256)
    for index in range(num_loud):
        run.submit(*(make_request(100 * index + n, 12, 200, tenant=f"loud {index}") for n in range(1, 30)))
    for _ in range(30):
        run.step()
    assert steps_to_first_token(run, make_quiet(prompt=30)) <= 3


def test_a_prompt_longer_than_a_tenants_share_of_the_cache_preempts_no_request() -> None:
    run = Run(make_capacity(60, max_num_seqs=32, block_size=4), policy="fair", budget=256)
    run.submit(*(make_request(uid, 12, 30, tenant="loud") for uid in range(1, 9)))
    for _ in range(5):
        run.step()
    run.submit(make_quiet(prompt=200, max_tokens=2)).step()
    assert run.scheduler.stats.num_preemptions == 0
    run.to_end()
    assert run.outputs[QUIET] == expected_output(make_quiet(prompt=200, max_tokens=2))


def test_a_tenant_that_came_last_is_not_preempted_for_one_that_fills_the_cache() -> None:
    """The flood's sequences grow until the blocks run out: they give way to each other."""
    run = Run(make_capacity(40, max_num_seqs=16, block_size=4), policy="fair", budget=256)
    run.submit(*make_flood(8, prompt=4, max_tokens=100))
    run.step()
    run.submit(make_quiet(max_tokens=60))
    while QUIET not in run.finished:
        run.step()
        quiet = run.scheduler.sequences.get(QUIET)
        assert quiet is None or quiet.num_preemptions == 0
    assert run.scheduler.stats.num_preemptions > 0


def test_a_long_prompt_of_one_tenant_leaves_half_of_each_step_to_another() -> None:
    run = Run(make_capacity(2000), policy="fair", budget=32)
    run.submit(make_request(1, prompt=1000, tenant="loud"))
    run.step()
    assert steps_to_first_token(run, make_quiet(prompt=60)) <= 4


def test_prompts_of_two_tenants_share_the_budget_of_every_step() -> None:
    run = Run(make_capacity(2000), policy="fair", budget=32)
    run.submit(make_request(1, prompt=500, tenant="a"), make_request(2, prompt=500, tenant="b"))
    for _ in range(12):
        run.step()
    computed = [run.scheduler.sequences[uid].num_computed for uid in (1, 2)]
    assert abs(computed[0] - computed[1]) <= 32


def test_more_tenants_than_slots_preempt_no_request() -> None:
    """Each has one slot at most, so nobody has more than its share."""
    run = Run(make_capacity(500, max_num_seqs=4), policy="fair")
    run.submit(*(make_request(uid, 6, 20, tenant=f"tenant {uid}") for uid in range(1, 30))).to_end()
    assert run.scheduler.stats.num_preemptions == 0


def test_the_reject_policy_ends_no_request_for_a_slot() -> None:
    run = Run(make_capacity(2000, max_num_seqs=4), policy="fair", preemption="reject")
    run.submit(*make_flood(20)).step()
    run.submit(make_quiet()).to_end()
    assert {reason for reason, _ in run.finished.values()} == {"length"}


def test_service_to_the_only_tenant_does_not_count_against_it_later() -> None:
    """One tenant has long used the engine alone; another comes. Both have several requests: each gets its turns."""
    queue = FairShare()
    old = Sequence(make_request(1, tenant="old"), num_groups=1)
    queue.push(old)
    assert queue.peek(0.0, 0) is old
    queue.pop()
    queue.started(old)
    queue.charge(old, 1_000_000)
    queue.push(Sequence(make_request(2, tenant="new"), num_groups=1))
    assert queue.service("new") == queue.service("old")


def test_a_tenant_that_comes_to_an_empty_engine_starts_where_the_last_one_left() -> None:
    queue = FairShare()
    old = Sequence(make_request(1, tenant="old"), num_groups=1)
    queue.push(old)
    queue.peek(0.0, 0)
    queue.pop()
    queue.started(old)
    queue.charge(old, 500)
    queue.stopped(old)
    queue.push(Sequence(make_request(2, tenant="new"), num_groups=1))
    assert queue.service("new") == queue.service("old")


@pytest.mark.parametrize("seed", range(8))
def test_tenants_at_random_get_every_token_and_none_waits_long(seed: int) -> None:
    """Floods, preemption, forks and cancels by several tenants: outputs are right, books balance, and a tenant of which
    nothing runs, with a small request, never waits for more than a few steps."""
    draw = random.Random(seed)
    run = Run(make_capacity(200, max_num_seqs=8), budget=48, max_in_flight=draw.choice([1, 2]), policy="fair")
    requests: dict[int, Request] = {}
    waiting_since: dict[int, int] = {}
    longest = 0
    for step in range(400):
        uid = len(requests) + 1
        if draw.random() < 0.5 and len(run.scheduler.waiting) < 60:
            requests[uid] = make_request(uid, draw.randrange(1, 30), draw.randrange(1, 40), tenant=draw.choice("aab"))
            run.submit(requests[uid])
        elif draw.random() < 0.1 and not any(s.request.tenant == "q" for s in run.scheduler.sequences.values()):
            requests[uid] = make_request(uid, 5, 3, tenant="q")
            run.submit(requests[uid])
            waiting_since[uid] = step
        run.step()
        for name in [name for name in waiting_since if run.outputs[name]]:
            longest = max(longest, step - waiting_since.pop(name))
    run.to_end()
    assert run.outputs == {uid: expected_output(request) for uid, request in requests.items()}
    assert longest <= 8


def test_a_tenant_with_a_stream_running_need_not_wait_with_its_next_requests_either() -> None:
    run = Run(make_capacity(2000, max_num_seqs=32), policy="fair", budget=256)
    run.submit(make_quiet(1000, max_tokens=200)).step()
    run.submit(*make_flood(100))
    for _ in range(7):
        run.step()
    for uid in (QUIET, QUIET + 1, QUIET + 2):
        assert steps_to_first_token(run, make_quiet(uid)) <= 2


def test_two_floods_do_not_preempt_each_other_again_and_again() -> None:
    """Each has half of the slots when the second has come; then each waits for ends."""
    run = Run(make_capacity(4000, max_num_seqs=16), policy="fair", budget=256)
    run.submit(*make_flood(100))
    for _ in range(5):
        run.step()
    run.submit(*(make_request(1000 + n, 6, 40, tenant="second") for n in range(100))).to_end()
    assert run.scheduler.stats.num_preemptions <= 15
    assert run.executor.num_computed_tokens <= 1.01 * 200 * (6 + 39)


def test_a_claim_preempts_no_sequence_that_would_be_admitted_again_at_once() -> None:
    """A tenant that got much while others wanted little has little running now. The others were served less, so a slot
    that they gave up would be theirs again in the same step."""
    run = Run(make_capacity(4000, max_num_seqs=16), policy="fair", budget=256)
    run.submit(make_request(1, 6, 900, tenant="steady"), make_request(2, 6, 600, tenant="served"))
    run.submit(*(make_request(uid, 6, 100, tenant="served") for uid in range(3, 17)))
    for _ in range(110):
        run.step()
    run.submit(*(make_request(uid, 6, 300, tenant="new") for uid in range(20, 34)))
    for _ in range(2):
        run.step()
    late = make_request(50, 6, 10, tenant="served")
    run.submit(late)
    for _ in range(60):
        run.step()
    assert run.scheduler.stats.num_preemptions == 0
    run.to_end()
    assert run.outputs[late.uid] == expected_output(late)


def test_the_counter_of_a_tenant_may_be_dropped_during_fault_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects wait for their trial outside the queue of their tenant, which looks idle."""
    monkeypatch.setattr(queues, "MAX_IDLE_NAMES", 2)
    requests = [make_request(uid, 6, 12, tenant=f"tenant {uid}") for uid in range(1, 7)]
    others = [make_request(uid, 6, 4, tenant=f"tenant {uid}") for uid in range(20, 23)]
    run = Run(make_capacity(200, max_num_seqs=8), policy="fair").submit(*requests)
    for _ in range(4):
        run.step()
    for other in others:
        run.executor.fail_with = RuntimeError("something broke")
        run.executor.fail_with.injected = True  # type: ignore[attr-defined]
        run.step()
        run.submit(other)
        run.executor.fail_with = RuntimeError("and again")
        run.executor.fail_with.injected = True  # type: ignore[attr-defined]
        run.step()
    run.executor.fail_with = None
    run.to_end()
    for request in [*requests, *others]:
        assert request.uid in run.finished
        if run.finished[request.uid][0] == "length":
            assert run.outputs[request.uid] == expected_output(request)
    assert all(run.finished[other.uid][0] == "length" for other in others)


def test_a_claim_that_cannot_be_met_preempts_no_request() -> None:
    """The prompt is within its tenant's share, but what one request holds, which stays, leaves no room for it."""
    run = Run(make_capacity(100, max_num_seqs=16), policy="fair", budget=512)
    run.submit(make_request(1, 280, 60, tenant="big")).step()
    run.submit(*make_flood(6)[1:])
    for _ in range(4):
        run.step()
    num_running = len(run.scheduler.running)
    run.submit(make_quiet(prompt=128))
    for _ in range(10):
        run.step()
    assert (len(run.scheduler.running), run.scheduler.stats.num_preemptions) == (num_running, 0)
    assert run.to_end().outputs[QUIET] == expected_output(make_quiet(prompt=128))


# -- shares within a share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_others", [0, 100])
def test_a_user_with_nothing_running_gets_its_first_token_beside_a_flood_from_its_own_address(
    max_in_flight: int, num_others: int
) -> None:
    """Whether another address has its half of the slots or not."""
    run = Run(make_capacity(4000, max_num_seqs=16), max_in_flight=max_in_flight, policy="fair", budget=256)
    run.submit(*(make_user(uid, user="loud") for uid in range(1, 301)))
    run.submit(*(make_request(1000 + n, 6, 40, tenant="other") for n in range(num_others)))
    for _ in range(9):
        run.step()
    assert steps_to_first_token(run, make_user(QUIET, user="quiet", max_tokens=4)) <= 4 * max_in_flight
    run.to_end()
    assert run.outputs[QUIET] == expected_output(make_user(QUIET, user="quiet", max_tokens=4))


def test_a_client_that_invents_users_gets_no_more_than_its_share() -> None:
    run = Run(make_capacity(4000, max_num_seqs=16), policy="fair", budget=256)
    run.submit(*(make_user(uid, user=f"user {uid}", address="loud") for uid in range(1, 400)))
    run.submit(*(make_user(1000 + n, user="one", address="honest") for n in range(200)))
    for _ in range(300):
        run.step()
        running = run.scheduler.running
        if min(sum(item.request.tenant == name for item in running) for name in ("loud", "honest")) == 8:
            break
    ends = []
    while min(sum(s.request.tenant == name for s in run.scheduler.waiting) for name in ("loud", "honest")):
        run.step()
        running = [s.request.tenant for s in run.scheduler.running]
        ends.append(running.count("loud") - running.count("honest"))
    assert abs(sum(ends)) / len(ends) <= 2


def test_a_slot_given_up_within_an_address_is_not_taken_by_another_address() -> None:
    """The other address has been served less, so any other free slot is its own."""
    run = Run(make_capacity(4000, max_num_seqs=8), policy="fair", budget=256)
    run.submit(*(make_user(uid, user="loud", max_tokens=200) for uid in range(1, 9)))
    for _ in range(20):
        run.step()
    run.submit(*(make_request(100 + n, 6, 200, tenant="other") for n in range(20)))
    for _ in range(6):
        run.step()
    before = sum(s.request.tenant == "other" for s in run.scheduler.running)
    assert steps_to_first_token(run, make_user(QUIET, user="quiet", max_tokens=60)) <= 4
    assert sum(s.request.tenant == "other" for s in run.scheduler.running) == before


def test_prompts_share_the_budget_by_address_first_and_by_user_then() -> None:
    run = Run(make_capacity(4000), policy="fair", budget=64)
    requests = [make_user(1, prompt=900, user="x"), make_user(2, prompt=900, user="y")]
    run.submit(*requests, make_user(3, prompt=900, user="", address="other"))
    computed = []
    for _ in range(18):
        run.step()
        computed.append([run.scheduler.sequences[uid].num_computed for uid in (1, 2, 3)])
    x, y, other = (last - first for first, last in zip(computed[7], computed[17], strict=True))
    assert (x, y, other) == (160, 160, 320)


def test_a_full_queue_still_takes_what_a_quiet_user_of_a_loud_address_asks() -> None:
    queue = FairShare()
    for uid in range(1, 101):
        queue.push(Sequence(make_user(uid, user="loud"), num_groups=1))
    assert queue.ahead_of(make_share("address", "loud")) == (100, 600)
    assert queue.ahead_of(make_share("address", "quiet")) == (0, 0)
    assert queue.ahead_of(make_share("other")) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_shares_at_random_get_every_token_and_leave_nothing_behind(seed: int) -> None:
    """Two addresses with three users each, that flood, cancel and come back: outputs are right, and books balance."""
    draw = random.Random(seed)
    run = Run(make_capacity(200, max_num_seqs=8), budget=48, max_in_flight=draw.choice([1, 2]), policy="fair")
    requests: dict[int, Request] = {}
    cancelled = set()
    for _ in range(400):
        uid = len(requests) + 1
        if draw.random() < 0.5 and len(run.scheduler.waiting) < 60:
            requests[uid] = make_user(
                uid,
                prompt=draw.randrange(1, 30),
                max_tokens=draw.randrange(1, 40),
                user=draw.choice("xxxyz"),
                address=draw.choice("aab"),
            )
            run.submit(requests[uid])
        if requests and draw.random() < 0.1:
            cancelled.add(draw.randrange(1, len(requests) + 1))
            run.cancel(max(cancelled))
        run.step()
        queue = run.scheduler.waiting
        assert (len(queue), queue.num_tokens) == (len(list(queue)), sum(s.num_prompt for s in queue))
    run.to_end()
    whole = requests.keys() - cancelled
    assert {uid: run.outputs[uid] for uid in whole} == {uid: expected_output(requests[uid]) for uid in whole}
    fair = run.scheduler.waiting.inner
    assert isinstance(fair, FairShare)
    assert not fair._parts
    assert not fair._num_running


def test_prompts_of_two_units_a_token_advance_where_a_share_of_the_budget_is_one() -> None:
    """Log-probabilities of a prompt make its tokens cost two."""
    run = Run(make_capacity(256), budget=4)
    requests = [make_request(uid, 40, 2, tenant=f"tenant {uid}", prompt_logprobs=0) for uid in range(1, 5)]
    run.submit(*requests)
    for _ in range(400):
        run.step()
    assert {uid: run.finished[uid][0] for uid in run.finished} == dict.fromkeys(range(1, 5), "length")


def test_prompts_of_two_units_a_token_advance_beside_a_stream() -> None:
    """Where a stream leaves little of a step, every prompt still gets on before it ends."""
    run = Run(make_capacity(256), budget=5)
    run.submit(make_request(QUIET, 2, 900, tenant="stream"))
    run.step()
    run.submit(*[make_request(uid, 40, 2, tenant=f"tenant {uid}", prompt_logprobs=0) for uid in range(1, 5)])
    for _ in range(300):
        run.step()
    assert sorted(run.finished) == [1, 2, 3, 4]


class CountedReads(dict[str, float]):
    """Counts how often a name's counter is read."""

    num_reads = 0

    def __getitem__(self, name: str) -> float:
        self.num_reads += 1
        return super().__getitem__(name)


def test_a_new_name_takes_no_longer_where_many_wait() -> None:
    """Clients choose the names: whoever makes up a new one for each request must not slow the engine down."""
    queue = FairShare()
    sequences = [Sequence(make_request(uid, 1, tenant=f"name {uid}")) for uid in range(1, 3_000)]
    for sequence in sequences:
        queue.push(sequence)
    queue._counters = counters = CountedReads(queue._counters)
    for uid in range(3_000, 3_010):
        queue.push(Sequence(make_request(uid, 1, tenant=f"name {uid}")))
    assert counters.num_reads <= 100


def test_idle_names_are_dropped_without_a_look_at_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MAX_IDLE_NAMES", 4)
    queue = FairShare()
    for uid in range(1, 1_000):
        queue.push(Sequence(make_request(uid, 1, tenant=f"waits {uid}")))
    queue._counters = counters = CountedReads(queue._counters)
    for uid in range(1_000, 1_040):
        sequence = Sequence(make_request(uid, 1, tenant=f"left {uid}"))
        queue.push(sequence)
        queue.remove(sequence)
    assert counters.num_reads <= 600
    assert len(counters) <= 999 + 5


def test_a_name_that_joins_starts_at_the_least_served_of_those_that_wait_and_run() -> None:
    """Also where the queue's order has not been asked for since they were served."""
    run = Run(make_capacity(200, max_num_seqs=2), policy="fair")
    run.submit(*[make_request(uid, 6, 30, tenant=tenant) for uid, tenant in enumerate("abc", start=1)])
    for _ in range(8):
        run.step()
    fair = run.scheduler.waiting.inner
    assert isinstance(fair, FairShare)
    least = min(fair.service(name) for name in "abc")
    fair.charge(run.scheduler.sequences[3], 4)  # it waits
    run.submit(make_request(4, 6, 30, tenant="d"))
    assert fair.service("d") == min(fair.service(name) for name in "abc") > least


# -- levels that come with a second name -------------------------------------------------------------------------------


def test_late_tokens_of_two_ended_shares_of_a_name_are_charged_to_each() -> None:
    """Both have ended and one of them is back, alone, when the tokens of their last step come."""

    def run(uid: int, user: str) -> Sequence:
        sequence = Sequence(make_user(uid, user=user))
        queue.push(sequence)
        assert queue.peek(0.0, 0) is sequence
        queue.pop()
        queue.started(sequence)
        return sequence

    queue = FairShare()
    ended = [run(1, "one"), run(2, "two")]
    for sequence in ended:
        queue.stopped(sequence)
    run(3, "one")
    queue.charge_each(ended, 1)
    users = queue._parts["address"]
    assert isinstance(users, FairShare)
    assert [users.service(user) for user in ("one", "two")] == [6 + OUTPUT_WEIGHT, OUTPUT_WEIGHT]


class TwoQueues:
    """FairShare and PlainFairShare with the same history at random: requests wait, run, wait again, and are held
    outside as in fault isolation. Both must answer the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.queue, self.plain = FairShare(), PlainFairShare()
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.shares = [make_share()]
        self.num_steps = 0

    def both(self, call: Callable[[Any], Any]) -> Any:
        """Do something to both queues; they must answer the same."""
        found, expected = call(self.queue), call(self.plain)
        assert found == expected
        return found

    def come(self) -> None:
        share = self.draw.choice(self.shares)
        request = make_request(self.num_steps, self.draw.randrange(1, 40), tenant=share[0], within=share[1:])
        sequence = Sequence(request)
        self.both(lambda queue: queue.push(sequence))

    def admit(self) -> None:
        sequence = self.both(lambda queue: queue.peek(0.0, len(self.running)))
        if sequence is not None:
            assert self.both(lambda queue: queue.pop()) is sequence
            self.start(sequence)

    def start(self, sequence: Sequence) -> None:
        self.both(lambda queue: queue.started(sequence))
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def stop(self) -> None:
        """End a running one, have it wait again, or hold it."""
        if not self.running:
            return
        sequence = self.running.pop(self.draw.randrange(len(self.running)))
        fate = self.draw.random()
        if fate < 0.5:
            sequence.status = SequenceStatus.FINISHED
            self.ended.append(sequence)
        elif fate < 0.85:
            sequence.status = SequenceStatus.PREEMPTED
            sequence.num_preemptions += 1
            self.both(lambda queue: queue.push_back(sequence))
        else:
            self.held.append(sequence)
        self.both(lambda queue: queue.stopped(sequence))

    def start_held(self) -> None:
        if self.held:
            self.start(self.held.pop())

    def cancel(self) -> None:
        if waiting := list(self.queue):
            sequence = self.draw.choice(waiting)
            sequence.status = SequenceStatus.FINISHED
            self.both(lambda queue: queue.remove(sequence))

    def charge(self) -> None:
        """Charge all that run, and late one that has ended."""
        for _ in range(self.draw.randrange(9)):
            self.queue.charge_each(self.running, self.num_steps)
            for sequence in self.running:
                self.plain.charge(sequence, 1)
        if self.ended:
            late, num_tokens = self.draw.choice(self.ended[-8:]), self.draw.randrange(100)
            self.both(lambda queue: queue.charge(late, num_tokens))

    def claim(self) -> None:
        has_free_slot = self.draw.random() < 0.5
        found, expected = (
            list(queue.claims(0.0, 8, has_free_slot=has_free_slot)) for queue in (self.queue, self.plain)
        )
        assert [self.shown(claim) for claim in found] == [self.shown(claim) for claim in expected]
        if found and self.draw.random() < 0.5:
            found[-1].admit_first()
            expected[-1].admit_first()

    def shown(self, claim: Claim) -> tuple[Any, ...]:
        staying = list(claim.staying(self.running))
        return claim.sequence, claim.fraction, claim.num_slots, claim.victim(self.running), staying

    def answers(self, queue: FairShare | PlainFairShare) -> tuple[Any, ...]:
        ahead = [queue.ahead_of(share) for share in self.shares]
        victim = queue.victim(self.running) if self.running else None
        return list(queue), len(queue), queue.num_tokens, queue.is_shared, victim, ahead

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % 40 == 1:
            known, level = self.draw.choice(self.shares), self.draw.randrange(3)  # others differ from this level on
            others = [(*known[:level], *self.draw.choices("abc", k=3 - level)) for _ in range(self.draw.randrange(6))]
            self.shares = [known, *(make_share(*names) for names in others)]
            self.num_come = self.draw.randrange(6)  # with few of them, names have nothing left to run
        most = [self.come] * self.num_come + [self.admit, self.admit, self.stop, self.charge] * 2
        self.draw.choice([*most, self.start_held, self.cancel, self.claim])()


def counters_of(queue: FairShare, plain: PlainFairShare) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Yield the counters of every level that has come, from both."""
    yield queue._counters, plain.counters
    for name, part in queue._parts.items():
        if isinstance(part, FairShare):
            yield from counters_of(part, plain.parts[name])


@pytest.mark.parametrize("seed", range(4))
def test_levels_that_come_with_a_second_name_decide_as_if_they_had_been_there_from_the_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes, runs, waits again, is cancelled or charged late: the same order, claims, victims and counts."""
    monkeypatch.setattr(queues, "MAX_IDLE_NAMES", 2)
    monkeypatch.setattr(queues, "MAX_IDLE_PARTS", 2)
    two = TwoQueues(seed)
    for _ in range(800):
        two.step()
        assert two.answers(two.queue) == two.answers(two.plain)
        assert all(found == expected for found, expected in counters_of(two.queue, two.plain))
