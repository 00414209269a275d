"""Whose turn it is to be compiled: new grammars are not kept waiting by slow ones, nor tenants by each other."""

from __future__ import annotations

from inferengine.structured_output.compile_process import QUICK_S, SECOND_S, SLOW_LANES, CompileJob, CompileJobs


def jobs(*tenants: str, limit_s: float = 1.0) -> CompileJobs:
    made = CompileJobs(limit_s)
    for id, tenant in enumerate(tenants):
        made.add(CompileJob(id, tenant, ["regex", "a"]))
    return made


def test_a_grammar_that_needs_longer_starts_over_with_more_time_until_the_limit() -> None:
    waiting = jobs("a")
    assert waiting.slices == [QUICK_S, SECOND_S, 1.0]
    for level in range(3):
        job = waiting.next()
        assert job is not None
        assert job.level == level
        assert (waiting.out_of_time(0) is None) == (level == 2)
    assert waiting.next() is None
    assert not waiting.running


def test_a_low_limit_is_the_only_slice() -> None:
    assert CompileJobs(0.02).slices == [0.02]


def test_a_new_grammar_starts_while_slow_ones_run() -> None:
    waiting = jobs("a", "a", "a")
    for id in range(3):
        assert waiting.next() is not None
        waiting.out_of_time(id)
    assert [job.level for job in iter(waiting.next, None)] == [1] * SLOW_LANES
    waiting.add(CompileJob(9, "a", ["regex", "b"]))
    job = waiting.next()
    assert job is not None
    assert job.id == 9


def test_only_one_new_grammar_runs_at_a_time() -> None:
    waiting = jobs("a", "a")
    assert waiting.next() is not None
    assert waiting.next() is None
    waiting.done(0)
    assert waiting.next() is not None


def test_tenants_take_turns() -> None:
    waiting = jobs("many", "many", "many", "one")
    order = []
    while (job := waiting.next()) is not None:
        order.append(job.tenant)
        waiting.done(job.id)
    assert order == ["many", "one", "many", "many"]


def test_what_is_dropped_does_not_start() -> None:
    waiting = jobs("a", "a")
    waiting.drop(0)
    job = waiting.next()
    assert job is not None
    assert job.id == 1
    waiting.done(1)
    assert waiting.next() is None
