"""Outputs under one grammar are spread over lexers, so that their masks can be computed at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from inferengine.errors import InferEngineError
from inferengine.structured_output.compiler import OUTPUTS_PER_LEXER
from inferengine.structured_output.matcher import TokenMatcher
from inferengine.structured_output.spec import GrammarSpec
from tests.structured_output.builders import Vocabulary

WORDS = GrammarSpec("regex", "([a-z]{1,9}[ ,]){1000}")


@pytest.fixture
def vocabulary() -> Iterator[Vocabulary]:
    vocabulary = Vocabulary("byte_level", max_lexers=3)
    yield vocabulary
    vocabulary.compiler.close()


def lexers(matchers: list[TokenMatcher]) -> list[int]:
    """Return how many of the matchers have each of the lexers."""
    found = [matcher.lexer for matcher in matchers]
    return sorted(found.count(lexer) for lexer in set(found))


def test_a_few_outputs_share_a_lexer(vocabulary: Vocabulary) -> None:
    matchers = [vocabulary.compiler.compile(WORDS) for _ in range(OUTPUTS_PER_LEXER)]
    assert lexers(matchers) == [OUTPUTS_PER_LEXER]


def test_more_outputs_are_spread_evenly_over_at_most_so_many_lexers(vocabulary: Vocabulary) -> None:
    matchers = [vocabulary.compiler.compile(WORDS) for _ in range(6 * OUTPUTS_PER_LEXER)]
    assert lexers(matchers) == [2 * OUTPUTS_PER_LEXER] * 3


def test_requests_that_waited_for_the_same_trial_are_spread_as_well(vocabulary: Vocabulary) -> None:
    answers: list[Future[list[TokenMatcher] | InferEngineError]] = [Future() for _ in range(3 * OUTPUTS_PER_LEXER)]
    for answer in answers:
        vocabulary.compiler.submit(WORDS, answer.set_result)
    matchers = []
    for answer in answers:
        found = answer.result(60)
        assert not isinstance(found, InferEngineError)
        matchers += found
    assert lexers(matchers) == [OUTPUTS_PER_LEXER] * 3


def test_outputs_that_ended_make_room(vocabulary: Vocabulary) -> None:
    for _ in range(3 * OUTPUTS_PER_LEXER):
        vocabulary.compiler.compile(WORDS)
    assert vocabulary.compiler.num_compiled == 1


def test_the_choices_of_a_request_share_a_lexer_because_they_share_a_budget(vocabulary: Vocabulary) -> None:
    matchers = vocabulary.compiler.compile_many(WORDS, 2 * OUTPUTS_PER_LEXER)
    assert lexers(matchers) == [2 * OUTPUTS_PER_LEXER]


def test_another_lexer_allows_the_same_tokens(vocabulary: Vocabulary) -> None:
    matchers = [vocabulary.compiler.compile(WORDS) for _ in range(2 * OUTPUTS_PER_LEXER)]
    assert len(lexers(matchers)) == 2
    letters = [vocabulary.fast.token_to_id(letter) for letter in "ab"]
    masks = set()
    for matcher in matchers:
        assert all(matcher.accept(letter) for letter in letters)
        mask = bytearray(4 * -(-vocabulary.size // 32))
        matcher.fill_bitmask(memoryview(mask))
        masks.add(bytes(mask))
    assert len(masks) == 1
    assert any(masks.pop())
