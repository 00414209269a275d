"""Text from tokens as they arrive: detokenizers, stop strings, and both together in a TextStream."""

from __future__ import annotations

import random

import pytest

from inferengine.text import TextStream, Tokenizer
from inferengine.text.tokenizer import MAX_HELD_TOKENS, StopStringFinder, WindowDetokenizer, make_detokenizer
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


# -- stop strings ---


def feed(matcher: StopStringFinder, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Return the text shown, the stop found, and what was shown after each piece."""
    steps: list[str] = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        steps.append(text)
        if stop is not None:
            return "".join(steps), stop, steps
    return "".join(steps) + matcher.flush(), None, steps


def test_text_before_the_stop_is_shown_and_nothing_of_the_stop() -> None:
    assert feed(StopStringFinder(["END"]), ["hello E", "N", "D more"])[:2] == ("hello ", "END")


def test_the_stop_is_shown_when_asked_for_and_nothing_behind_it() -> None:
    assert feed(StopStringFinder(["END"], include=True), ["hello E", "N", "D more"])[:2] == ("hello END", "END")


def test_the_first_half_of_a_stop_waits_and_is_released_when_it_was_none() -> None:
    _, stop, steps = feed(StopStringFinder(["END"]), ["x E", "N", "E", "!"])
    assert stop is None
    assert steps == ["x ", "", "EN", "E!"]


def test_what_is_held_at_the_end_is_released() -> None:
    assert feed(StopStringFinder(["\n\nHuman"]), ["bye\n\nHum"])[:2] == ("bye\n\nHum", None)


def test_a_false_start_does_not_hide_the_true_one() -> None:
    assert feed(StopStringFinder(["aab"]), list("aaaab"))[:2] == ("aa", "aab")


def test_the_stop_that_completes_first_wins_and_of_equals_the_longest() -> None:
    assert feed(StopStringFinder(["abc", "b"]), ["abc"])[:2] == ("a", "b")
    assert feed(StopStringFinder(["b", "ab"]), ["xab"])[:2] == ("x", "ab")


def test_sixteen_stops_of_all_lengths() -> None:
    stops = ["".join("xyz"[(i + j) % 3] for j in range(i + 2)) + "!" for i in range(16)]
    for stop in stops:
        assert feed(StopStringFinder(stops), ["say ", stop[:1], stop[1:], "more"])[:2] == ("say ", stop)


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_cut_anywhere_equal_a_plain_search(include: bool) -> None:
    generator = random.Random(3)
    for _ in range(500):
        stops = [
            "".join(generator.choices("ab", k=generator.randrange(1, 5))) for _ in range(generator.randrange(1, 5))
        ]
        text = "".join(generator.choices("abc", k=20))
        pieces: list[str] = []
        rest = text
        while rest:
            cut = generator.randrange(1, 5)
            pieces.append(rest[:cut])
            rest = rest[cut:]
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        shown, found, _ = feed(StopStringFinder(stops, include=include), pieces)
        if not ends:
            assert (shown, found) == (text, None)
            continue
        end, _, stop = min(ends)
        assert found == stop
        assert shown == text[: end if include else end - len(stop)]


# -- TextStream ---


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
