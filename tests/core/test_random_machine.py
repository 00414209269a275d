"""The random machine: any order of submissions, cancels, steps, failures and flushes under any options keeps every
invariant, and what each request gives equals what it gives alone.

Hypothesis drives it and shrinks what it finds; seeded walks beside it cover more than 40,000 steps: by
4,000 steps each mutation of test_mutations.py has been noticed by several seeds.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferengine.core.kv_cache import EVICTION
from inferengine.core.scheduler.planner import PREEMPTION_POLICIES
from inferengine.core.scheduler.queues import POLICIES
from inferengine.core.sequence import Request
from inferengine.engine.core import StepFailed
from tests.core.builders import (
    HalfRightProposer,
    Run,
    expected_embedding,
    expected_output,
    make_capacity,
    make_request,
)

POOLINGS = [None, None, None, "last", "mean"]  # an embedding now and then among those that generate
CHUNKS = [[(which * 31 + i * 7) % 97 for i in range(4)] for which in range(3)]  # few, so that prompts share blocks


def make_run(draw_int, choice, *, has_states: bool = False, num_snapshots: int = 0) -> Run:  # type: ignore[no-untyped-def]
    """Return a run under drawn options; `draw_int(low, high)` and `choice(list)` come from hypothesis or from a
    seed."""
    window = choice([None, None, 6])
    proposer = choice([None, None, HalfRightProposer(wrong_every=3), HalfRightProposer(on_device=True)])
    capacity = make_capacity(
        draw_int(16, 40),
        max_num_seqs=draw_int(1, 8),
        window=window,
        window_blocks=60,
        host_blocks=choice([0, 8, 40, 40]),
    )
    return Run(
        capacity._replace(has_states=has_states, num_snapshots=num_snapshots),
        budget=choice([4, 9, 64]),
        max_in_flight=choice([1, 2]),
        policy=choice(sorted(POLICIES)),
        preemption=choice([*sorted(PREEMPTION_POLICIES), "swap"]),
        eviction=choice(sorted(EVICTION)),
        prefix_caching=choice([True, True, False]),
        prefill_chunk=choice([0, 3]),
        max_num_decodes=choice([0, 0, 2]),
        watermark=choice([0.0, 0.1]),
        kv_events=choice([False, True]),
        proposer=proposer,
        max_drafts=choice([3, 8]) if proposer else 0,
    )


class Model:
    """A run with the requests that were put into it, and what must hold of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.requests: dict[int, Request] = {}

    def add(
        self,
        chunks: list[int],
        own: int,
        max_tokens: int,
        *,
        tenant: str,
        priority: int,
        fork: bool,
        grammar: bool,
        pooling: str | None,
    ) -> None:
        uid = len(self.requests) + 1
        parent = self.requests.get(uid - 1) if fork and not pooling else None
        if parent is not None and parent.pooling is not None:
            parent = None
        if parent is not None and parent.fork_of is not None:
            parent = self.requests[parent.fork_of]
        shared = [token for which in chunks for token in CHUNKS[which]]
        prompt = list(parent.prompt_ids) if parent else shared + [(uid + i) % 97 for i in range(own)]
        request = make_request(
            uid,
            prompt or [1],
            max_tokens,
            eos=True,
            seed=uid,
            tenant=tenant,
            priority=priority,
            arrival_s=self.run.now,
            fork_of=parent.uid if parent else None,
            grammar=grammar and not pooling,
            pooling=pooling,
        )
        self.requests[uid] = request
        self.run.submit(request)

    def fail_next(self, row: int | None) -> None:
        error = RuntimeError("the device failed") if row is None else StepFailed("a row failed", rows=[row])
        self.run.executor.fail_with = error

    def check_outputs(self) -> None:
        for uid, got in self.run.outputs.items():
            request, reason = self.requests[uid], self.run.finished.get(uid, ("running", None))[0]
            if request.pooling is not None:
                vector = expected_embedding(request) if reason == "stop" else None
                assert (got, self.run.embeddings.get(uid)) == ([], vector), (uid, reason)
                continue
            expected = expected_output(request)
            assert got == (expected if reason in ("stop", "length") else expected[: len(got)]), (uid, reason)

    def check_end(self) -> None:
        self.run.executor.fail_with = None
        self.run.to_end(2_000)  # what twenty requests need is a tenth of that
        self.check_outputs()
        assert set(self.run.finished) == set(self.requests)
        kv = self.run.scheduler.kv
        assert all(pool.num_held == 0 for pool in [*kv.pools, *kv.swap.pools])
        assert kv.snapshots is None or kv.snapshots.num_reserved == 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.model = Model(
            make_run(
                lambda low, high: data.draw(st.integers(low, high)), lambda items: data.draw(st.sampled_from(items))
            )
        )

    @rule(
        chunks=st.lists(st.integers(0, 2), max_size=7),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 20),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 2),
        fork=st.booleans(),
        grammar=st.booleans(),
        pooling=st.sampled_from(POOLINGS),
    )
    def submit(
        self,
        chunks: list[int],
        own: int,
        max_tokens: int,
        tenant: str,
        priority: int,
        fork: bool,
        grammar: bool,
        pooling: str | None,
    ) -> None:
        self.model.add(
            chunks, own, max_tokens, tenant=tenant, priority=priority, fork=fork, grammar=grammar, pooling=pooling
        )

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.model.run.cancel(data.draw(st.sampled_from(sorted(self.model.requests))))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.model.run.step()

    @rule(row=st.one_of(st.none(), st.integers(0, 2)))
    def the_next_step_fails(self, row: int | None) -> None:
        self.model.fail_next(row)
        self.model.run.step()

    @rule()
    def flush(self) -> None:
        self.model.run.core.flush()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "model"):
            self.model.run.scheduler.check()
            self.model.check_outputs()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.check_end()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def walk(draw: random.Random, min_steps: int, *, has_states: bool = False, num_snapshots: int = 0) -> None:
    """Run a seeded history of at least so many steps; the options are redrawn every few hundred."""
    steps = 0
    while steps < min_steps:
        model = Model(make_run(draw.randint, draw.choice, has_states=has_states, num_snapshots=num_snapshots))
        for _ in range(400):
            action = draw.random()
            if action < 0.25 and len(model.run.scheduler.waiting) < 20:
                model.add(
                    draw.choices(range(3), k=draw.randint(0, 7)),
                    draw.randint(0, 12),
                    draw.randint(1, 20),
                    tenant=draw.choice("ab"),
                    priority=draw.randint(0, 2),
                    fork=draw.random() < 0.3,
                    grammar=draw.random() < 0.3,
                    pooling=draw.choice(POOLINGS),
                )
            elif action < 0.28 and model.requests:
                sequences = model.run.scheduler.sequences
                swapped = sorted(uid for uid, sequence in sequences.items() if sequence.host_tables is not None)
                live = swapped or sorted(sequences)
                model.run.cancel(draw.choice(live if live and draw.random() < 0.7 else sorted(model.requests)))
            elif action < 0.285:
                model.fail_next(draw.choice([None, 0, 1]))
            elif action < 0.29:
                model.run.core.flush()
            for _ in range(draw.choice([1, 1, 2])):
                model.run.step()
                steps += 1
        model.check_end()


@pytest.mark.parametrize("seed", range(11))
def test_a_long_walk_keeps_every_invariant(seed: int) -> None:
    walk(random.Random(seed), min_steps=4_000)


@pytest.mark.parametrize("seed", range(4))
def test_a_state_of_the_latest_token_is_always_the_one_to_go_on_from(seed: int) -> None:
    walk(random.Random(seed), min_steps=1_000, has_states=True)


@pytest.mark.parametrize("num_snapshots", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_begins_from_a_snapshot_begins_with_the_state_of_its_prefix(
    seed: int, num_snapshots: int
) -> None:
    walk(random.Random(seed), min_steps=2_000, has_states=True, num_snapshots=num_snapshots)
