"""FairShare written plainly: every name has a next level from its first request on, and the least served one is looked
for among all. The engine's own saves both (core/scheduler/queues.py), and must decide the same."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from inferengine.core.scheduler import queues
from inferengine.core.scheduler.queues import (
    CLAIMED_FRACTION,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Claim,
    FirstComeFirstServed,
)
from inferengine.core.sequence import SHARE_LEVELS, Sequence, Share


class PlainFairShare:
    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.is_last = level + 1 == SHARE_LEVELS
        self.queues: dict[str, FirstComeFirstServed | PlainFairShare] = {}  # of names with something waiting
        self.parts: dict[str, PlainFairShare] = {}  # the next level, of names with something waiting or running
        self.counters: dict[str, float] = {}
        self.resting: dict[str, None] = {}
        self.num_running: Counter[str] = Counter()
        self.floor = 0.0
        self.first: str | None = None
        self.num_tokens = 0

    def name(self, sequence: Sequence) -> str:
        return sequence.request.share[self.level]

    # -- waiting

    def push(self, sequence: Sequence) -> None:
        self.num_tokens += sequence.num_prompt
        self.queue_of(self.name(sequence)).push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        self.num_tokens += sequence.num_prompt
        self.queue_of(self.name(sequence)).push_back(sequence)

    def queue_of(self, name: str) -> FirstComeFirstServed | PlainFairShare:
        if name not in self.queues:
            if name not in self.num_running:
                self.lift(name)
            self.queues[name] = FirstComeFirstServed() if self.is_last else self.part_of(name)
        return self.queues[name]

    def part_of(self, name: str) -> PlainFairShare:
        return self.parts.setdefault(name, PlainFairShare(self.level + 1))

    def next_name(self) -> str:
        if self.first in self.queues and len(self.queues) > 1:
            return self.first
        return min(self.queues, key=lambda name: (name in self.num_running, self.counters[name], name))

    def peek(self, now: float, num_running: int) -> Sequence | None:
        if len(self.queues) != 1 and self.first not in self.queues:
            self.first = None
        return self.queues[self.next_name()].peek(now, num_running) if self.queues else None

    def pop(self) -> Sequence:
        name = self.next_name()
        sequence, self.first = self.queues[name].pop(), None
        self.num_tokens -= sequence.num_prompt
        if not len(self.queues[name]):
            del self.queues[name]
            if name not in self.num_running:
                self.resting[name] = None
        if not sequence.num_preemptions:
            num_prompt = sequence.num_prompt if sequence.leader is None else 1
            self.counters[name] += PROMPT_WEIGHT * num_prompt * sequence.token_cost
        return sequence

    def remove(self, sequence: Sequence) -> None:
        name = self.name(sequence)
        self.num_tokens -= sequence.num_prompt
        self.queues[name].remove(sequence)
        if not len(self.queues[name]):
            del self.queues[name]
            self.left(name)

    # -- running

    def started(self, sequence: Sequence) -> None:
        name = self.name(sequence)
        if name not in self.counters:
            self.lift(name)
        self.resting.pop(name, None)
        self.num_running[name] += 1
        if not self.is_last:
            self.part_of(name).started(sequence)

    def stopped(self, sequence: Sequence) -> None:
        name = self.name(sequence)
        if not self.is_last:
            self.parts[name].stopped(sequence)
        self.num_running[name] -= 1
        if not self.num_running[name]:
            del self.num_running[name]
            if name not in self.queues:
                self.left(name)

    def claims(self, now: float, num_slots: float, *, has_free_slot: bool) -> Iterator[Claim]:
        if not self.queues or not self.num_running or not (has_free_slot or self.may_give_way):
            return
        fraction = self.fraction()
        if fraction < 1.0:
            sequence = self.peek(now, 0)
            if sequence is not None:
                num_running = self.num_running[self.name(sequence)]
                if num_running == 0 or num_running < CLAIMED_FRACTION * fraction * num_slots:
                    yield Claim(sequence, fraction, num_slots, (self,))  # type: ignore[arg-type]
        for name, num_running in self.num_running.items():
            if not self.is_last and name in self.queues and (has_free_slot or num_running > 1):
                for claim in self.parts[name].claims(now, num_slots * fraction, has_free_slot=has_free_slot):
                    yield replace(claim, fraction=claim.fraction * fraction, nodes=(self, *claim.nodes))  # type: ignore[arg-type]

    def fraction(self) -> float:
        return 1 / max(1, len(self.queues.keys() | self.num_running.keys()))

    @property
    def is_shared(self) -> bool:
        return self.fraction() < 1.0 or any(part.is_shared for part in self.parts.values())

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        if len(self.num_running) > 1:
            names = dict.fromkeys(map(self.name, candidates))
            heaviest = max(names, key=lambda name: (self.num_running[name], self.counters[name]))
            candidates = [sequence for sequence in candidates if self.name(sequence) == heaviest]
        return candidates[-1] if self.is_last else self.parts[self.name(candidates[-1])].victim(candidates)

    @property
    def may_give_way(self) -> bool:
        return max(self.num_running.values(), default=0) > 1

    def gives_way(self, sequence: Sequence, claimant: Sequence, num_slots: float) -> bool:
        name, claiming = self.name(sequence), self.name(claimant)
        if not self.num_running[claiming]:
            return self.num_running[name] > 1
        is_after = (self.counters[claiming], claiming) < (self.counters[name], name)
        return is_after and self.num_running[name] > self.fraction() * num_slots

    def admit_first(self, sequence: Sequence) -> None:
        self.first = self.name(sequence)

    # -- counters

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        name = self.name(sequence)
        if name not in self.counters:
            self.counters[name], self.resting[name] = 0.0, None
        self.counters[name] += OUTPUT_WEIGHT * num_tokens
        if name in self.parts:
            self.parts[name].charge(sequence, num_tokens)

    def ahead_of(self, share: Share) -> tuple[int, int]:
        queue = self.queues.get(share[self.level])
        if queue is None:
            return 0, 0
        num_requests, num_tokens = len(queue), queue.num_tokens
        if isinstance(queue, PlainFairShare):
            num_requests, num_tokens = queue.ahead_of(share)
        return min(len(self), num_requests * len(self.queues)), min(self.num_tokens, num_tokens * len(self.queues))

    def lift(self, name: str) -> None:
        waiting = [one for one in self.queues if one not in self.num_running]
        floor = min((self.counters[one] for one in [*self.num_running, *waiting]), default=self.floor)
        self.counters[name] = max(self.counters.get(name, 0.0), floor)
        self.resting.pop(name, None)
        most = queues.MAX_IDLE_PARTS if self.level else queues.MAX_IDLE_NAMES
        if len(self.resting) >= most:
            for one in heapq.nsmallest(most // 2, self.resting, key=self.counters.__getitem__):
                del self.counters[one], self.resting[one]

    def left(self, name: str) -> None:
        if name not in self.num_running:
            self.resting[name] = None
            self.floor = max(self.floor, self.counters[name])
            self.parts.pop(name, None)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for name in sorted(self.queues, key=lambda name: (name in self.num_running, self.counters[name], name)):
            yield from self.queues[name]
