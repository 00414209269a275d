"""A failing step ends the one request at fault; the others give the same output as alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.scheduler.queues import POLICIES, FaultIsolationQueue
from inferengine.core.sequence import Sequence, SequenceStatus
from tests.core.builders import HalfRightProposer, Run, expected_output, make_capacity, make_request

FAILED = ("error", ("engine_error", "The engine failed while computing this request."))
OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])
Fault = Callable[[list[int], StepPlan], bool]  # whether a step with rows of these uids fails


def inject(run: Run, fault: Fault) -> Run:
    """Make the executor raise, naming nobody, wherever `fault` says so; what the step was to write is lost."""
    execute = run.executor.run

    def failing(plan: StepPlan, words: bytearray | None) -> StepResult:
        by_slot = {sequence.slot: sequence.uid for sequence in run.scheduler.sequences.values() if sequence.slot >= 0}
        if fault([by_slot.get(slot, 0) for slot in plan.slots], plan):
            run.executor.fail_with = RuntimeError("something broke")
        return execute(plan, words)

    run.executor.run = failing  # type: ignore[method-assign]
    return run


def rows_of(at_fault: set[int], *, beyond: int) -> Fault:
    """Return a fault in steps that compute one of these past so many tokens."""
    return lambda uids, plan: any(
        uid in at_fault and start + count > beyond
        for uid, start, count in zip(uids, plan.starts, plan.counts, strict=True)
    )


def check_others(run: Run, requests: list, at_fault: set[int]) -> None:  # type: ignore[type-arg]
    assert {uid for uid, end in run.finished.items() if end == FAILED} == at_fault
    for request in requests:
        if request.uid not in at_fault:
            assert run.outputs[request.uid] == expected_output(request)


def test_while_a_fault_is_looked_for_all_that_waits_is_deferred() -> None:
    run = Run(make_capacity(max_num_seqs=4))
    inject(run, rows_of({1}, beyond=14))
    run.submit(*(make_request(uid, prompt=9, max_tokens=14) for uid in range(1, 10)))
    seen = set()
    while run.scheduler.sequences:
        run.step()
        snapshot = run.scheduler.snapshot()
        if snapshot.num_waiting:
            seen.add((run.scheduler.waiting.is_isolating, snapshot.num_deferred == snapshot.num_waiting))
    assert seen == {(False, False), (True, True)}


@OVERLAP
@pytest.mark.parametrize("num_requests", [1, 2, 3, 8])
@pytest.mark.parametrize("when", ["at once", "after some tokens"])
def test_only_the_request_at_fault_ends(max_in_flight: int, num_requests: int, when: str) -> None:
    requests = [make_request(uid, prompt=9, max_tokens=14) for uid in range(1, num_requests + 1)]
    run, at_fault = Run(max_in_flight=max_in_flight, budget=32), (num_requests + 1) // 2
    length = 0 if when == "at once" else 14
    inject(run, rows_of({at_fault}, beyond=length))
    run.submit(*requests).to_end()
    check_others(run, requests, {at_fault})
    assert run.core.num_failed_steps <= 2 + num_requests.bit_length()


def test_several_requests_at_fault_end_one_by_one() -> None:
    requests = [make_request(uid, prompt=7, max_tokens=12) for uid in range(1, 17)]
    run = Run(make_capacity(200, max_num_seqs=16), budget=64)
    inject(run, lambda uids, plan: not {2, 3, 11}.isdisjoint(uids)).submit(*requests).to_end()
    check_others(run, requests, {2, 3, 11})


@OVERLAP
def test_a_single_failure_ends_no_request(max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=9, max_tokens=14) for uid in (1, 2, 3)]
    run = Run(max_in_flight=max_in_flight).submit(*requests)
    for _ in range(4):
        run.step()
    run.executor.fail_with = RuntimeError("a hiccup")
    check_others(run.to_end(), requests, set())
    assert run.core.num_failed_steps == 1


@OVERLAP
def test_steps_that_always_fail_end_all_requests_after_few_steps(max_in_flight: int) -> None:
    requests = [make_request(uid, prompt=9, max_tokens=14) for uid in range(1, 33)]
    run = Run(make_capacity(400, max_num_seqs=32), max_in_flight=max_in_flight, budget=512)
    inject(run, lambda uids, plan: True).submit(*requests).to_end()
    check_others(run, requests, set(range(1, 33)))
    assert run.core.num_failed_steps <= 16


def test_two_that_fail_only_together_both_finish_in_separate_trials() -> None:
    requests = [make_request(uid, prompt=9, max_tokens=40) for uid in (1, 2, 3, 4)]
    run = Run(budget=32)
    inject(run, lambda uids, plan: {2, 3} <= set(uids)).submit(*requests).to_end()
    check_others(run, requests, set())
    assert run.core.num_failed_steps < 30


def test_requests_that_arrive_during_isolation_wait() -> None:
    requests = [make_request(uid, prompt=9, max_tokens=14) for uid in range(1, 9)]
    run = Run(budget=64)
    inject(run, lambda uids, plan: 2 in uids).submit(*requests[:4])
    for request in requests[4:]:
        run.step()
        run.submit(request)
    check_others(run.to_end(), requests, {2})


@OVERLAP
def test_a_suspect_can_be_cancelled_in_any_state(max_in_flight: int) -> None:
    for after in range(1, 14):
        requests = [make_request(uid, prompt=9, max_tokens=14) for uid in range(1, 9)]
        run = inject(Run(max_in_flight=max_in_flight), lambda uids, plan: 5 in uids).submit(*requests)
        for _ in range(after):
            run.step()
        for uid in (1, 5, 7):
            run.cancel(uid)
        run.to_end()
        for request in requests:
            if run.finished[request.uid][0] == "length":
                assert run.outputs[request.uid] == expected_output(request)
        assert [uid for uid, end in run.finished.items() if end == FAILED] in ([], [5])


@pytest.mark.parametrize("seed", range(30))
def test_requests_at_fault_are_found_under_any_options(seed: int) -> None:
    """Small caches, swap, chunks, drafts, forks, grammars, every policy, steps under way; others that come."""
    draw = random.Random(seed)
    proposer = draw.choice([None, HalfRightProposer(), HalfRightProposer(on_device=True)])
    run = Run(
        make_capacity(draw.randint(24, 60), max_num_seqs=draw.randint(2, 8), host_blocks=draw.choice([0, 30])),
        budget=draw.choice([8, 64]),
        max_in_flight=draw.choice([1, 2]),
        policy=draw.choice(sorted(POLICIES)),
        preemption=draw.choice(["preempt", "swap"]),
        max_num_decodes=draw.choice([0, 0, 2]),
        prefix_caching=draw.random() < 0.7,
        proposer=proposer,
        max_drafts=3 if proposer else 0,
    )
    at_fault = set(draw.sample(range(1, 25), 3))
    longest = draw.choice([0, 12])
    inject(run, rows_of(at_fault, beyond=longest))
    requests = []
    for uid in range(1, 25):
        fork = uid > 1 and draw.random() < 0.2
        prompt = list(requests[-1].prompt_ids) if fork else draw.randint(1, 20)
        request = make_request(
            uid,
            prompt,
            draw.randint(1, 24),
            seed=uid,
            grammar=draw.random() < 0.2,
            fork_of=uid - 1 if fork and requests[-1].fork_of is None else None,
            tenant=draw.choice("ab"),
        )
        requests.append(request)
        run.submit(request)
        for _ in range(draw.choice([0, 0, 3])):
            run.step()
    run.to_end()
    assert {uid for uid, end in run.finished.items() if end == FAILED} <= at_fault
    for request in requests:
        if request.uid not in at_fault:
            assert run.outputs[request.uid] == expected_output(request)


def test_a_trial_has_a_bounded_length_after_any_number_of_unexplained_failures() -> None:
    unlucky, other = make_request(1, prompt=9, max_tokens=900), make_request(2, prompt=9, max_tokens=4)
    run = Run(make_capacity(400)).submit(unlucky)
    for _ in range(4):
        run.step()
    run.scheduler.sequences[1].num_unexplained_failures = 20
    run.executor.fail_with = RuntimeError("a hiccup")
    run.step()
    run.submit(other)
    for _ in range(300):
        run.step()
    check_others(run, [other], set())


def test_one_unexplained_failure_counts_once_though_requests_end_during_the_trial() -> None:
    queue = FaultIsolationQueue(POLICIES["fcfs"]())
    suspects = first, second, third, fourth = [Sequence(make_request(uid)) for uid in (1, 2, 3, 4)]
    for group in (suspects, suspects, [first, second]):
        queue.isolate(group, [5] * len(group))
    queue.push_back(first)
    for each in suspects:
        if each is second:
            each.status = SequenceStatus.FINISHED
        each.num_computed = 5
        while queue.is_isolating and queue.peek(0.0, 0) is not None:
            queue.pop()
        for sequence in queue.next_trial():
            queue.push_back(sequence)
    assert not queue.is_isolating
    assert [each.num_unexplained_failures for each in (first, third, fourth)] == [1, 1, 1]


def test_another_thread_can_count_the_waiting_while_a_trial_is_admitted() -> None:
    queue = FaultIsolationQueue(POLICIES["fcfs"]())
    suspects = [Sequence(make_request(uid)) for uid in (1, 2, 3)]
    queue.isolate(suspects, [5, 5, 5])
    for suspect in suspects:
        queue.push_back(suspect)
    counting = iter(queue)
    next(counting)
    queue.pop()
    assert suspects[1] in list(counting)
