"""Prefixes of models with states: which snapshots are taken, where a request begins, and that each snapshot comes
back."""

from __future__ import annotations

from inferengine.core.sequence import Sequence
from inferengine.core.state_snapshots import StateSnapshots
from inferengine.engine.core import StepFailed
from tests.core.builders import Run, expected_output, make_capacity, make_request

BLOCK = 4


def make_run(num_snapshots: int = 16, *, num_blocks: int = 128, budget: int = 64, **options: object) -> Run:
    capacity = make_capacity(num_blocks, block_size=BLOCK)._replace(has_states=True, num_snapshots=num_snapshots)
    return Run(capacity, budget=budget, **options)  # type: ignore[arg-type]


def text(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * place) % 97 for place in range(length)]


def cached(run: Run, uid: int, prompt: list[int], *, salt: bytes = b"", max_tokens: int = 2) -> int:
    """Run a request to its end, with the tokens that it must give. Returns how many of its prompt were cached."""
    request = make_request(uid, prompt, max_tokens, salt=salt)
    run.submit(request).to_end()
    assert run.outputs[uid] == expected_output(request)
    return run.rows[uid].num_cached  # type: ignore[attr-defined, no-any-return]


def snapshots_of(run: Run) -> StateSnapshots:
    found = run.scheduler.kv.snapshots
    assert found is not None
    return found


# -- where a request begins --------------------------------------------------------------------------------------------


def test_an_equal_prompt_begins_at_its_last_boundary() -> None:
    run = make_run()
    assert cached(run, 1, text(22)) == 0
    before = run.executor.num_computed_tokens
    assert cached(run, 2, text(22)) == 20
    assert run.executor.num_computed_tokens - before == 2 + 1


def test_of_a_prompt_of_whole_blocks_the_last_token_is_computed_again() -> None:
    run = make_run()
    cached(run, 1, text(20))
    assert cached(run, 2, text(20)) == 16


def test_the_next_turn_of_a_conversation_begins_where_the_output_filled_its_last_block() -> None:
    run = make_run()
    cached(run, 1, text(22), max_tokens=12)  # of 34 tokens all but the last are computed
    assert cached(run, 2, [*text(22), *run.outputs[1], *text(9, first=50)]) == 32


def test_a_match_is_cut_back_to_the_longest_boundary_with_a_snapshot() -> None:
    run = make_run()
    cached(run, 1, text(40))
    assert cached(run, 2, [*text(30), *text(9, first=50)]) == 0  # 28 tokens have their KV, none of them a state


def test_the_end_of_a_shared_beginning_is_kept_once_two_requests_have_shown_it() -> None:
    run = make_run()
    for uid, expected in ((1, 0), (2, 0), (3, 28), (4, 28)):
        assert cached(run, uid, [*text(30), *text(9, first=10 * uid)]) == expected


def test_the_boundaries_of_a_prompts_chunks_are_kept() -> None:
    run = make_run(budget=10)
    cached(run, 1, text(40))
    assert cached(run, 2, [*text(30), *text(9, first=50)]) == 28  # of the chunk that ends at 30


def test_a_prompt_takes_no_further_step_for_its_snapshot() -> None:
    steps = []
    for num_snapshots in (0, 16):
        run = make_run(num_snapshots)
        cached(run, 1, text(22), max_tokens=1)
        steps.append(run.scheduler.stats.num_steps)
    assert steps == [1, 1]


def test_salts_keep_prefixes_apart() -> None:
    run = make_run()
    cached(run, 1, text(22), salt=b"a")
    assert cached(run, 2, text(22), salt=b"b") == 0
    assert cached(run, 3, text(22), salt=b"a") == 20


def test_a_reset_forgets_all_snapshots() -> None:
    run = make_run()
    cached(run, 1, text(22))
    run.core.flush()
    assert snapshots_of(run).num_known == 0
    assert cached(run, 2, text(22)) == 0


def test_without_room_for_a_snapshot_nothing_is_cached() -> None:
    run = make_run(0)
    cached(run, 1, text(22))
    assert cached(run, 2, text(22)) == 0
    assert run.scheduler.kv.snapshots is None


def test_a_snapshot_without_its_kv_is_of_no_use() -> None:
    run = make_run(num_blocks=12)
    cached(run, 1, text(22))
    cached(run, 2, text(40, first=1))
    assert snapshots_of(run).num_known > 0
    assert cached(run, 3, text(22)) == 0


def test_choices_of_one_prompt_compute_it_once() -> None:
    run = make_run()
    choices = [make_request(uid, text(22), 3, seed=uid, fork_of=None if uid == 1 else 1) for uid in (1, 2, 3)]
    run.submit(*choices).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in choices}
    assert run.executor.num_computed_tokens == 22 + 2 * 2 + 3 * 2


def test_a_preempted_request_goes_on_from_a_snapshot_whose_kv_is_still_there() -> None:
    computed = []
    for num_snapshots in (0, 16):
        requests = [make_request(uid, text(18, first=uid), 24) for uid in (1, 2)]
        run = make_run(num_snapshots, num_blocks=18).submit(*requests).to_end()
        assert run.scheduler.stats.num_preemptions == 1
        assert run.outputs == {request.uid: expected_output(request) for request in requests}
        computed.append(run.executor.num_computed_tokens)
    assert computed[0] - computed[1] >= 16


