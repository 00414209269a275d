"""Resumed requests: cut anywhere, the whole output is that of an undisturbed request."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from inferengine.core.sequence import Request
from tests.core.builders import (
    HalfRightProposer,
    Run,
    ThirdsGrammar,
    expected_output,
    make_capacity,
    make_request,
)

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])


def cut(request: Request, num_tokens: int) -> Request:
    """Return the same request with the first tokens of its output."""
    return replace(request, emitted_ids=array("I", expected_output(request)[:num_tokens]))


def next_trial(run: Run, *requests: Request) -> Run:
    """Take the next trial as the engine's loop does."""
    for request in requests:
        run.outputs[request.uid] = list(request.emitted_ids)
        run.core.submit(request)
        if request.grammar is not None:
            grammar = ThirdsGrammar()
            assert all(grammar.accept(token) for token in request.emitted_ids)
            run.core.grammar_ready(request.uid, grammar)
        if (row := run.core.end_if_complete(request.uid)) is not None:
            run.finished[row.uid], run.rows[row.uid] = (row.reason, row.detail), row
    return run.to_end()


@OVERLAP
@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 11, 29])
def test_the_output_is_that_of_an_undisturbed_request(num_tokens: int, grammar: bool, max_in_flight: int) -> None:
    request = make_request(1, 9, 30, seed=5, grammar=grammar)
    run = next_trial(Run(max_in_flight=max_in_flight, budget=7), cut(request, num_tokens))
    assert run.outputs[1] == expected_output(request)
    assert run.finished[1][0] == "length"
    assert (run.rows[1].num_prompt, run.rows[1].num_output) == (9, 30)  # type: ignore[attr-defined]


@OVERLAP
def test_each_choice_continues_from_its_own_length(max_in_flight: int) -> None:
    whole = [make_request(uid, list(range(18)), 20, seed=uid, fork_of=None if uid == 1 else 1) for uid in range(1, 5)]
    run = next_trial(
        Run(make_capacity(64), max_in_flight=max_in_flight, budget=7),
        *(cut(request, num_tokens) for request, num_tokens in zip(whole, (7, 0, 20, 3), strict=True)),
    )
    assert run.outputs == {request.uid: expected_output(request) for request in whole}
    assert set(run.finished) == {1, 2, 3, 4}


@pytest.mark.parametrize("on_device", [False, True])
def test_speculation_changes_nothing(on_device: bool) -> None:
    requests = [make_request(uid, 6, 25, seed=uid) for uid in range(1, 4)]
    proposer = HalfRightProposer(on_device=on_device)
    run = next_trial(Run(proposer=proposer, max_drafts=3), *(cut(request, 8) for request in requests))
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


def test_preemption_changes_nothing() -> None:
    requests = [make_request(uid, 8, 30, seed=uid) for uid in range(1, 5)]
    run = next_trial(Run(make_capacity(14)), *(cut(request, 10) for request in requests))
    assert run.scheduler.stats.num_preemptions > 0
    assert run.outputs == {request.uid: expected_output(request) for request in requests}


def test_output_that_lacks_only_its_end_ends_without_a_step() -> None:
    by_length = make_request(1, 5, 6, seed=1)
    by_token = make_request(2, 5, 60, seed=2, stop_token_ids=(expected_output(make_request(2, 5, 4, seed=2))[-1],))
    by_grammar = make_request(3, 5, 90, seed=3, grammar=True)
    run = next_trial(Run(), *(cut(request, 90) for request in (by_length, by_token, by_grammar)))
    assert run.finished == {
        1: ("length", None),
        2: ("stop", by_token.params.stop_token_ids[0]),
        3: ("stop", ""),
    }
    assert run.executor.num_computed_tokens == 0
