"""First come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from inferengine.core.sequence import Sequence, Status


class FirstComeFirstServed:
    """Order of arrival. Removal marks; the mark is dropped when it comes to the head."""

    wants_charges = False

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
        while self._queue and self._queue[0].status is Status.FINISHED:
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

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Order of arrival owes nobody anything."""

    def __len__(self) -> int:
        return len(self._queue) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.status is not Status.FINISHED)
