"""The tokens that a request's own fields allow of those that its grammar allows."""

from __future__ import annotations

import dataclasses

import pytest

from inferengine.core.constraints import TokenRules, bits, token_rules
from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.sequence import RowFailure
from inferengine.sampling_params import SamplingParams
from tests.core.builders import HalfRightProposer, Run, expected_output, make_request

ALL = bits(range(40))


def rules(*, stop_ids: tuple[int, ...] = (1,), **fields: object) -> TokenRules:
    made = token_rules(SamplingParams(**fields), stop_ids)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_without_such_fields_there_are_no_rules() -> None:
    assert token_rules(SamplingParams(temperature=0.5, logit_bias=((3, -100.0),)), (1,)) is None


def test_each_field_forbids_its_tokens() -> None:
    assert rules(allowed_token_ids=(3, 5)).allowed(ALL, 0, ()) == bits([3, 5])
    assert rules(bad_words_ids=((3,), (5,))).allowed(bits([3, 5, 7]), 0, ()) == bits([7])
    assert rules(min_tokens=2).allowed(bits([1, 2]), 1, (9,)) == bits([2])
    assert rules(min_tokens=2).allowed(bits([1, 2]), 2, (9, 9)) == bits([1, 2])


def test_a_word_of_several_tokens_forbids_its_last_where_the_others_came() -> None:
    made = rules(bad_words_ids=((4, 5, 6), (2, 6, 8)))
    assert made.num_before == 2
    assert made.allowed(bits([6]), 2, (4, 5)) == 0
    assert made.allowed(bits([6]), 2, (5, 5)) == bits([6])
    assert made.allowed(bits([6]), 1, (5,)) == bits([6])


def test_choices_share_the_rules_of_the_first() -> None:
    """A list as long as the vocabulary takes milliseconds to read, and the choices of a request come together."""
    asked = {"allowed_token_ids": tuple(range(40)), "grammar": True}
    run = Run().submit(*[make_request(uid, fork_of=None if uid == 1 else 1, **asked) for uid in (1, 2, 3)])  # type: ignore[arg-type]
    first, *others = (run.scheduler.sequences[uid].rules for uid in (1, 2, 3))
    assert first is not None
    assert all(rules is first for rules in others)


def test_the_message_names_the_fields() -> None:
    made = rules(allowed_token_ids=(3,), bad_words_ids=((3,),))
    assert made.no_token_message(0, has_grammar=True).startswith(
        "the grammar, allowed_token_ids and bad_words leave no token to begin with"
    )
    assert (
        rules(min_tokens=3)
        .no_token_message(2, has_grammar=False)
        .startswith("min_tokens leaves no token after 2 tokens")
    )


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_request_without_a_token_left_ends_alone_and_says_why(max_in_flight: int) -> None:
    """ThirdsGrammar forbids a token that makes a multiple of 3 with the sum so far: 3 is refused as the first."""
    stuck = make_request(1, max_tokens=20, grammar=True)
    stuck = dataclasses.replace(stuck, params=stuck.params.replace(allowed_token_ids=(3,)))
    run = Run(max_in_flight=max_in_flight).submit(stuck, make_request(2, max_tokens=10)).to_end()
    reason, detail = run.finished[1]
    assert (reason, detail[0], detail[2]) == ("error", "invalid_request", "grammar")  # type: ignore[index]
    assert "the grammar and allowed_token_ids leave no token" in detail[1]  # type: ignore[index]
    assert run.finished[2][0] == "length"
    run.scheduler.check()


def test_a_failed_row_is_an_invalid_request_where_its_fields_allow_no_token() -> None:
    request = make_request(1, max_tokens=5)
    params = request.params.replace(allowed_token_ids=(3,), bad_words_ids=((3,),))
    run = Run()
    computed = run.executor.run

    def fail(plan: StepPlan, words: bytearray | None) -> StepResult:
        return computed(plan, words)._replace(failed_rows={0: RowFailure.NO_TOKEN_ALLOWED})

    run.executor.run = fail  # type: ignore[method-assign]
    run.submit(dataclasses.replace(request, params=params)).to_end()
    reason, detail = run.finished[1]
    assert (reason, detail[0], detail[2]) == ("error", "invalid_request", "allowed_token_ids")  # type: ignore[index]


def test_draft_tokens_that_were_accepted_before_no_token_was_allowed_belong_to_the_output() -> None:
    request = make_request(1, max_tokens=40)
    given = expected_output(request)
    params = request.params.replace(allowed_token_ids=(3,), bad_words_ids=((given[5], 3),))
    run = Run(proposer=HalfRightProposer(wrong_every=10**9), max_drafts=4)
    computed = run.executor.run

    def fail(plan: StepPlan, words: bytearray | None) -> StepResult:
        """Fail the draw after output token 5: it has none to choose from."""
        result = computed(plan, words)
        first = plan.starts[0] + 1 - request.num_prompt  # output tokens before those of this step
        if not plan.num_drafts or first > 5 or first + len(result.token_ids) < 7:
            return result
        kept = 7 - first
        return result._replace(
            token_ids=[*result.token_ids[: kept - 1], 0],
            num_emitted=[kept],
            failed_rows={0: RowFailure.NO_TOKEN_ALLOWED},
        )

    run.executor.run = fail  # type: ignore[method-assign]
    run.submit(dataclasses.replace(request, params=params)).to_end()
    assert run.outputs[1] == given[:6]
    reason, detail = run.finished[1]
    assert (reason, detail[0]) == ("error", "invalid_request")  # type: ignore[index]
    assert "leave no token after 6 tokens of output" in detail[1]  # type: ignore[index]
    assert run.rows[1].num_output == 6  # type: ignore[attr-defined]
    run.scheduler.check()
