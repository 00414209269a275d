"""Grammars in the core: the mask decides, forced tokens skip the model, a failing grammar ends its request alone."""

from __future__ import annotations

import pytest

from inferengine.core.scheduler.scheduler import FillGroup, MaskedRow, MaskOutcome, RunGroups, one_after_the_other
from inferengine.core.sequence import GRAMMAR_COMPLETE
from inferengine.errors import InvalidRequest
from tests.core.builders import (
    HalfRightProposer,
    Run,
    ThirdsGrammar,
    expected_output,
    make_capacity,
    make_request,
)

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])


def mixed(count: int = 6) -> list:  # type: ignore[type-arg]
    return [
        make_request(uid, prompt=4 * uid, max_tokens=60, seed=uid, grammar=uid % 2 == 0) for uid in range(1, count + 1)
    ]


@OVERLAP
@pytest.mark.parametrize("num_blocks", [200, 40])
@pytest.mark.parametrize("drafts", [0, 3])
def test_outputs_obey_their_grammar_beside_free_ones(max_in_flight: int, num_blocks: int, drafts: int) -> None:
    run = Run(
        make_capacity(num_blocks),
        budget=16,
        max_in_flight=max_in_flight,
        proposer=HalfRightProposer() if drafts else None,
        max_drafts=drafts,
    )
    run.submit(*mixed()).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in mixed()}
    assert run.scheduler.stats.num_forced_tokens > 0


def test_a_grammar_after_which_nothing_can_follow_ends_the_request() -> None:
    run = Run().submit(make_request(1, max_tokens=100, grammar=True)).to_end()
    assert (len(run.outputs[1]), run.finished[1]) == (50, ("stop", GRAMMAR_COMPLETE))


def test_forced_tokens_cost_no_step_of_their_own() -> None:
    run = Run().submit(make_request(1, max_tokens=100, grammar=True)).to_end()
    assert run.scheduler.stats.num_steps == 50 - run.scheduler.stats.num_forced_tokens


def test_with_many_running_forced_tokens_are_drawn_like_others_and_are_the_same() -> None:
    requests = [make_request(1, max_tokens=60, grammar=True)]
    requests += [make_request(uid, max_tokens=20, seed=uid) for uid in range(2, 6)]
    run = Run(max_running_to_force=3).submit(*requests)
    run.step()
    while len(run.scheduler.running) > 3:
        assert run.scheduler.stats.num_forced_tokens == 0
        run.step()
    run.to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
    assert run.scheduler.stats.num_forced_tokens > 0, "who is left may run ahead"


def test_forced_tokens_end_at_the_limit() -> None:
    for max_tokens in range(1, 30):
        request = make_request(1, max_tokens=max_tokens, grammar=True)
        assert Run().submit(request).to_end().outputs[1] == expected_output(request)


def test_a_request_that_waits_for_its_grammar_delays_no_other() -> None:
    run = Run()
    run.compile_at_once = False
    waiting, free = make_request(1, grammar=True), make_request(2)
    run.submit(waiting, free).step()
    assert run.scheduler.snapshot().num_waiting == 1
    for _ in range(5):
        run.step()
    assert run.outputs[1] == []
    assert run.finished[2] == ("length", None)
    run.core.grammar_ready(1, ThirdsGrammar())
    assert run.to_end().outputs[1] == expected_output(waiting)


def test_a_request_can_be_cancelled_while_its_grammar_compiles() -> None:
    run = Run()
    run.compile_at_once = False
    run.submit(make_request(1, grammar=True))
    run.cancel(1)
    assert run.finished[1][0] == "abort"
    run.core.grammar_ready(1, ThirdsGrammar())
    assert not run.core.has_work


@OVERLAP
def test_a_failing_grammar_ends_its_request_alone(max_in_flight: int) -> None:
    run = Run(max_in_flight=max_in_flight).submit(*mixed(4))
    broken = run.scheduler.sequences[2].grammar
    assert isinstance(broken, ThirdsGrammar)

    def fail(row: memoryview) -> None:
        raise ValueError("out of fuel")

    broken.fill_bitmask = fail  # type: ignore[method-assign]
    run.to_end()
    assert run.finished[2] == ("error", ("engine_error", "Following the grammar failed: ValueError."))
    for request in mixed(4):
        if request.uid != 2:
            assert run.outputs[request.uid] == expected_output(request)


