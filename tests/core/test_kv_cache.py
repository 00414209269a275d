"""Blocks and prefixes: reuse is exact, salts isolate, every block is freed."""

from __future__ import annotations

import random

import pytest

from inferengine.core.executor import StepPlan, StepResult
from inferengine.core.kv_cache import BlockAgeHistograms, BlockAges, BlockPool, PrefixCache, block_hash, root_hash
from inferengine.core.sequence import RowFailure, Sequence
from inferengine.engine.core import StepFailed
from tests.core.builders import Run, expected_output, make_capacity, make_request


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    blocks, _ = pool.take(3)
    pool.mark_cached(blocks[0])
    pool.release(blocks)
    taken, evicted = pool.take(2)
    assert set(taken) == {blocks[1], blocks[2]}
    assert evicted == []
    assert pool.take(1) == ([blocks[0]], [blocks[0]])


def test_the_least_recently_released_prefix_is_evicted_first() -> None:
    pool = BlockPool(2)
    (first, second), _ = pool.take(2)
    pool.mark_cached(first)
    pool.mark_cached(second)
    pool.release([second])
    pool.release([first])
    assert pool.take(1) == ([second], [second])


def test_check_catches_a_block_that_is_released_twice() -> None:
    pool = BlockPool(2)
    blocks, _ = pool.take(1)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.check()


def test_a_hash_names_the_tokens_and_everything_before_them() -> None:
    root = root_hash(b"")
    assert block_hash(block_hash(root, [1, 2]), [3, 4]) != block_hash(block_hash(root, [1, 9]), [3, 4])
    assert root_hash(b"tenant a") != root_hash(b"tenant b")


def test_a_second_block_of_equal_content_stays_private() -> None:
    cache = PrefixCache(2)
    assert cache.insert(b"x", 0)
    assert not cache.insert(b"x", 1)
    assert cache.evict(0) == b"x"
    assert cache.get(b"x") is None


def test_a_block_s_ages_are_counted_from_its_allocation_and_its_last_use() -> None:
    found = BlockAgeHistograms()
    ages = BlockAges(8, found)
    ages.taken([3], 10.0)
    ages.reused([3], 14.0)
    ages.evicted([3], 40.0)
    ages.taken([3], 40.0)
    ages.evicted([3], 41.0)
    assert (found.reuse_gap.sum, found.reuse_gap.count) == (4.0, 1)
    assert (found.lifetime.sum, found.lifetime.count) == (30.0 + 1.0, 2)
    assert (found.idle.sum, found.idle.count) == (26.0 + 1.0, 2)


def test_of_many_blocks_the_ages_of_about_a_thousand_are_followed() -> None:
    found = BlockAgeHistograms()
    ages = BlockAges(100_000, found)
    ages.taken(range(100_000), 0.0)
    ages.evicted(range(100_000), 5.0)
    assert 1000 < found.lifetime.count < 1050


def test_hits_and_evictions_of_a_small_cache_are_in_the_snapshot() -> None:
    run = Run(make_capacity(num_blocks=8))
    for uid in range(1, 7):
        run.submit(make_request(uid, [uid if uid < 5 else 5] * 16)).to_end()  # the last two are alike
    ages, evictions = run.scheduler.snapshot().block_ages, run.scheduler.kv.num_evictions
    assert evictions > 0
    assert (
        ages["kv_block_lifetime_seconds"]["count"] == ages["kv_block_idle_before_evict_seconds"]["count"] == evictions
    )
    assert ages["kv_block_reuse_gap_seconds"]["count"] == 3  # full blocks of 4 tokens before the last token
    assert 0 < ages["kv_block_reuse_gap_seconds"]["sum"] <= 3 * run.now


def test_an_equal_prompt_reuses_all_but_what_holds_its_last_token() -> None:
    prompt = list(range(16))
    run = Run().submit(make_request(1, prompt)).to_end()
    before = run.executor.num_computed_tokens
    run.submit(make_request(2, prompt)).to_end()
    assert run.rows[2].num_cached == 12  # type: ignore[attr-defined]
    assert run.executor.num_computed_tokens - before == 4 + 3
    assert run.outputs[1] == run.outputs[2]


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    first = make_request(1, prompt=10, max_tokens=10)
    run = Run().submit(first).to_end()
    second = make_request(2, [*first.prompt_ids, *run.outputs[1], 1, 2, 3])
    run.submit(second).to_end()
    assert run.rows[2].num_cached == 16  # type: ignore[attr-defined]
    assert run.outputs[2] == expected_output(second)


