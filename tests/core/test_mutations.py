"""Mutation tests: each mutation breaks one invariant of the core, and the random walk must notice."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from inferengine.core import kv_cache
from inferengine.core.kv_cache import BlockPool, KVCacheManager, PrefixCache, PrefixHit, SwapSpace
from inferengine.core.scheduler.planner import StepBuilder
from inferengine.core.scheduler.queues import FirstComeFirstServed
from inferengine.core.scheduler.scheduler_state import SchedulerState, WaitingForks
from inferengine.core.state_snapshots import StateSnapshots
from tests.core.test_random_machine import walk

Wrap = Callable[..., Any]


def as_if_last(function: Wrap) -> Wrap:
    """Make the method take a sequence for one that needs no more than its last token's state."""

    def mutated(self: Any, sequence: Any) -> Any:
        request = sequence.request
        if request.pooling == "mean":
            sequence.request = dataclasses.replace(request, pooling="last")
        try:
            return function(self, sequence)
        finally:
            sequence.request = request

    return mutated


MUTATIONS: dict[str, tuple[Any, str, Callable[[Wrap], Wrap]]] = {
    "a released block is forgotten": (
        BlockPool,
        "release",
        lambda release: lambda self, blocks: release(self, list(blocks)[1:]),
    ),
    "a shared block is not counted": (BlockPool, "share", lambda share: lambda self, blocks: share(self, blocks[1:])),
    "a block table entry is not sent": (
        KVCacheManager,
        "_record",
        lambda record: lambda self, group, slot, first, blocks: record(self, group, slot, first, blocks[:-1]),
    ),
    "a hash does not cover what came before": (
        kv_cache,
        "block_hash",
        lambda block_hash: lambda parent, tokens: block_hash(b"", tokens),
    ),
    "an evicted prefix is still found": (
        PrefixCache,
        "evict",
        lambda evict: lambda self, block: next((d for d, b in self._block_by_hash.items() if b == block), b""),
    ),
    "a prefix is offered before it is computed": (
        KVCacheManager,
        "adopt",
        lambda adopt: (
            lambda self, sequence, hit: (
                adopt(self, sequence, hit),
                setattr(sequence, "num_computed", min(hit.num_tokens + 1, len(sequence.tokens) - 1)),
            )
        ),
    ),
    "the window is released one block early": (
        KVCacheManager,
        "_first_needed",
        lambda first: lambda self, group, count: first(self, group, count) + (group.window is not None),
    ),
    "the copy on write is left out": (
        KVCacheManager,
        "copy_partial",
        lambda _: lambda self, parent, child: setattr(child, "num_computed", child.num_prompt - 1),
    ),
    "a swapped block comes back in another's place": (
        SwapSpace,
        "load",
        lambda load: (
            lambda self, sequence: (
                [table.reverse() for table in sequence.host_tables if -1 not in table],
                load(self, sequence),
            )
        ),
    ),
    "host blocks leak when a waiting sequence ends": (SwapSpace, "drop", lambda _: lambda self, sequence: None),
    "a slot is not given back": (
        SchedulerState,
        "_free_slot",
        lambda free: lambda self, sequence: None if sequence.uid % 7 == 0 else free(self, sequence),
    ),
    "a draw under way is not counted": (
        StepBuilder,
        "advance",
        lambda advance: (
            lambda self: (
                result := advance(self),
                [setattr(s, "num_inflight", 0) for s in result[1][:1]],
            )[0]
        ),
    ),
    "forks are not released when their parent ends": (
        WaitingForks,
        "release",
        lambda release: lambda self, parent: [] if parent % 3 == 0 else release(self, parent),
    ),
    "a removed waiting sequence is still counted": (
        FirstComeFirstServed,
        "remove",
        lambda _: lambda self, sequence: None,
    ),
    "the last token is taken from the cache": (
        KVCacheManager,
        "lookup",
        lambda lookup: (
            lambda self, sequence: (
                hit := lookup(self, sequence),
                PrefixHit(min(hit.num_tokens + self.block_size, len(sequence.tokens)), hit.block_ids, hit.block_hashes),
            )[1 if sequence.uid % 2 else 0]
        ),
    ),
    "what a failed step was to write stays on offer": (
        KVCacheManager,
        "withdraw",
        lambda _: lambda self, offered: None,
    ),
    "a mean takes a cached prefix": (KVCacheManager, "lookup", as_if_last),
    "the last chunk of an embedding is told as one of many": (
        StepBuilder,
        "advance",
        lambda advance: (
            lambda self: (
                advance(self),
                setattr(self, "pooled", [item._replace(ends=False) for item in self.pooled]),
            )[0]
        ),
    ),
}


STATE_MUTATIONS: dict[str, tuple[Any, str, Callable[[Wrap], Wrap]]] = {
    "a snapshot is taken one token early": (
        KVCacheManager,
        "save_states",
        lambda save: lambda *args: [write._replace(num_tokens=write.num_tokens - 1) for write in save(*args)],
    ),
    "a snapshot is of one block less than its hash": (
        StateSnapshots,
        "longest",
        lambda longest: lambda self, digests, count: min(count, longest(self, digests, count) + 1),
    ),
    "an evicted snapshot is still found": (
        StateSnapshots,
        "_take",
        lambda take: (
            lambda self: (
                known := next(iter(self._by_hash.items()), None) if not self._free else None,
                take(self),
                None if known is None else self._insert(*known),
            )[1]
        ),
    ),
    "a slot goes on with the state that it has": (
        KVCacheManager,
        "adopt",
        lambda adopt: lambda self, sequence, hit: (adopt(self, sequence, hit), setattr(sequence, "snapshot", -1)),
    ),
    "a snapshot of a failed step stays": (StateSnapshots, "withdraw", lambda _: lambda self, snapshots: None),
    "a reserved snapshot is not given back": (StateSnapshots, "release", lambda _: lambda self, sequence: None),
    "a snapshot of an output is free and found": (
        StateSnapshots,
        "drop",
        lambda _: lambda self, digest: digest not in self or self._free.append(self._by_hash[digest]),
    ),
}


@pytest.mark.parametrize("mutation", STATE_MUTATIONS)
def test_a_walk_with_snapshots_of_states_fails_under_each_mutation(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, mutate = STATE_MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    with pytest.raises(Exception):  # noqa: B017 - any way of noticing counts
        walk(random.Random(2), min_steps=30_000, has_states=True, num_snapshots=3)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_random_walk_fails_under_each_mutation(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, mutate = MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    with pytest.raises(Exception):  # noqa: B017 - any way of noticing counts
        walk(random.Random(2), min_steps=30_000)  # this history meets all of them early