# -- which stay --------------------------------------------------------------------------------------------------------


def test_of_a_running_output_the_newest_snapshot_alone_is_kept() -> None:
    run = make_run()
    cached(run, 1, text(10))
    cached(run, 2, text(10, first=1), max_tokens=40)
    assert snapshots_of(run).num_known == 2 + 1  # a prompt's each, and one of the output


def test_the_tokens_that_a_grammar_forces_leave_no_further_snapshots() -> None:
    run = make_run(max_in_flight=2)
    request = make_request(1, text(10), 45, grammar=True)
    run.submit(request).to_end()
    assert run.outputs[1] == expected_output(request)
    assert run.scheduler.stats.num_forced_tokens >= 8
    assert snapshots_of(run).num_known == 2
    assert cached(run, 2, [*text(10), *run.outputs[1], 5]) > 45


def test_the_least_recently_used_is_evicted() -> None:
    run = make_run(2)
    cached(run, 1, text(10), max_tokens=1)
    cached(run, 2, text(10, first=1), max_tokens=1)
    assert cached(run, 3, text(10), max_tokens=1) == 8
    cached(run, 4, text(10, first=2), max_tokens=1)
    assert cached(run, 5, text(10), max_tokens=1) == 8
    assert cached(run, 6, text(10, first=1), max_tokens=1) == 0
    snapshot = run.scheduler.snapshot()
    assert (snapshot.num_snapshots, snapshot.num_snapshots_known, snapshot.num_snapshot_evictions) == (2, 2, 2)


def test_the_chunks_of_a_long_prompt_take_one_snapshot_of_others_at_most() -> None:
    run = make_run(3, budget=8)
    cached(run, 1, text(7), max_tokens=1)
    cached(run, 2, text(7, first=1), max_tokens=1)
    cached(run, 3, text(100, first=2), max_tokens=1)
    assert cached(run, 4, text(7, first=1), max_tokens=1) == 4
    assert cached(run, 5, text(100, first=2), max_tokens=1) == 96


def test_a_snapshot_of_an_output_stays_once_another_request_began_from_it() -> None:
    run = make_run()
    run.submit(make_request(1, text(10), 40))
    while len(run.outputs[1]) < 8:
        run.step()
    prompt = [*text(10), *run.outputs[1]]
    run.submit(make_request(2, [*prompt, 5], 1))
    run.to_end()
    assert run.rows[2].num_cached == 16  # type: ignore[attr-defined]
    assert cached(run, 3, [*prompt, 6]) == 16


# -- every snapshot comes back -----------------------------------------------------------------------------------------


def test_a_cancelled_request_gives_its_reserved_snapshot_back() -> None:
    run = make_run(max_in_flight=2).submit(make_request(1, text(7), 40))
    while not snapshots_of(run).num_reserved:
        run.step()
    run.cancel(1)
    assert snapshots_of(run).num_reserved == 0
    run.to_end()
    run.scheduler.check()


def test_with_all_snapshots_reserved_no_other_is_taken() -> None:
    requests = [make_request(uid, text(7, first=uid), 20) for uid in range(1, 6)]
    run = make_run(1, max_in_flight=2).submit(*requests).to_end()
    assert run.outputs == {request.uid: expected_output(request) for request in requests}
    assert snapshots_of(run).num_known == 1


def test_the_snapshots_of_a_failed_step_are_not_found() -> None:
    run = make_run().submit(make_request(1, text(22), 2))
    run.executor.fail_with = StepFailed("a row failed", rows=[0])
    run.to_end()
    assert run.finished[1][0] == "error"
    assert snapshots_of(run).num_known == 0
    assert cached(run, 2, text(22)) == 0


def test_a_row_of_bad_numbers_takes_its_snapshots_with_it() -> None:
    run = make_run(budget=10).submit(make_request(1, text(22), 2))
    for _ in range(3):
        run.step()
    kv, sequence = run.scheduler.kv, run.scheduler.sequences[1]
    kept, gone = sequence.block_hashes[1], sequence.block_hashes[4]
    assert kept in snapshots_of(run)
    assert gone in snapshots_of(run)
    kv.forget(sequence, 20 - BLOCK)
    assert kept in snapshots_of(run)
    assert gone not in snapshots_of(run)


def test_the_same_output_twice_is_kept_once() -> None:
    snapshots, sequences = StateSnapshots(3), [Sequence(make_request(uid, text(4))) for uid in (1, 2)]
    for sequence in sequences:
        assert snapshots.reserve(sequence, BLOCK) is not None
        assert snapshots.reserve(sequence, BLOCK) is None  # one that waits for its hash is enough
        sequence.block_hashes.append(b"the same")
        snapshots.settle(sequence, BLOCK)
        snapshots.check()
    assert (snapshots.num_known, snapshots.num_reserved) == (1, 0)