def test_another_salt_misses_and_the_same_salt_hits() -> None:
    prompt = list(range(20))
    run = Run().submit(make_request(1, prompt, salt=b"a")).to_end()
    run.submit(make_request(2, prompt, salt=b"b")).to_end()
    run.submit(make_request(3, prompt, salt=b"a")).to_end()
    assert run.rows[2].num_cached == 0  # type: ignore[attr-defined]
    assert run.rows[3].num_cached == 16  # type: ignore[attr-defined]


def test_running_requests_share_the_blocks_of_their_common_prompt() -> None:
    prompt = list(range(40))
    run = Run(make_capacity(64)).submit(make_request(1, prompt, max_tokens=30))
    run.step()
    run.submit(*(make_request(uid, prompt, max_tokens=30) for uid in range(2, 6)))
    run.step()
    assert run.scheduler.kv.pools[0].num_held < 11 + 4 * 4
    run.to_end()
    assert all(run.outputs[uid] == run.outputs[1] for uid in range(2, 6))


def test_an_evicted_prefix_is_a_miss_and_then_a_hit_again() -> None:
    run = Run(make_capacity(8))
    prompt = list(range(12))
    run.submit(make_request(1, prompt)).to_end()
    run.submit(make_request(2, prompt=24, max_tokens=8)).to_end()
    run.submit(make_request(3, prompt)).to_end()
    run.submit(make_request(4, prompt)).to_end()
    assert (run.rows[3].num_cached, run.rows[4].num_cached) == (0, 8)  # type: ignore[attr-defined]
    assert run.scheduler.kv.num_evictions > 0


