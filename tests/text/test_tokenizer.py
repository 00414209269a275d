from __future__ import annotations

import json
import threading
import time

import pytest

from inferengine.errors import InferEngineError
from inferengine.text import Tokenizer, fingerprint
from inferengine.text.tokenizer import SHORT_TEXT_CHARACTERS
from tests.text.vocabularies import byte_level


def test_text_survives_encode_and_decode(byte_exact_tokenizer: Tokenizer) -> None:
    text = "the fox 🎉 says 你好, naïvely\n\n  twice"
    assert byte_exact_tokenizer.decode(byte_exact_tokenizer.encode(text)) == text


def broken(**model: object) -> bytes:
    document = json.loads(byte_level().to_str())
    return json.dumps({**document, "model": {**document["model"], **model}}).encode()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": b"{"},
        {"tokenizer.json": broken(continuing_subword_prefix="longer than a merge")},  # the library panics
        {"tokenizer.json": broken(), "tokenizer_config.json": b"[" * 100_000},
        {"tokenizer.json": broken(), "tokenizer_config.json": b"[]"},
    ],
    ids=["no JSON", "panic", "nested", "no object"],
)
def test_files_that_cannot_be_used_are_refused_by_name(files: dict[str, bytes]) -> None:
    with pytest.raises(InferEngineError, match=rf"{list(files)[-1]} of the model"):
        Tokenizer.from_files(files)


def test_special_tokens_are_read_as_string_or_object(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_tokens_are_skipped_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id("<s>"), *tokenizer.encode("fox"), tokenizer.token_to_id("</s>")]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>fox</s>"
    assert tokenizer.is_special(ids[0])
    assert not tokenizer.is_special(ids[1])


def test_bytes_of_tokens_join_to_the_text(byte_exact_tokenizer: Tokenizer) -> None:
    text = "the 你好 🎉"
    joined = b"".join(map(byte_exact_tokenizer.token_bytes, byte_exact_tokenizer.encode(text)))
    assert joined.decode().removeprefix(" ") == text


def test_an_id_beyond_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_has_the_ids_of_a_short_one_and_comes_back(
    byte_exact_tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    text = "the fox 🎉 says 你好,\u0301 naïvely</s>\n\n  twice " * 3
    long = text * (1 + SHORT_TEXT_CHARACTERS // len(text))
    expected = byte_exact_tokenizer._fast.encode(long, add_special_tokens=add_special_tokens).ids
    assert byte_exact_tokenizer.encode(long, add_special_tokens) == expected
    for skips in (False, True):
        decoded = byte_exact_tokenizer._fast.decode(expected, skip_special_tokens=skips)
        assert byte_exact_tokenizer.decode(expected, skips) == decoded


@pytest.mark.parametrize(("work", "long"), [("encode", "x" * 300_000), ("decode", [5] * 300_000)])
def test_others_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer, work: str, long: str | list[int]) -> None:
    """Front ends and the engine's loop share an interpreter with the thread that tokenizes."""
    turns = 0
    thread = threading.Thread(target=getattr(tokenizer, work), args=(long,))
    thread.start()
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    assert turns > 50


def test_truncation_and_padding_of_the_training_run_do_not_apply(tokenizer: Tokenizer) -> None:
    fast = byte_level()
    fast.enable_truncation(2)
    fast.enable_padding(length=50)
    limited = Tokenizer.from_files({"tokenizer.json": fast.to_str().encode()})
    assert limited.encode("the quick brown fox") == tokenizer.encode("the quick brown fox")


def test_fingerprint_depends_on_names_and_contents_and_not_on_order() -> None:
    assert fingerprint({"a": b"1", "b": b"2"}) == fingerprint({"b": b"2", "a": b"1"})
    assert fingerprint({"a": b"1", "b": b"2"}) != fingerprint({"a": b"12", "b": b""})
    assert fingerprint({"ab": b"c"}) != fingerprint({"a": b"bc"})
    assert len(fingerprint({})) == 64


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b"no json"},
        {"tokenizer.json": json.dumps({"model": {"type": "Unknown"}}).encode()},
    ],
    ids=["absent", "broken", "unknown model"],
)
def test_unusable_files_are_a_clear_error(files: dict[str, bytes]) -> None:
    with pytest.raises(InferEngineError, match=r"tokenizer\.json"):
        Tokenizer.from_files(files)