class SlowAhead(ThirdsGrammar):
    """Fails at the mask after `ahead` draft tokens, and cannot be followed any further then, unless it is restored."""

    def __init__(self, ahead: int, *, lasting: bool = False) -> None:
        super().__init__()
        self.ahead, self.lasting = ahead, lasting
        self.num_masks = 0  # since it was last where the output ends
        self.is_broken = False

    def fill_bitmask(self, row: memoryview) -> None:
        self.is_broken |= self.num_masks >= self.ahead
        if self.is_broken:
            if self.ahead and not self.lasting:
                row[:] = bytes(len(row))  # no token: what a mask that is half made may look like
            raise InvalidRequest("grammar", "is slow")
        self.num_masks += 1
        super().fill_bitmask(row)

    def rollback(self, num_tokens: int) -> None:
        if self.is_broken:
            raise InvalidRequest("grammar", "is slow")
        self.num_masks = 0
        super().rollback(num_tokens)

    def restore(self, output: list[int]) -> None:
        if self.lasting:
            raise InvalidRequest("grammar", "stays slow")
        self.num_masks, self.is_broken = 0, False
        super().restore(output)


def run_ahead(grammar: SlowAhead, *, wrong_every: int = 10**9) -> Run:
    """Return the run of one request with up to three draft tokens under this grammar."""
    run = Run(proposer=HalfRightProposer(wrong_every=wrong_every), max_drafts=3)
    run.compile_at_once = False
    run.submit(make_request(1, max_tokens=40, grammar=True))
    run.core.grammar_ready(1, grammar)
    return run.to_end()


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("wrong_every", [3, 10**9])
def test_a_limit_met_after_a_draft_token_costs_the_draft_tokens_from_there_on_alone(
    ahead: int, wrong_every: int
) -> None:
    run = run_ahead(SlowAhead(ahead), wrong_every=wrong_every)
    assert run.outputs[1] == expected_output(make_request(1, max_tokens=40, grammar=True))
    assert run.finished[1][0] == "length"
    assert run.scheduler.stats.num_corrupted == 0


def test_a_request_that_met_a_limit_after_a_draft_token_has_no_more_draft_tokens() -> None:
    assert run_ahead(SlowAhead(1)).scheduler.snapshot().num_verified == 0
    assert run_ahead(SlowAhead(2)).scheduler.snapshot().num_verified == 1


def test_a_grammar_that_stays_at_its_limit_ends_the_request() -> None:
    reason, detail = run_ahead(SlowAhead(1, lasting=True)).finished[1]
    assert (reason, detail[:2]) == ("error", ("invalid_request", "stays slow"))  # type: ignore[index]


def test_a_limit_at_the_first_draw_ends_the_request() -> None:
    run = run_ahead(SlowAhead(0))
    assert (run.outputs[1], run.finished[1][0]) == ([], "error")


def test_rows_are_grouped_by_lexer_and_groups_may_be_filled_in_any_order() -> None:
    def masks(run_groups: RunGroups, lexer: object) -> tuple[bytes, list[int]]:
        run = Run()
        run.submit(*[make_request(uid, grammar=True) for uid in range(1, 7)])
        for uid in (2, 4, 5):
            grammar = run.scheduler.sequences[uid].grammar
            assert isinstance(grammar, ThirdsGrammar)
            grammar.lexer = lexer
        step = run.scheduler.schedule(0.0).step
        assert step is not None
        sizes: list[int] = []

        def counted(fill: FillGroup, groups: list[list[MaskedRow]]) -> list[list[MaskOutcome]]:
            sizes.extend(sorted(map(len, groups)))
            return run_groups(fill, groups)

        found, failed = run.scheduler.fill_masks(step, 0.0, counted)
        assert not failed
        return bytes(found), sizes

    def backwards(fill: FillGroup, groups: list[list[MaskedRow]]) -> list[list[MaskOutcome]]:
        return [fill(group) for group in groups[::-1]][::-1]

    expected, sizes = masks(one_after_the_other, object())
    assert sizes == [1, 1, 1, 3]
    assert masks(backwards, object()) == (expected, sizes)
