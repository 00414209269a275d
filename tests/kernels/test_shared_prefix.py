"""Rows that begin with the same blocks: their first keys are read once, with the results of reading them row by row."""

from __future__ import annotations

import random

import pytest
import torch

from inferengine.kernels import cpu, cpu_shared_prefix
from inferengine.kernels.cpu import MIN_EQUAL_STEPS
from tests.kernels.test_decode_kv_cache import BLOCK_SIZE, HEADS, Case

LEAST = 2 * BLOCK_SIZE


@pytest.fixture(autouse=True)
def share_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share what would not be worth it, so that small cases do."""
    monkeypatch.setattr(cpu_shared_prefix, "LEAST_TOKENS", LEAST)
    monkeypatch.setattr(cpu_shared_prefix, "LEAST_SAVED", 1)


class SharedCase(Case):
    """Rows of these lengths; each of `groups` (slots, tokens) begins with the same blocks."""

    def __init__(self, lengths: list[int], *groups: tuple[list[int], int]) -> None:
        super().__init__(lengths)
        self.offsets: dict[int, int] = {}  # of the last step, by slot
        for slots, tokens in groups:
            self.tables[slots, : tokens // BLOCK_SIZE] = self.tables[slots[0], : tokens // BLOCK_SIZE]

    def batch(self, counts, decode_kv_cache, admitted, window=None):
        batch = super().batch(counts, decode_kv_cache, admitted, window)
        if decode_kv_cache is not None:
            shared = batch.plans[0].shared
            self.offsets = dict.fromkeys(counts, 0)
            if shared is not None:
                self.offsets |= dict(zip(counts, shared.offsets.tolist(), strict=False))
        return batch


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("case", "offsets"),
    [
        (lambda: SharedCase([40, 37, 30], ([0, 1, 2], 24)), [24, 24, 24]),
        (lambda: SharedCase([40, 37, 30, 33], ([0, 2], 16)), [16, 0, 16, 0]),
        (lambda: SharedCase([40, 37, 30, 33], ([0, 2], 16), ([1, 3], 28)), [16, 28, 16, 28]),
        (lambda: SharedCase([40, 37, 30], ([0, 1, 2], 12), ([0, 1], 36)), [12, 12, 12]),
        (lambda: SharedCase([40, 37], ([0, 1], LEAST - BLOCK_SIZE)), [0, 0]),
    ],
    ids=["all", "some", "two groups", "what all have", "too little"],
)
def test_rows_share_what_they_begin_with(case, offsets, softcap) -> None:
    made = case()
    for _ in range(MIN_EQUAL_STEPS + 8):
        made.step(softcap=softcap)  # compares with each row by itself
        assert list(made.offsets.values()) == offsets


def test_what_follows_a_prefix_lies_in_copies() -> None:
    case = SharedCase([40, 39, 38, 16], ([0, 1, 2], 24))
    assert [case.step() for _ in range(80)] == [False] * MIN_EQUAL_STEPS + [True] * (80 - MIN_EQUAL_STEPS)
    assert case.check() == sum(case.starts.values()) - 3 * 24


def test_sinks_take_their_part_once() -> None:
    case = SharedCase([40, 37, 30, 33], ([0, 1, 2], 24))
    sinks = torch.linspace(-2.0, 2.0, HEADS)
    for _ in range(MIN_EQUAL_STEPS + 3):
        case.step(sinks=sinks)
    assert list(case.offsets.values()) == [24, 24, 24, 0]


def test_a_newcomer_joins_and_a_prefix_outlives_those_who_made_it() -> None:
    case = SharedCase([40, 37, 30, 33], ([0, 1, 2, 3], 20))
    case.step({0: 1, 1: 1})
    assert set(case.offsets.values()) == {20}
    case.step({0: 1, 1: 1, 2: 1}, admitted=(2,))
    assert case.offsets == {0: 20, 1: 20, 2: 20}
    for _ in range(4):
        case.step({2: 1})
    assert case.offsets == {2: 20}
    case.step({2: 1, 3: 1}, admitted=(3,))
    assert case.offsets == {2: 20, 3: 20}


def test_blocks_that_were_given_to_others_are_read_again() -> None:
    case = SharedCase([40, 37, 30, 33], ([0, 1, 2, 3], 20))
    case.step({0: 1, 1: 1})
    case.kv[case.tables[0, :5].long()] += 1.0  # both have ended: other requests filled the same blocks anew
    case.step({2: 1, 3: 1}, admitted=(2, 3))
    assert case.offsets == {2: 20, 3: 20}
    case.step({0: 1, 1: 1}, admitted=(0, 1))
    case.kv[case.tables[0, :5].long()] += 1.0
    case.step({0: 1, 1: 1}, admitted=(0, 1))  # the same slots, of other requests
    assert case.offsets == {0: 20, 1: 20}


def test_a_row_that_starts_again_within_its_prefix_leaves_it() -> None:
    case = SharedCase([40, 37, 30], ([0, 1, 2], 20))
    case.step()
    unused = sorted(set(range(len(case.kv))) - set(case.tables.flatten().tolist()))
    case.tables[0, :5] = torch.tensor(unused[:5])
    case.starts[0] = 10
    case.step({1: 1, 2: 1, 0: 6})
    assert case.offsets == {1: 20, 2: 20, 0: 0}


def test_a_step_that_failed_forgets_prefixes() -> None:
    case = SharedCase([40, 37], ([0, 1], 20))
    case.step()
    case.decode_kv_cache.begin(case.batch({0: 1, 1: 1}, None, []).columns, [])  # and never ends
    case.kv[case.tables[0, :5].long()] += 1.0
    case.step()
    assert set(case.offsets.values()) == {20}


def test_windows_share_nothing() -> None:
    case = SharedCase([40, 37], ([0, 1], 20))
    batch = case.batch({0: 1, 1: 1}, case.decode_kv_cache, [], window=8)
    assert batch.plans[0].shared is None


def test_what_saves_too_little_or_takes_too_much_memory_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    of_prefix = 20 * 2 * cpu_bytes_of_token()
    monkeypatch.setattr(cpu_shared_prefix, "LEAST_SAVED", of_prefix + 1)
    case = SharedCase([40, 37, 30], ([0, 1, 2], 20))
    case.step({0: 1, 1: 1})
    assert set(case.offsets.values()) == {0}
    case.step({0: 1, 1: 1, 2: 1})  # with a third one it is worth it
    assert set(case.offsets.values()) == {20}
    monkeypatch.setattr(cpu_shared_prefix, "MOST_BYTES", of_prefix - 1)
    case = SharedCase([40, 37, 30], ([0, 1, 2], 20))
    case.step()
    assert set(case.offsets.values()) == {0}


def cpu_bytes_of_token() -> int:
    """Return the bytes of one layer's keys, or values, of a token."""
    kv = Case([1]).kv
    return kv.shape[2] * kv.shape[4] * kv.element_size()


