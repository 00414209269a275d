"""KV events: a follower knows exactly which prefixes this engine can reuse."""

from __future__ import annotations

import random

from inferengine.core.kv_cache import AllBlocksCleared, BlockRemoved, BlockStored, block_hash, root_hash
from tests.core.builders import Run, make_capacity, make_request


class Follower:
    """A router's view: the set of blocks, from the events alone."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def follow(self, run: Run) -> None:
        for event in run.scheduler.kv.take_events():
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or isinstance(event.parent_block_hash, bytes)
                assert not self.blocks & set(event.block_hashes)
                self.blocks |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.blocks
                self.blocks -= set(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()


def test_a_stored_block_names_its_tokens_and_its_parent() -> None:
    run = Run(kv_events=True).submit(make_request(1, list(range(9)), max_tokens=1)).to_end()
    first, second = run.scheduler.kv.take_events()
    root = root_hash(b"")
    assert first == BlockStored([block_hash(root, [0, 1, 2, 3])], None, [0, 1, 2, 3], 4)
    assert second.parent_block_hash == first.block_hashes[0]  # type: ignore[union-attr]


def test_a_follower_knows_what_the_engine_holds_through_any_history() -> None:
    draw = random.Random(5)
    run, follower = Run(make_capacity(24), kv_events=True), Follower()
    shared = [draw.randrange(97) for _ in range(30)]
    for uid in range(1, 80):
        prompt = shared[: draw.randrange(1, 30)] + [draw.randrange(97) for _ in range(draw.randrange(6))]
        run.submit(make_request(uid, prompt, draw.randrange(1, 12)))
        for _ in range(draw.randrange(4)):
            run.step()
        follower.follow(run)
        cache = run.scheduler.kv.caches[0]
        assert all(digest in cache for digest in follower.blocks)
        assert len(follower.blocks) == sum(1 for _ in cache.block_ids())
    run.to_end()
    run.core.flush()
    follower.follow(run)
    assert follower.blocks == set()


def test_nothing_is_recorded_by_default() -> None:
    run = Run().submit(make_request()).to_end()
    assert run.scheduler.kv.take_events() == []
