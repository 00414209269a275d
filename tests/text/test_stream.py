from __future__ import annotations

import random

from inferengine.text import TextStream, Tokenizer


def test_tokens_in_any_grouping_give_the_same_text(byte_exact_tokenizer: Tokenizer) -> None:
    generator = random.Random(4)
    text = "the fox 🎉 says 你好"
    ids = byte_exact_tokenizer.encode(text)
    for _ in range(20):
        stream, shown, rest = TextStream(byte_exact_tokenizer), "", ids
        while rest:
            cut = generator.randrange(0, 5)
            shown += stream.push(rest[:cut]).text
            rest = rest[cut:]
        last = stream.push([], final=True)
        assert shown + last.text == text
        assert last.num_tokens == len(ids)


def test_a_stop_string_never_leaks_and_later_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick STOP brown fox")
    upto = next(n for n in range(len(ids) + 1) if "STOP" in tokenizer.decode(ids[:n]))
    one_by_one = TextStream(tokenizer, stop=["STOP"])
    deltas = []
    for token_id in ids:
        deltas.append(one_by_one.push([token_id]))
        if deltas[-1].stop:
            break
    assert "".join(delta.text for delta in deltas) == "the quick "
    assert deltas[-1] == (deltas[-1].text, "STOP", upto)
    assert TextStream(tokenizer, stop=["STOP"]).push(ids) == ("the quick ", "STOP", upto)


def test_after_the_stop_nothing_is_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["STOP"])
    count = stream.push(tokenizer.encode("a STOP")).num_tokens
    assert stream.push(tokenizer.encode("more"), final=True) == ("", "STOP", count)


def test_a_stop_string_may_be_included(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["quick"], include_stop=True)
    assert stream.push(tokenizer.encode("the quick brown")).text == "the quick"


def test_held_text_comes_with_the_last_push(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["fox!"])
    assert stream.push(tokenizer.encode("the fox")).text == "the "
    assert stream.push([], final=True).text == "fox"


def test_a_stop_string_spelled_by_unfinished_bytes_is_found_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["\ufffd"])
    delta = stream.push(tokenizer.encode("a🎉")[:-1], final=True)
    assert (delta.text, delta.stop) == ("a", "\ufffd")


def test_the_token_that_stopped_by_its_id_counts_and_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    delta = TextStream(tokenizer).push(ids, final=True, stop_token=True)
    assert delta.num_tokens == len(ids)
    assert delta.text == tokenizer.decode(ids[:-1])
    assert TextStream(tokenizer, include_stop=True).push(ids, final=True, stop_token=True).text == "the fox"


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x x x x")
    assert TextStream(tokenizer, stop=["x"], min_tokens=len(ids)).push(ids).text == "x x x "


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("fox"), tokenizer.token_to_id("</s>")]
    assert TextStream(tokenizer).push(ids).text == "fox"
    assert TextStream(tokenizer, skip_special_tokens=False).push(ids).text == "fox</s>"