class Walk(SharedCase):
    """Requests that come and go in the same slots and blocks; some begin as another one that runs."""

    def __init__(self, seed: int) -> None:
        super().__init__([0] * 8)
        self.draw = random.Random(seed)
        self.free = set(range(len(self.kv)))
        self.running: set[int] = set()
        self.new: set[int] = set()  # of those that run: no step has computed any of it

    def arrive(self, slot: int) -> None:
        """Fill blocks as if they had been computed: swapped in, or found in the prefix cache."""
        num_shared = 0
        others = [other for other in sorted(self.running) if self.starts[other] >= BLOCK_SIZE]
        if others and self.draw.random() < 0.7:
            like = self.draw.choice(others)
            num_shared = self.draw.randint(1, self.starts[like] // BLOCK_SIZE)
            self.tables[slot, :num_shared] = self.tables[like, :num_shared]
        own = self.draw.sample(sorted(self.free), self.tables.shape[1] - num_shared)
        self.free.difference_update(own)
        self.tables[slot, num_shared:] = torch.tensor(own)
        self.kv[own] = torch.randn(len(own), *self.kv.shape[1:])
        self.starts[slot] = num_shared * BLOCK_SIZE + self.draw.randint(0, 12)
        self.running.add(slot)
        self.new.add(slot)

    def leave(self, slot: int) -> None:
        self.running.remove(slot)
        self.new.discard(slot)
        held = {block for other in self.running for block in self.tables[other].tolist()}
        self.free |= set(self.tables[slot].tolist()) - held

    def go_on(self, slots: list[int]) -> None:
        counts = {slot: self.draw.choice([1, 1, 1, 1, 1, 3, 20]) for slot in slots}
        ordered = dict(sorted(counts.items(), key=lambda item: (item[1] > 1, item[1] > cpu.SHORT_ROW)))
        self.step(ordered, admitted=tuple(self.new & ordered.keys()))
        self.new -= ordered.keys()
        for slot, count in counts.items():
            if count <= cpu.SHORT_ROW:
                self.starts[slot] -= self.draw.randrange(count)  # rejected draft tokens


@pytest.mark.parametrize("seed", range(6))
def test_any_walk_gives_what_rows_by_themselves_give(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "RAGGED", 5.0)  # rows of any length lie side by side
    walk, num_shared, num_copied = Walk(seed), 0, 0
    for _ in range(150):
        for slot in range(8):
            if slot in walk.running and (walk.starts[slot] > 200 or walk.draw.random() < 0.03):
                walk.leave(slot)
            if slot not in walk.running and walk.draw.random() < 0.2:
                walk.arrive(slot)
        stepping = sorted(slot for slot in walk.running if walk.draw.random() < 0.97)
        if stepping:
            walk.go_on(stepping)
            num_shared += any(walk.offsets.values())
            num_copied += walk.check(walk.running - walk.new) > 0
    assert num_shared > 30
    assert num_copied > 10