def test_a_prompt_that_waits_is_not_looked_up_block_by_block_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 131,072 tokens that are cached took 8 ms of each step that it waited for room."""
    run = Run(make_capacity(200)).submit(make_request(1, prompt=400, max_tokens=1)).to_end()
    sequence = Sequence(make_request(2, prompt=list(make_request(1, prompt=400).prompt_ids)))
    first = run.scheduler.kv.lookup(sequence)

    def get(cache: PrefixCache, digest: bytes) -> None:
        raise AssertionError("a block was looked up by itself")

    monkeypatch.setattr(PrefixCache, "get", get)
    again = run.scheduler.kv.lookup(sequence)
    assert (first.num_tokens, first.block_ids) == (again.num_tokens, again.block_ids)
    assert again.num_tokens == 396


def test_flush_forgets_every_prefix() -> None:
    prompt = list(range(20))
    run = Run().submit(make_request(1, prompt)).to_end()
    assert run.core.flush() > 0
    run.submit(make_request(2, prompt)).to_end()
    assert run.rows[2].num_cached == 0  # type: ignore[attr-defined]


def test_a_window_group_reuses_a_prefix_of_which_it_kept_only_the_window() -> None:
    capacity = make_capacity(64, window=6, window_blocks=16)
    prompt = [token % 97 for token in range(41)]
    run = Run(capacity, budget=8).submit(make_request(1, prompt)).to_end()
    elsewhere = make_request(2, prompt=3, max_tokens=20)  # so that no table still names the first one's blocks
    request = make_request(3, [*prompt, 5, 6])
    run.submit(elsewhere, request).to_end()
    assert run.rows[3].num_cached == 40  # type: ignore[attr-defined]
    assert run.outputs[3] == expected_output(request)


def test_a_cached_prefix_of_thousands_of_blocks_needs_no_recursion() -> None:
    capacity = make_capacity(3000, max_model_len=12_000)
    prompt = [token % 97 for token in range(9_000)]
    run = Run(capacity, budget=20_000).submit(make_request(1, prompt, max_tokens=2)).to_end()
    run.submit(make_request(2, prompt, max_tokens=2)).to_end()
    assert run.rows[2].num_cached == 8_996  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_requests_leaves_no_block_and_changes_no_output(seed: int) -> None:
    draw = random.Random(seed)
    capacity = make_capacity(
        draw.choice([16, 24, 48]),
        max_num_seqs=draw.choice([2, 5, 8]),
        window=draw.choice([None, 7]),
        window_blocks=60,
    )
    run = Run(capacity, budget=draw.choice([9, 16, 64]), max_in_flight=draw.choice([1, 2]))
    shared = [draw.randrange(97) for _ in range(40)]
    requests = {}
    for uid in range(1, 61):
        prompt = shared[: draw.randrange(1, 30)] + [draw.randrange(97) for _ in range(draw.randrange(0, 9))]
        requests[uid] = make_request(
            uid, prompt, draw.randrange(1, 20), eos=draw.random() < 0.5, salt=draw.choice([b"", b"t"])
        )
    waiting = list(requests)
    cancelled = set()
    while waiting or run.core.has_work:
        for _ in range(draw.randrange(0, 4)):
            if waiting:
                run.submit(requests[waiting.pop(0)])
        if draw.random() < 0.05 and run.outputs:
            uid = draw.choice(list(run.outputs))
            cancelled |= {uid} - set(run.finished)
            run.cancel(uid)
        run.step()
    for uid, request in requests.items():
        expected = expected_output(request)
        got = run.outputs[uid]
        assert got == (expected[: len(got)] if uid in cancelled else expected)
    assert set(run.finished) == set(requests)
    assert all(pool.num_held == 0 for pool in run.scheduler.kv.pools)


PROMPT = list(range(1, 33))


def test_with_overlap_a_step_reads_the_prefix_that_the_one_under_way_writes() -> None:
    run = Run(max_in_flight=2)
    first, second = make_request(1, [*PROMPT, 40]), make_request(2, [*PROMPT, 50, 51])
    run.submit(first).step()
    run.submit(second).step()
    assert run.scheduler.kv.num_hit_tokens == len(PROMPT)
    run.to_end()
    assert [run.outputs[1], run.outputs[2]] == [expected_output(first), expected_output(second)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_what_a_failed_step_was_to_write_is_not_reused(max_in_flight: int) -> None:
    run = Run(max_in_flight=max_in_flight)
    run.executor.fail_with = StepFailed("the device did not take it", rows=[])
    requests = [make_request(uid, [*PROMPT, 40 + uid]) for uid in (1, 2)]
    for request in requests:
        run.submit(request).step()
    run.to_end()
    for request in requests:
        assert run.outputs[request.uid] == expected_output(request)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("the device failed"), StepFailed("one bad row", rows=[0])])
def test_a_failed_step_costs_the_others_none_of_what_they_have_cached(max_in_flight: int, error: Exception) -> None:
    run = Run(max_in_flight=max_in_flight)
    run.submit(make_request(1, [*PROMPT, 40])).to_end()
    run.executor.fail_with = error
    run.submit(make_request(2, [50, *PROMPT])).to_end()
    again = make_request(3, [*PROMPT, 41])
    assert run.submit(again).to_end().outputs[3] == expected_output(again)
    assert run.scheduler.kv.num_hit_tokens == len(PROMPT)


def test_a_block_of_a_failed_step_is_withdrawn_though_its_request_was_cancelled_and_nobody_holds_it() -> None:
    run = Run(max_in_flight=2)
    run.executor.fail_with = RuntimeError("the device failed")
    run.submit(make_request(1, PROMPT)).step()
    run.cancel(1)
    pool = run.scheduler.kv.pools[0]
    assert pool.num_evictable == len(PROMPT) // run.capacity.block_size
    run.to_end()
    assert pool.num_evictable == 0
    again = make_request(2, [*PROMPT, 41])
    assert run.submit(again).to_end().outputs[2] == expected_output(again)
    assert run.scheduler.kv.num_hit_tokens == 0


def test_a_prompt_that_gave_no_numbers_leaves_nothing_for_others() -> None:
    run = Run(budget=16)
    computed = run.executor.run

    def broken(plan: StepPlan, words: bytearray | None) -> StepResult:
        result = computed(plan, words)
        return result._replace(failed_rows={0: RowFailure.NOT_A_NUMBER}) if plan.samples[0] else result

    run.executor.run = broken  # type: ignore[method-assign]
    run.submit(make_request(1, PROMPT)).to_end()
    assert run.finished[1] == ("error", RowFailure.NOT_A_NUMBER.value)
    run.executor.run = computed  # type: ignore[method-assign]
    again = make_request(2, [*PROMPT, 40])
    assert run.submit(again).to_end().outputs[2] == expected_output(again)
    assert run.scheduler.kv.num_hit_tokens == 16  # the first chunk's: nothing was wrong with that one
