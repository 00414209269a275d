"""What the scheduler needs of a waiting queue: the policy is an object, the scheduler does not know which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from inferengine.core.sequence import Sequence


class WaitingQueue(Protocol):
    """Holds WAITING and PREEMPTED sequences. Removal may be lazy, but `len` and `num_tokens` are exact."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting (the output of a preempted sequence may still grow)."""
        ...

    @property
    def wants_charges(self) -> bool:
        """Whether `charge` does anything."""
        ...

    def push(self, sequence: Sequence) -> None:
        """A new sequence."""
        ...

    def push_back(self, sequence: Sequence) -> None:
        """A preempted sequence: it has been admitted once, so it goes before all that have not."""
        ...

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """The sequence to admit next, or None."""
        ...

    def pop(self) -> Sequence:
        """Take out what `peek` returned."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose status has been set to FINISHED."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens were generated for a running sequence."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...
