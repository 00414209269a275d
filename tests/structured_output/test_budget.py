"""Following a grammar costs a bounded time for each token, and a limit that is hit ends its output with the reason."""

from __future__ import annotations

import gc
import json
import random
import time

import pytest

from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output import matcher
from inferengine.structured_output.build import _some_token
from inferengine.structured_output.compiler import RETIRE_S
from inferengine.structured_output.matcher import BURST_S, Budget, GrammarUsage, TokenMatcher
from inferengine.structured_output.spec import GrammarSpec, read_grammar
from tests.structured_output.builders import Vocabulary
from tests.structured_output.hostile import hostile

AS_A, AS_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary("byte_level")


def test_each_mask_earns_its_time_and_what_is_saved_is_bounded() -> None:
    budget = Budget(0.003, GrammarUsage())
    for _ in range(1000):
        budget.spend(0.001, earned=True)
    budget.spend(BURST_S, earned=False)
    with pytest.raises(InvalidRequest, match="takes too long to say what may come next"):
        budget.spend(0.004, earned=True)


def test_the_choices_of_a_request_share_one_budget(vocabulary: Vocabulary) -> None:
    first, second = vocabulary.compiler.compile_many(GrammarSpec("regex", "[a-z]+"), 2)
    assert first._budget is second._budget
    assert vocabulary.compiler.compile(GrammarSpec("regex", "[a-z]+"))._budget is not first._budget


def test_a_constant_of_megabytes_is_refused_where_each_token_would_read_it_again(vocabulary: Vocabulary) -> None:
    """60 ms for each token of everybody's step, after 0.4 s for the first."""
    with pytest.raises(InvalidRequest, match=r"takes too long|could not be compiled"):
        vocabulary.compiler.compile(GrammarSpec("json_schema", json.dumps({"const": "ab cd " * 40_000})))


@pytest.mark.parametrize("count", [500, 1000])
def test_hundreds_of_optional_properties_are_followed(
    vocabulary: Vocabulary, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `{` led to 2,007 alternatives of at most 2,000."""
    monkeypatch.setattr(matcher, "BURST_S", 5.0)  # the first mask takes 30 ms, and more than 100 beside other tests
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(count)}}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    text = vocabulary.generate(GrammarSpec("json_schema", json.dumps(schema)), 3, max_tokens=40_000)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", '{"$ref": "#"}'),
        GrammarSpec("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": AS_B, "b": AS_A}})),
        GrammarSpec("lark", "root ::= root"),
        GrammarSpec("lark", "start: start"),
    ],
    ids=lambda spec: spec.source[:20],
)
def test_a_grammar_of_nothing_but_itself_is_refused_before_it_runs(vocabulary: Vocabulary, spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequest, match="no text can match it"):
        vocabulary.compiler.compile(spec)


def test_a_matcher_that_fails_has_not_come_to_an_end(vocabulary: Vocabulary) -> None:
    """llguidance says of a failed matcher that it has stopped: that looked like a complete output."""
    matcher = vocabulary.compiler.compile(GrammarSpec("regex", "[a-z]+"))
    matcher._matcher.consume_tokens([vocabulary.fast.token_to_id("1")])
    assert matcher._is_stopped()
    with pytest.raises(InvalidRequest):
        matcher.is_terminated()


def test_a_matcher_that_fails_can_be_restored_to_an_earlier_point(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compiler.compile(GrammarSpec("regex", "abc"))
    ids = {letter: vocabulary.fast.token_to_id(letter) for letter in "abc1"}
    assert matcher.accept(ids["a"])
    matcher._matcher.consume_tokens([ids["1"]])
    with pytest.raises(InvalidRequest):
        matcher.rollback(1)
    matcher.restore([ids["a"]])
    assert not matcher.is_terminated()
    assert [matcher.accept(ids[letter]) for letter in "abc"] == [False, True, True]
    assert matcher.is_terminated()


def test_a_restored_matcher_may_spend_as_one_that_has_saved(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compiler.compile(GrammarSpec("regex", "[a-z]+"))
    with pytest.raises(InvalidRequest):
        matcher._budget.spend(2 * BURST_S, earned=False)
    matcher.restore([])
    matcher._budget.spend(0.9 * BURST_S, earned=False)


def test_garbage_that_is_collected_meanwhile_is_not_charged_to_the_grammar(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compiler.compile(GrammarSpec("regex", "[c-x]+"))
    row = memoryview(bytearray(4 * -(-vocabulary.size // 32)))
    matcher.fill_bitmask(row)  # whatever is slow once

    def collect_for_long(phase: str, _: dict[str, int]) -> None:
        end_s = time.thread_time() + 2 * BURST_S
        while phase == "start" and time.thread_time() < end_s:
            pass

    threshold = gc.get_threshold()
    gc.callbacks.append(collect_for_long)
    gc.set_threshold(1)  # at each object
    try:
        matcher.fill_bitmask(row)
        assert matcher.forced() == []
        matcher.fill_bitmask(row)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collect_for_long)


def test_a_grammar_that_was_used_for_long_begins_anew(vocabulary: Vocabulary) -> None:
    """Its outputs share the states that they make, which are never given back."""
    spec = GrammarSpec("regex", "[b-y]+")
    matcher = vocabulary.compiler.compile(spec)
    compiled = vocabulary.compiler.num_compiled
    matcher._budget.usage.seconds = RETIRE_S + 0.1
    vocabulary.compiler.compile(spec)
    assert vocabulary.compiler.num_compiled == compiled + 1


def test_what_one_output_uses_up_is_told_to_its_siblings_and_not_to_later_requests(vocabulary: Vocabulary) -> None:
    """They share a lexer: after one had hit its limit, another was told that a token of its mask is not allowed."""
    spec = GrammarSpec("regex", "(((b{0,1509}){2,1944}){1,1238})")
    first, second = vocabulary.compiler.compile_many(spec, 2)
    mask = bytearray(4 * -(-vocabulary.size // 32))

    def follow(matcher: TokenMatcher) -> None:
        while True:
            matcher.fill_bitmask(memoryview(mask))
            matcher.accept(vocabulary.fast.token_to_id("b"))

    second.fill_bitmask(memoryview(mask))
    with pytest.raises(InvalidRequest, match="needs too many states"):
        follow(first)
    with pytest.raises(InvalidRequest, match="needs too many states"):
        follow(second)
    later = vocabulary.compiler.compile(spec)
    later.fill_bitmask(memoryview(mask))
    assert later.accept(vocabulary.fast.token_to_id("b"))


@pytest.mark.parametrize("seed", range(60))
def test_random_hostile_grammars_end_as_refusals_or_as_outputs(vocabulary: Vocabulary, seed: int) -> None:
    draw, refusal = random.Random(seed), None
    try:
        spec = read_grammar(hostile(draw))
        assert spec is not None
        compiled = vocabulary.compiler.num_compiled
        matcher = vocabulary.compiler.compile(spec)
        if vocabulary.compiler.num_compiled > compiled:  # what is used grows until the cache is looked at again
            assert vocabulary.compiler.cache.size <= vocabulary.compiler.cache.max_bytes
        mask = bytearray(4 * -(-vocabulary.size // 32))
        for _ in range(20):
            matcher.fill_bitmask(memoryview(mask))
            token = _some_token(mask, draw)
            if token is None or not matcher.accept(token) or matcher.is_terminated():
                break
            matcher.forced()
    except InferEngineError as error:
        refusal = error
    if refusal is not None:
        assert refusal.http_status == 400, refusal
        assert "verbose" not in refusal.message
        assert len(refusal.message) <= 400
