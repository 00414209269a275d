from __future__ import annotations

import random

import pytest

from inferengine.text import Tokenizer
from inferengine.text.detokenizer import MAX_HELD_TOKENS, WindowDetokenizer, make_detokenizer
from tests.text.vocabularies import load, sentencepiece

TEXTS = [
    "the quick brown fox",
    "你好世界, 再见",
    "🎉👩‍👩‍👧‍👦🇩🇪 family",
    "  leading and   inner spaces\n\n\ttabs",
    "e\u0301 combining, ünïcödé",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_equals_the_full_decode(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    stream = make_detokenizer(any_tokenizer)
    pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(pieces) == any_tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_shows_half_a_character(byte_exact_tokenizer: Tokenizer, text: str) -> None:
    stream = make_detokenizer(byte_exact_tokenizer)
    ids = byte_exact_tokenizer.encode(text)
    assert all("\ufffd" not in stream.push(token_id) for token_id in ids)


def test_the_window_and_the_table_give_the_same_pieces(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(50):
        text = "".join(generator.choice("aé你🎉 fox") for _ in range(40))
        table, window = make_detokenizer(tokenizer), WindowDetokenizer(tokenizer, True)
        for token_id in tokenizer.encode(text):
            assert table.push(token_id) == window.push(token_id)
        assert table.flush() == window.flush() == ""


def test_random_tokens_equal_the_full_decode_whatever_their_bytes_are(tokenizer: Tokenizer) -> None:
    generator = random.Random(1)
    for _ in range(200):
        ids = [generator.randrange(tokenizer.vocab_size + 3) for _ in range(generator.randrange(1, 60))]
        stream = make_detokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_random_tokens_that_spell_text_equal_the_full_decode(any_tokenizer: Tokenizer) -> None:
    generator = random.Random(2)
    whole = [i for i in range(any_tokenizer.vocab_size) if "\ufffd" not in any_tokenizer.decode([i])]
    for _ in range(100):
        ids = generator.choices(whole, k=30)
        stream = make_detokenizer(any_tokenizer, skip_special_tokens=False)
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == any_tokenizer.decode(ids, skip_special_tokens=False)


def test_an_unfinished_character_at_the_end_is_shown_as_replacement(byte_exact_tokenizer: Tokenizer) -> None:
    ids = byte_exact_tokenizer.encode("fox 🎉")[:-1]
    stream = make_detokenizer(byte_exact_tokenizer)
    assert "\ufffd" not in "".join(map(stream.push, ids))
    assert stream.flush().endswith("\ufffd")


def test_an_output_that_continues_a_prompt_keeps_its_leading_space() -> None:
    tokenizer = load(sentencepiece())
    prompt, output = tokenizer.encode("the quick"), tokenizer.encode("fox")
    alone = make_detokenizer(tokenizer)
    after = make_detokenizer(tokenizer, context_ids=prompt[-4:])
    assert "".join(map(alone.push, output)) == "fox"
    assert "".join(map(after.push, output)) == " fox"


def test_bytes_that_never_become_text_cannot_grow_the_window() -> None:
    tokenizer = load(sentencepiece())
    stream = WindowDetokenizer(tokenizer, True)
    broken = tokenizer.token_to_id("<0xFF>")
    assert broken is not None
    shown = "".join(stream.push(broken) for _ in range(10 * MAX_HELD_TOKENS))
    assert len(shown) >= 9 * MAX_HELD_TOKENS
