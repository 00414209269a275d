"""Guessing ahead changes how fast tokens come, never which."""

from __future__ import annotations

import pytest

from inferengine.core.speculation import RETRY_AFTER, DraftControl
from tests.core.builders import HalfRightProposer, Run, expected_output, make_capacity, make_request

OVERLAP = pytest.mark.parametrize("max_in_flight", [1, 2])
WHERE = pytest.mark.parametrize("on_device", [False, True])


def requests(count: int = 6, max_tokens: int = 40) -> list:  # type: ignore[type-arg]
    return [
        make_request(uid, prompt=3 * uid, max_tokens=max_tokens + uid, eos=True, seed=uid)
        for uid in range(1, count + 1)
    ]


@OVERLAP
@WHERE
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("num_blocks", [200, 26])
def test_outputs_equal_those_without_guesses(
    max_in_flight: int, on_device: bool, window: int | None, num_blocks: int
) -> None:
    run = Run(
        make_capacity(num_blocks, window=window, window_blocks=60),
        budget=20,
        max_in_flight=max_in_flight,
        proposer=HalfRightProposer(on_device=on_device),
        max_drafts=4,
    )
    run.submit(*requests()).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests()}
    assert run.scheduler.snapshot().num_drafts_accepted > 0
    assert (run.scheduler.stats.num_preemptions > 0) is (num_blocks == 26)


def test_right_guesses_save_steps() -> None:
    def steps(**options: object) -> int:
        run = Run(make_capacity(200), **options).submit(make_request(1, max_tokens=120)).to_end()  # type: ignore[arg-type]
        return run.scheduler.stats.num_steps

    assert steps(proposer=HalfRightProposer(wrong_every=1000), max_drafts=5) < 0.3 * steps()


def test_a_guess_that_is_always_right_is_always_accepted() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(wrong_every=10**9), max_drafts=4)
    run.submit(make_request(1, prompt=4, max_tokens=60)).to_end()
    snapshot = run.scheduler.snapshot()
    # position 0 of every output counts as wrong with this proposer, and no guess is made for it
    assert snapshot.num_drafts_accepted == snapshot.num_drafted > 40


def test_nobody_guesses_when_the_device_has_enough_to_do() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(), max_drafts=4, max_running_to_draft=2)
    run.submit(*requests(5, max_tokens=10)).step()
    while len(run.scheduler.running) > 2:
        assert run.scheduler.snapshot().num_drafted == 0
        run.step()
    run.to_end()


def test_a_sequence_whose_guesses_fail_stops_guessing_and_tries_again_later() -> None:
    run = Run(make_capacity(200), proposer=HalfRightProposer(wrong_every=1), max_drafts=4)
    run.submit(make_request(1, max_tokens=200)).to_end()
    snapshot = run.scheduler.snapshot()
    assert snapshot.num_drafts_accepted == 0
    assert 3 <= snapshot.num_verified <= 5 + 200 / RETRY_AFTER
    assert run.outputs[1] == expected_output(make_request(1, max_tokens=200))


def test_the_length_follows_the_rate_of_acceptance() -> None:
    control = DraftControl(max_drafts=8, max_running=4)
    run = Run().submit(make_request())
    sequence = run.scheduler.sequences[1]
    lengths = []
    for rate in (0.95, 0.7, 0.4, 0.1):
        sequence.draft_rate, sequence.drafts_resume_at = rate, 10**6
        lengths.append(control.length(sequence, num_running=1))
    assert lengths == [8, 3, 1, 0]
    assert control.length(sequence, num_running=5) == 0


def test_a_stop_inside_accepted_guesses_ends_the_sequence_there() -> None:
    output = expected_output(make_request(max_tokens=30))
    request = make_request(max_tokens=30, stop_token_ids=(output[13],))
    run = Run(proposer=HalfRightProposer(wrong_every=10**9), max_drafts=8).submit(request).to_end()
    first = output.index(output[13])
    assert run.outputs[1] == output[: first + 1]
    assert run.finished[1] == ("stop", output[13])


def test_prefix_blocks_of_verified_tokens_are_exact() -> None:
    first = make_request(1, prompt=8, max_tokens=30)
    run = Run(make_capacity(64), proposer=HalfRightProposer(), max_drafts=4).submit(first).to_end()
    second = make_request(2, [*first.prompt_ids, *run.outputs[1], 5], max_tokens=10)
    run.submit(second).to_end()
    assert run.rows[2].num_cached >= 32  # type: ignore[attr-defined]
    assert run.outputs[2] == expected_output(second)
