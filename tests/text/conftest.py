from __future__ import annotations

import pytest

from inferengine.text import Tokenizer
from tests.text.vocabularies import byte_level, load, sentencepiece, word_piece


@pytest.fixture(scope="session", params=[byte_level, sentencepiece, word_piece], ids=lambda make: make.__name__)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param())


@pytest.fixture(scope="session", params=[byte_level, sentencepiece], ids=lambda make: make.__name__)
def byte_exact_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Yield the tokenizers that can spell every text."""
    return load(request.param())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load(byte_level())
