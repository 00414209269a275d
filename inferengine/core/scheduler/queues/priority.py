"""OrderedQueue: admits the sequence with the smallest key first. The key is fixed at arrival, so a heap is enough.

Ageing without re-sorting: if a sequence's urgency grows by one unit per `ageing_s` of waiting, all waiting sequences
gain at the same rate, and their order is that of (unaged key + arrival / ageing_s), which does not change with time.
So no request starves: one that waits long enough is older than anything that can still arrive.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from inferengine.core.scheduler.queues.fcfs import is_mostly_removed
from inferengine.core.sequence import Sequence, SequenceStatus

PRIORITY_AGEING_S = 10.0  # seconds of waiting that count as one level of priority
TOKEN_AGEING_S = 0.01  # seconds of waiting that count as one token of length
DEFAULT_SLACK_S = 60.0  # assumed deadline, from arrival, of a request without one


def priority_key(sequence: Sequence) -> float:
    """Order by `priority`, lower first, with ageing."""
    return sequence.request.priority + sequence.request.arrival_s / PRIORITY_AGEING_S


def shortest_key(sequence: Sequence) -> float:
    """Order by the most work that a request can be (prompt + max_tokens), least first, with ageing."""
    work = sequence.num_prompt + sequence.request.max_tokens
    return work + sequence.request.arrival_s / TOKEN_AGEING_S


def deadline_key(sequence: Sequence) -> float:
    """Order by deadline, earliest first (Liu and Layland 1973)."""
    request = sequence.request
    return request.deadline_s if request.deadline_s is not None else request.arrival_s + DEFAULT_SLACK_S


class OrderedQueue:
    """A heap by `key`, ties by arrival. Preempted sequences come before all others, in the order of their keys."""

    tenants = None

    def __init__(self, key: Callable[[Sequence], float]) -> None:
        self._key = key
        self._heap: list[tuple[bool, float, int, Sequence]] = []
        self._num_removed = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        heapq.heappush(self._heap, (True, self._key(sequence), sequence.uid, sequence))
        self.num_tokens += sequence.num_prompt

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        heapq.heappush(self._heap, (False, self._key(sequence), sequence.uid, sequence))
        self.num_tokens += sequence.num_prompt

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        while self._heap and self._heap[0][3].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_removed -= 1
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        sequence = heapq.heappop(self._heap)[3]
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        self._num_removed += 1
        self.num_tokens -= sequence.num_prompt
        if is_mostly_removed(self._num_removed, len(self._heap)):
            self._heap = [
                item for item in self._heap if item[3] is not sequence and item[3].status is not SequenceStatus.FINISHED
            ]
            heapq.heapify(self._heap)
            self._num_removed = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (item[3] for item in sorted(self._heap[:]) if item[3].status is not SequenceStatus.FINISHED)
