"""WaitingQueue: in which order waiting sequences are admitted. A policy is a class and one line in POLICIES."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from inferengine.core.sequence import Sequence, Status


class WaitingQueue(Protocol):
    """Holds WAITING and PREEMPTED sequences. `remove` may be lazy, but `len` and `num_tokens` are exact."""

    num_tokens: int  # prompt tokens waiting (the output of a preempted sequence may still grow)

    def push(self, sequence: Sequence) -> None:
        """A new sequence."""
        ...

    def push_back(self, sequence: Sequence) -> None:
        """A preempted sequence: it has been admitted once, so it goes before all that have not."""
        ...

    def peek(self, now: float) -> Sequence | None:
        """The sequence to admit next, or None."""
        ...

    def pop(self) -> Sequence:
        """Take out what `peek` returned."""
        ...

    def remove(self, sequence: Sequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FirstComeFirstServed:
    """Order of arrival. Removal marks; the mark is dropped when it comes to the head."""

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

    def peek(self, now: float) -> Sequence | None:
        while self._queue and self._queue[0].status is Status.FINISHED:
            self._queue.popleft()
            self._num_removed -= 1
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        sequence = self._queue.popleft()
        self.num_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """The caller has set its status to FINISHED."""
        self._num_removed += 1
        self.num_tokens -= sequence.num_prompt

    def __len__(self) -> int:
        return len(self._queue) - self._num_removed

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._queue if sequence.status is not Status.FINISHED)


POLICIES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
}
