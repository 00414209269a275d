"""First come, first served; and static batching, the baseline that continuous batching is measured against."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from inferengine.core.sequence import Sequence, SequenceStatus

FEW_REMOVED = 32  # removed entries that are kept in any case


def is_mostly_removed(num_removed: int, length: int) -> bool:
    """Whether to drop removed entries now instead of at the head of the queue.

    Else cancelled requests would pile up while nothing is admitted. The cost is O(1) per removal, amortised.
    """
    return num_removed > FEW_REMOVED and 2 * num_removed > length


class FirstComeFirstServed:
    """Order of arrival. A removed sequence stays in the queue until it is its head, or most entries are removed."""

    tenants = None

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._num_removed = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self._queue.append(sequence)
        self.num_tokens += sequence.num_prompt

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        self._queue.appendleft(sequence)
        self.num_tokens += sequence.num_prompt

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        while self._queue and self._queue[0].status is SequenceStatus.FINISHED:
            self._queue.popleft()
            self._num_removed -= 1
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        sequence = self._queue.popleft()
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
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
    """Static batching: a batch runs to its last token before the next one is formed."""

    def __init__(self) -> None:
        super().__init__()
        self._formed_at = float("-inf")

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        if num_running == 0:
            self._formed_at = now
        head = super().peek(now, num_running)
        if head is None or head.num_preemptions or now == self._formed_at:
            return head
        return None
