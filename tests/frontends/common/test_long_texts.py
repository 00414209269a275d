"""Long texts: refused before they are tokenized where they cannot fit, else a piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import inferengine
from frontends.common import model as served_model
from frontends.common.model import LongTexts, TooManyTokens
from inferengine.errors import InferEngineError
from inferengine.text import Tokenizer
from inferengine.text.tokenizer import PIECE_CHARACTERS

ASSETS = Path(inferengine.__file__).parent / "assets" / "embedded"
TEXT = "once upon a time there was a fox. " * 10_000


class Watched(Tokenizer):
    """Notes how long the texts are that are tokenized, and which of them belong to whom."""

    sizes: list[int]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.sizes.append(len(text))
        return super()._encode(text, add_special_tokens)


@pytest.fixture(scope="module")
def loaded() -> Watched:
    return Watched.from_files({"tokenizer.json": (ASSETS / "tokenizer.json").read_bytes()})  # type: ignore[return-value]


@pytest.fixture
def tokenizer(loaded: Watched) -> Watched:
    loaded.sizes = []
    return loaded


def test_what_cannot_fit_by_its_length_is_not_tokenized_at_all(tokenizer: Watched) -> None:
    with pytest.raises(TooManyTokens):
        asyncio.run(LongTexts().encode(tokenizer, "a" * 3_800_000, True, most=2048))
    assert tokenizer.sizes == []


def test_what_turns_out_too_long_is_tokenized_no_further(tokenizer: Watched) -> None:
    most = tokenizer.least_tokens(TEXT)
    with pytest.raises(TooManyTokens):
        asyncio.run(LongTexts().encode(tokenizer, TEXT, True, most=most))
    assert sum(tokenizer.sizes) < len(TEXT) / 2


def test_pieces_are_small_and_make_the_same_tokens(tokenizer: Watched) -> None:
    found = asyncio.run(LongTexts().encode(tokenizer, TEXT, True, most=10**9))
    assert max(tokenizer.sizes) <= PIECE_CHARACTERS
    assert list(found) == tokenizer._fast.encode(TEXT).ids


@pytest.mark.parametrize("last", [1, 100, 30_000, 10**8])
def test_of_a_truncated_text_only_the_end_is_tokenized(tokenizer: Watched, last: int) -> None:
    found = asyncio.run(LongTexts().encode(tokenizer, TEXT, True, most=10**9, last=last))
    whole = tokenizer._fast.encode(TEXT).ids
    assert list(found)[-last:] == whole[-last:]
    assert sum(tokenizer.sizes) <= max(PIECE_CHARACTERS, 5 * last + PIECE_CHARACTERS)


def test_long_texts_take_turns_and_short_ones_do_not_wait_for_them(tokenizer: Watched) -> None:
    async def run() -> list[str]:
        texts, ended = LongTexts(), []

        async def encode(name: str, text: str) -> None:
            await texts.encode(tokenizer, text, True, most=10**9)
            ended.append(name)

        await asyncio.gather(encode("long", TEXT * 3), encode("longer", TEXT * 3), encode("short", "fox " * 1000))
        return ended

    assert asyncio.run(run())[0] == "short"


def test_long_texts_beyond_the_limit_of_waiting_characters_are_refused(
    tokenizer: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "MOST_WAITING_CHARACTERS", len(TEXT) + 1)

    async def run() -> list[object]:
        texts = LongTexts()
        both = [texts.encode(tokenizer, TEXT, True, most=10**9) for _ in range(2)]
        short = texts.encode(tokenizer, "fox " * 1000, True, most=10**9)
        return await asyncio.gather(*both, short, return_exceptions=True)

    first, second, short = asyncio.run(run())
    assert not isinstance(first, Exception)
    assert not isinstance(short, Exception)
    assert isinstance(second, InferEngineError)
    assert (second.code, second.http_status) == ("overloaded", 503)


def test_a_part_is_made_only_when_it_is_asked_for(tokenizer: Watched) -> None:
    parts: Iterator[list[int]] = tokenizer.parts(TEXT)
    next(parts)
    next(parts)
    assert len(tokenizer.sizes) == 1
