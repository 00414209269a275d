"""Steps under a grammar are launched behind each other: the masks of one are made once the one before it is known, and
while it runs. Where tokens were forced of late, the one before is waited for, because forced tokens need no steps.
"""

from __future__ import annotations

import random

import pytest

from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.sequence import FORCE_PATIENCE
from tests.core.builders import HalfRightProposer, Run, ThirdsGrammar, expected_output, make_capacity, make_request
from tests.core.memory_executor import MemoryExecutor, _Pending
from tests.core.test_fault_isolation import FAILED, inject, rows_of


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the executor is asked for: `l1` launches step 1, `m1` are its masks, `r1` its result."""
    seen: list[str] = []
    execute, masks, result = MemoryExecutor.execute, _Pending.provide_masks, _Pending.result

    def launched(executor: MemoryExecutor, plan: StepPlan) -> _Pending:
        seen.append(f"l{plan.step}")
        return execute(executor, plan)

    def masked(pending: _Pending, words: bytearray) -> None:
        seen.append(f"m{pending._plan.step}")
        masks(pending, words)

    def waited(pending: _Pending) -> StepResult:
        seen.append(f"r{pending._plan.step}")
        return result(pending)

    monkeypatch.setattr(MemoryExecutor, "execute", launched)
    monkeypatch.setattr(_Pending, "provide_masks", masked)
    monkeypatch.setattr(_Pending, "result", waited)
    return seen


def patient(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let steps overlap after so many tokens without a forced one."""
    monkeypatch.setattr("inferengine.core.sequence.FORCE_PATIENCE", tokens)
    monkeypatch.setattr("inferengine.core.scheduler.scheduler.FORCE_PATIENCE", tokens)


def test_the_masks_of_a_step_are_made_while_it_runs(events: list[str]) -> None:
    request = make_request(1, max_tokens=5, grammar=True, min_tokens=1)  # with it nothing is forced
    run = Run(max_in_flight=2).submit(request).to_end()
    assert len(run.outputs[1]) == 5
    assert events == ["l1", "m1", "l2", "r1", "m2", "l3", "r2", "m3", "l4", "r3", "m4", "l5", "r4", "m5", "r5"]


def test_a_step_waits_for_the_one_before_where_tokens_may_be_forced(events: list[str]) -> None:
    Run(max_in_flight=2).submit(make_request(1, max_tokens=FORCE_PATIENCE - 2, grammar=True)).to_end()
    kinds = [event[0] for event in events]
    assert kinds == ["l", "m", "r"] * (len(kinds) // 3)


def test_nothing_is_forced_and_no_step_waited_for_where_many_run(events: list[str]) -> None:
    requests = [make_request(uid, max_tokens=10 * min(uid, 2), seed=uid, grammar=True) for uid in (1, 2, 3)]
    run = Run(max_in_flight=2, max_running_to_force=2).submit(*requests)
    for _ in range(9):
        run.step()
    assert len(run.scheduler.running) == 3
    assert run.scheduler.stats.num_forced_tokens == 0
    assert "l3 r2 m3" in " ".join(events)
    run.to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("seed", range(12))
def test_outputs_obey_their_grammar_whatever_overlaps(
    seed: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch, patience)
    draw = random.Random(seed)
    proposer = draw.choice([None, None, HalfRightProposer()])
    run = Run(
        make_capacity(draw.randint(30, 80), max_num_seqs=draw.randint(2, 8), host_blocks=draw.choice([0, 30])),
        budget=draw.choice([8, 64]),
        max_in_flight=2,
        preemption=draw.choice(["preempt", "swap"]),
        prefix_caching=draw.random() < 0.7,
        proposer=proposer,
        max_drafts=3 if proposer else 0,
    )
    requests = []
    for uid in range(1, 20):
        request = make_request(
            uid,
            draw.randint(1, 20),
            draw.randint(1, 60),
            seed=uid,
            grammar=draw.random() < 0.7,
            eos=draw.random() < 0.3,
        )
        requests.append(request)
        run.submit(request)
        for _ in range(draw.choice([0, 0, 3])):
            run.step()
    cancelled = draw.choice(requests).uid
    run.cancel(cancelled)
    run.to_end()
    for request in requests:
        if request.uid != cancelled:
            assert run.outputs[request.uid] == expected_output(request)


@pytest.mark.parametrize("seed", range(12))
def test_a_step_that_waits_for_its_masks_goes_with_the_one_that_failed_before_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch, 0)
    draw = random.Random(seed)
    run = Run(make_capacity(60, max_num_seqs=5), budget=64, max_in_flight=2)
    at_fault = set(draw.sample(range(1, 11), 2))
    inject(run, rows_of(at_fault, beyond=draw.randint(0, 24)))
    requests = [
        make_request(uid, draw.randint(1, 12), draw.randint(8, 40), seed=uid, grammar=draw.random() < 0.8)
        for uid in range(1, 11)
    ]
    run.submit(*requests).to_end()
    assert {uid for uid, end in run.finished.items() if end == FAILED} <= at_fault
    for request in requests:
        if request.uid not in at_fault:
            assert run.outputs[request.uid] == expected_output(request)


def test_a_grammar_that_fails_at_a_mask_made_later_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch, 0)
    requests = [make_request(uid, 4, 30, seed=uid, grammar=True) for uid in (1, 2, 3)]
    run = Run(max_in_flight=2).submit(*requests)
    for _ in range(6):
        run.step()
    broken = run.scheduler.sequences[2].grammar
    assert isinstance(broken, ThirdsGrammar)

    def fail(row: memoryview) -> None:
        raise ValueError("out of fuel")

    broken.fill_bitmask = fail  # type: ignore[method-assign]
    run.to_end()
    assert run.finished[2] == ("error", ("engine_error", "Following the grammar failed: ValueError."))
    assert [run.outputs[uid] for uid in (1, 3)] == [expected_output(requests[uid - 1]) for uid in (1, 3)]
