"""What counts as a difference. The plain engine is the real one, on the embedded model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.gauntlet.asks import Ask
from tests.gauntlet.checkpoints import prepare
from tests.gauntlet.comparison import TOLERANCES, compare
from tests.gauntlet.oracle import Oracle
from tests.gauntlet.outcomes import Outcome, Row
from tests.gauntlet.reference import NUDGE, Reference

ASK = Ask(
    0, 0.0, "wire", {"ids": list(range(30, 60))},
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}, reply="both",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    reference = Reference(prepare("embedded", tmp_path_factory.mktemp("gauntlet")))
    yield reference
    reference.close()


def differences(ask: Ask, outcome: Outcome, reference: Reference, **changes: Any) -> list[str]:
    values = {"killed": False, "kills_are_seen": False, "may_overload": False, **changes}
    return compare(ask, outcome, reference, TOLERANCES["float32"], **values)


def right(ask: Ask, reference: Reference) -> Outcome:
    """Return what a good engine gives."""
    return copy.deepcopy(reference.answer(ask))


def test_the_expected_outcome_has_no_difference(reference: Reference) -> None:
    for ask in (ASK, replace(ASK, params={"seed": 5, "max_tokens": 9, "n": 3, "prompt_logprobs": 2})):
        assert differences(ask, right(ask, reference), reference) == []


def test_a_wrong_token_is_a_difference(reference: Reference) -> None:
    outcome = right(ASK, reference)
    assert outcome.choices[0].tokens is not None
    outcome.choices[0].tokens[5] += 1
    assert differences(ASK, outcome, reference)[0].startswith("tokens: greedy choice 0 differs at 5")


def test_a_token_that_ties_is_none_and_what_follows_is_what_follows_it(reference: Reference) -> None:
    """A bias makes two tokens tie to the last bits: an engine that draws the other one is right."""
    expected = reference.answer(ASK).choices[0]
    assert expected.tokens is not None
    assert expected.logprobs is not None
    row = expected.logprobs[0]
    second = next(token for token in row.top if token != expected.tokens[0])
    ask = replace(ASK, params={**ASK.params, "logit_bias": [[second, row.logprob - row.top[second] - NUDGE]]})
    outcome = copy.deepcopy(reference.answer(ask, nudges=((second, NUDGE), (expected.tokens[0], -NUDGE))))
    assert outcome.choices[0].tokens is not None
    assert outcome.choices[0].tokens[0] != expected.tokens[0]
    assert differences(ask, outcome, reference) == []
    outcome.choices[0].tokens[-1] += 1
    assert differences(ask, outcome, reference) != []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda choice: setattr(choice, "text", choice.text + "x"), "text"),
        (lambda choice: setattr(choice, "reason", "stop"), "finish"),
        (lambda choice: setattr(choice, "ends", 2), "ends"),
        (lambda choice: setattr(choice, "ends", 0), "ends"),
        (lambda choice: choice.tokens.pop(), "tokens"),
        (lambda choice: choice.logprobs.__setitem__(3, Row(-0.5, 1, {})), "logprobs"),
        (lambda choice: (setattr(choice, "reason", "error"), setattr(choice, "detail", "engine_error")), "failed"),
    ],
)
def test_what_else_is_a_difference(change: Any, kind: str, reference: Reference) -> None:
    outcome = right(ASK, reference)
    change(outcome.choices[0])
    found = differences(ASK, outcome, reference)
    assert found
    assert found[0].startswith(kind)


def test_a_client_that_left_has_the_beginning(reference: Reference) -> None:
    outcome = right(ASK, reference)
    choice = outcome.choices[0]
    assert choice.tokens is not None
    assert choice.logprobs is not None
    outcome.left, choice.reason, choice.ends, choice.text = True, None, 0, None
    choice.tokens, choice.logprobs = choice.tokens[:4], choice.logprobs[:4]
    assert differences(ASK, outcome, reference) == []
    choice.tokens[3] += 1
    assert differences(ASK, outcome, reference) != []


def test_a_text_may_be_cut_off_within_a_character(reference: Reference) -> None:
    outcome = right(ASK, reference)
    choice = outcome.choices[0]
    assert choice.text is not None
    outcome.left, choice.reason, choice.ends, choice.tokens, choice.logprobs = True, None, 0, None, None
    whole = choice.text
    choice.text = whole[:5] + "\ufffd"
    assert differences(ASK, outcome, reference) == []
    choice.text = whole[:5] + "\ufffd" + whole[6:8]
    assert differences(ASK, outcome, reference) != []


def test_a_killed_engine_may_end_requests_only_where_that_is_expected(reference: Reference) -> None:
    outcome = Outcome(refused="engine_restarted")
    assert differences(ASK, outcome, reference, killed=True, kills_are_seen=True) == []
    assert differences(ASK, outcome, reference, killed=True) != []


def test_who_asks_while_there_is_no_engine_may_be_refused(reference: Reference) -> None:
    outcome = Outcome(refused="engine_unavailable")
    assert differences(ASK, outcome, reference, killed=True) == []
    assert differences(ASK, outcome, reference, killed=False) != []


def test_transformers_sees_a_wrong_token_and_a_wrong_logprob(reference: Reference) -> None:
    oracle = Oracle(reference.checkpoint, reference, device="cpu", dtype="float32")
    outcome = right(ASK, reference)
    assert oracle.judge(ASK, outcome) == []
    choice = outcome.choices[0]
    assert choice.tokens is not None
    assert choice.logprobs is not None
    choice.logprobs[2] = choice.logprobs[2]._replace(logprob=-3.0)
    assert oracle.judge(ASK, outcome)[0].startswith("transformers: logprobs")
    choice.tokens[4] += 1
    assert any(line.startswith("transformers: greedy") for line in oracle.judge(ASK, outcome))


def test_a_tie_is_seen_in_a_text_alone(reference: Reference) -> None:
    expected = reference.answer(ASK).choices[0]
    assert expected.tokens is not None
    assert expected.logprobs is not None
    row = expected.logprobs[0]
    second = next(token for token in row.top if token != expected.tokens[0])
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    bias = [[second, row.logprob - row.top[second] - NUDGE]]
    ask = replace(ASK, params={**params, "logit_bias": bias}, reply="text")
    other = reference.answer(ask, nudges=((second, NUDGE), (expected.tokens[0], -NUDGE)))
    outcome = copy.deepcopy(other)
    outcome.choices[0].tokens = None
    assert outcome.choices[0].text != reference.answer(ask).choices[0].text
    assert differences(ask, outcome, reference) == []
    outcome.choices[0].text = (outcome.choices[0].text or "") + "!"
    assert differences(ask, outcome, reference) != []
