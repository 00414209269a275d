"""Hops of a first token, from the notes of several processes."""

from __future__ import annotations

import pytest

from benchmarks.first_token_hops import ENGINE, FRONT_END, PATH, Point, hops

SENT_S, GAP_S = 5.0, 0.001


def notes_of_a_request(sent_s: float = SENT_S) -> list[tuple[str, float]]:
    """Return every point between the request's leaving and the event's arrival, a millisecond apart."""
    return [(name, sent_s + place * GAP_S) for place, name in enumerate(PATH[1:-1], 1)]


def test_a_hop_is_the_time_since_the_point_before() -> None:
    times = hops(SENT_S, SENT_S + (len(PATH) - 1) * GAP_S, notes_of_a_request())
    assert times == pytest.approx([1.0] * (len(PATH) - 1))


def test_an_earlier_pass_of_a_point_is_no_part_of_the_path() -> None:
    early = [("STEP received", SENT_S + GAP_S / 2)]  # an ACCEPT, for one
    times = hops(SENT_S, SENT_S + 1.0, early + notes_of_a_request())
    assert times is not None
    assert times[:-1] == pytest.approx([1.0] * (len(PATH) - 2))


def test_a_request_without_one_of_the_points_has_no_hops() -> None:
    assert hops(SENT_S, SENT_S + 1.0, notes_of_a_request()[1:]) is None


def test_the_path_has_every_point_of_both_processes_once() -> None:
    points: list[Point] = [*FRONT_END, *ENGINE]
    assert {point.name for point in points} == set(PATH[1:-1])
    assert len(PATH) == len(set(PATH))
