"""Prompt lookup: the draft tokens are what followed the longest match."""

from __future__ import annotations

import random

import pytest

from inferengine.core.sequence import Sequence
from inferengine.core.speculation import MAX_MATCH, NgramProposer
from tests.core.builders import VOCAB_SIZE, Run, expected_output, make_capacity, make_request


def sequence_of(tokens: list[int], *, rate: float | None = 0.9, **params: object) -> Sequence:
    """Return a sequence whose draft tokens so far were accepted at this rate; None: there were none."""
    sequence = Sequence(make_request(1, tokens, max_tokens=50, **params))
    sequence.acceptance_rate = rate
    return sequence


def test_the_continuation_of_the_longest_match_is_proposed() -> None:
    sequence = sequence_of([1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 8, 1, 2, 3, 4])
    assert NgramProposer().propose(sequence, 3) == [50, 51, 52]


def test_of_two_equal_matches_the_later_one_counts() -> None:
    sequence = sequence_of([1, 2, 10, 1, 2, 20, 1, 2])
    assert NgramProposer().propose(sequence, 1) == [20]


@pytest.mark.parametrize("rate", [None, 0.2])
def test_a_low_acceptance_rate_needs_a_longer_match(rate: float | None) -> None:
    short, long = [1, 2, 3, 50, 9, 1, 2, 3], [1, 2, 3, 4, 50, 9, 1, 2, 3, 4]
    assert NgramProposer().propose(sequence_of(short), 1) == [50]
    assert NgramProposer().propose(sequence_of(short, rate=rate), 1) == []
    assert NgramProposer().propose(sequence_of(long, rate=rate), 1) == [50]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert NgramProposer().propose(sequence_of(list(range(50))), 4) == []
    assert NgramProposer().propose(sequence_of([1]), 4) == []


def test_no_draft_token_comes_after_a_stop() -> None:
    sequence = sequence_of([1, 2, 30, 31, 32, 1, 2], stop_token_ids=(31,))
    assert NgramProposer().propose(sequence, 4) == [30, 31]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_grows_with_the_sequence_as_if_built_at_once(seed: int) -> None:
    draw = random.Random(seed)
    growing, sequence = NgramProposer(), sequence_of([draw.randrange(6) for _ in range(5)])
    for _ in range(200):
        sequence.tokens.append(draw.randrange(6))
        assert growing.propose(sequence, 3) == NgramProposer().propose(sequence, 3)
        assert growing.propose(sequence, 3) == brute_force(sequence.tokens, 3)


def brute_force(tokens: list[int], most: int) -> list[int]:
    """Compare every place; of those that agree the furthest back, the latest."""

    def agreeing(place: int) -> int:
        length = 0
        while length < min(place, MAX_MATCH) and tokens[place - length - 1] == tokens[len(tokens) - length - 1]:
            length += 1
        return length

    places = [place for place in range(2, len(tokens)) if agreeing(place) >= 2]
    if not places:
        return []
    begin = max(places, key=lambda place: (agreeing(place), place))
    return (tokens[begin:] * most)[:most]


def test_a_copy_that_reaches_the_end_repeats_itself() -> None:
    assert NgramProposer().propose(sequence_of([9, 5, 6, 7, 5, 6, 7, 5, 6]), 8) == [7, 5, 6, 7, 5, 6, 7, 5]


def predicting(prediction: list[int], output: list[int], **params: object) -> Sequence:
    """Return a sequence of that output so far, whose request predicts it to be `prediction`."""
    sequence = Sequence(make_request(1, [90, 91], max_tokens=50, prediction=prediction, **params))
    sequence.tokens += output
    return sequence


@pytest.mark.parametrize(
    ("output", "drafts"),
    [
        ([], [1, 2, 3]),  # from the first token on
        ([1], [2, 3, 4]),
        ([1, 2, 3, 4, 5, 6], [7, 8]),  # up to its end
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
        ([1, 2, 50], []),  # something else is said
        ([1, 2, 50, 51, 5, 6], [7, 8]),  # changed, and on
        ([50, 51, 52, 1, 2], [3, 4, 5]),  # inserted
        ([1, 2, 6, 7], [8]),  # left out
        ([1, 2, 6], []),  # one token might stand there by chance
    ],
)
def test_draft_tokens_follow_the_requests_prediction(output: list[int], drafts: list[int]) -> None:
    prediction = [1, 2, 3, 4, 5, 6, 7, 8]
    assert NgramProposer().propose(predicting(prediction, output), 3) == drafts
    growing, sequence = NgramProposer(), predicting(prediction, [])
    for token in output:
        growing.propose(sequence, 3)
        sequence.tokens.append(token)
    assert growing.propose(sequence, 3) == drafts


def test_a_prediction_goes_before_the_prompt_and_the_prompt_after_its_end() -> None:
    prompt = [1, 2, 3, 4, 60, 61, 9]
    sequence = Sequence(make_request(1, prompt, max_tokens=50, prediction=[1, 2, 3, 4, 70]))
    sequence.tokens += [1, 2, 3, 4]
    assert NgramProposer().propose(sequence, 2) == [70]
    sequence.tokens[-4:] = [70, 1, 2, 3, 4]
    assert NgramProposer().propose(sequence, 2) == [70]  # it stands there again
    sequence = Sequence(make_request(1, prompt, max_tokens=50, prediction=[1, 2, 3, 4]))
    sequence.tokens += [1, 2, 3, 4]
    assert NgramProposer().propose(sequence, 2) == [60, 61]


def test_no_predicted_token_comes_after_a_stop() -> None:
    assert NgramProposer().propose(predicting([1, 2, 3, 4], [], stop_token_ids=(3,)), 4) == [1, 2, 3]


@pytest.mark.parametrize("wrong_every", [None, 1, 3])
def test_a_prediction_never_changes_the_output(wrong_every: int | None) -> None:
    """Right ones, wrong ones, and those that are right here and there."""
    plain = [make_request(uid, 4 * uid, max_tokens=60, seed=uid) for uid in range(1, 5)]
    outputs = {request.uid: expected_output(request) for request in plain}
    requests = [
        make_request(
            uid,
            4 * uid,
            max_tokens=60,
            seed=uid,
            prediction=[
                (token + 1) % VOCAB_SIZE if wrong_every and place % wrong_every == 0 else token
                for place, token in enumerate(output)
            ],
        )
        for uid, output in outputs.items()
    ]
    proposer = NgramProposer()
    run = Run(make_capacity(200), proposer=proposer, max_drafts=4).submit(*requests).to_end()
    assert run.outputs == outputs
    assert (run.scheduler.snapshot().num_drafts_accepted > 100) is (wrong_every is None)
    assert proposer._predictions == {}


def test_nothing_is_kept_of_a_sequence_that_ended() -> None:
    proposer = NgramProposer()
    run = Run(make_capacity(64), proposer=proposer, max_drafts=4)
    requests = [make_request(uid, [1, 2, 3] * 5, max_tokens=20) for uid in range(1, 5)]
    run.submit(*requests).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
    assert proposer._indices == {}
