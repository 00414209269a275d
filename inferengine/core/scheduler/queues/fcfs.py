"""First come, first served.

Static batching: a batch is formed, runs to its last token, and only then the next one is formed.

Nobody should serve like this. It is the first rung of the ladder of benchmarks: what continuous batching is measured
against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from inferengine.core.sequence import Sequence, SequenceStatus

FEW_REMOVED = 32  # marks that are left alone


def is_mostly_removed(num_removed: int, length: int) -> bool:
    """Whether to drop the marks now, not when they come to the head: while nobody is admitted, requests that come and
    are cancelled would pile up. Each sweep is paid for by the removals before it."""
    return num_removed > FEW_REMOVED and 2 * num_removed > length


class FirstComeFirstServed:
    """Order of arrival. Removal marks; the mark is dropped when it comes to the head, or when marks are the most."""

    tenants = None

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._num_removed = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        self._queue.append(sequence)
        self.num_tokens += sequence.num_prompt

    def push_back(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)
        self.num_tokens += sequence.num_prompt

    def peek(self, now: float, num_running: int) -> Sequence | None:
        while self._queue and self._queue[0].status is SequenceStatus.FINISHED:
            self._queue.popleft()
            self._num_removed -= 1
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        sequence = self._queue.popleft()
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._num_removed += 1
        self.num_tokens -= sequence.num_prompt
        if is_mostly_removed(self._num_removed, len(self._queue)):
            self._queue = deque(item for item in self if item is not sequence)
            self._num_removed = 0

    def __len__(self) -> int:
        return len(self._queue) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.status is not SequenceStatus.FINISHED)


class StaticBatch(FirstComeFirstServed):
    """First come, first served, but admits only in the step that finds nothing running."""

    def __init__(self) -> None:
        super().__init__()
        self._formed_at = float("-inf")

    def peek(self, now: float, num_running: int) -> Sequence | None:
        if num_running == 0:
            self._formed_at = now
        head = super().peek(now, num_running)
        if head is None or head.num_preemptions or now == self._formed_at:
            return head
        return None
