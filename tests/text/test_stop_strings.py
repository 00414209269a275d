from __future__ import annotations

import random

import pytest

from inferengine.text.detokenizer import StopStrings


def feed(matcher: StopStrings, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Text shown, stop found, and what was shown after each piece."""
    steps: list[str] = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        steps.append(text)
        if stop is not None:
            return "".join(steps), stop, steps
    return "".join(steps) + matcher.flush(), None, steps


def test_text_before_the_stop_is_shown_and_nothing_of_the_stop() -> None:
    assert feed(StopStrings(["END"]), ["hello E", "N", "D more"])[:2] == ("hello ", "END")


def test_the_stop_is_shown_when_asked_for_and_nothing_behind_it() -> None:
    assert feed(StopStrings(["END"], include=True), ["hello E", "N", "D more"])[:2] == ("hello END", "END")


def test_the_first_half_of_a_stop_waits_and_is_released_when_it_was_none() -> None:
    _, stop, steps = feed(StopStrings(["END"]), ["x E", "N", "E", "!"])
    assert stop is None
    assert steps == ["x ", "", "EN", "E!"]


def test_what_is_held_at_the_end_is_released() -> None:
    assert feed(StopStrings(["\n\nHuman"]), ["bye\n\nHum"])[:2] == ("bye\n\nHum", None)


def test_a_false_start_does_not_hide_the_true_one() -> None:
    assert feed(StopStrings(["aab"]), list("aaaab"))[:2] == ("aa", "aab")


def test_the_stop_that_completes_first_wins_and_of_equals_the_longest() -> None:
    assert feed(StopStrings(["abc", "b"]), ["abc"])[:2] == ("a", "b")
    assert feed(StopStrings(["b", "ab"]), ["xab"])[:2] == ("x", "ab")


def test_sixteen_stops_of_all_lengths() -> None:
    stops = ["".join("xyz"[(i + j) % 3] for j in range(i + 2)) + "!" for i in range(16)]
    for stop in stops:
        assert feed(StopStrings(stops), ["say ", stop[:1], stop[1:], "more"])[:2] == ("say ", stop)


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
        shown, found, _ = feed(StopStrings(stops, include=include), pieces)
        if not ends:
            assert (shown, found) == (text, None)
            continue
        end, _, stop = min(ends)
        assert found == stop
        assert shown == text[: end if include else end - len(stop)]
