"""`bad_words` as token sequences, with the tokenizer that comes with the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import inferengine
from frontends.http.bodies import read_bad_words
from inferengine.text import Tokenizer

EMBEDDED = Path(inferengine.__file__).parent / "assets" / "embedded"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files({"tokenizer.json": (EMBEDDED / "tokenizer.json").read_bytes()})


def test_a_word_is_kept_out_after_a_space_too_where_that_makes_fewer_tokens(tokenizer: Tokenizer) -> None:
    alone = tokenizer.encode("there", add_special_tokens=False)
    (after_a_space,) = tokenizer.encode(" there", add_special_tokens=False)
    assert len(alone) > 1
    assert read_bad_words(["there"], tokenizer) == [alone, [after_a_space]]


@pytest.mark.parametrize("word", ["time", " time", "fox", "Übermut", "a b c", "🎉"])
def test_every_sequence_is_the_word_and_nothing_else(tokenizer: Tokenizer, word: str) -> None:
    sequences = read_bad_words([word], tokenizer)
    assert {tokenizer.decode(sequence).strip() for sequence in sequences} == {word.strip()}
    assert len(sequences) == 2
