"""WaitingQueue and TenantShares: the protocols through which the scheduler uses a queueing policy."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from inferengine.core.sequence import Sequence


class WaitingQueue(Protocol):
    """Holds WAITING and PREEMPTED sequences. Removal may be lazy, but `len` and `num_tokens` are exact."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting (the output of a preempted sequence may still grow)."""
        ...

    @property
    def tenants(self) -> TenantShares | None:
        """The shares of tenants; None where the policy does not know tenants."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        ...

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence: it goes before all that were never admitted."""
        ...

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        ...

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence whose status has been set to FINISHED."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class TenantShares(Protocol):
    """What a queue that knows tenants does beyond the order of waiting."""

    def started(self, sequence: Sequence) -> None:
        """Count the sequence that `pop` returned as running."""
        ...

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as not running; if it waits again, it has been pushed back before."""
        ...

    def claimant(self, now: float, num_slots: int) -> Sequence | None:
        """Return the sequence that `peek` returns if its tenant has nothing running, or much less than its share of the
        slots, while others run; else None."""
        ...

    def is_preemptible(self, sequence: Sequence, claimant: Sequence, num_slots: int) -> bool:
        """Whether the tenant of this running sequence keeps its share without it."""
        ...

    def share(self) -> float:
        """Return a tenant's share of the engine: one over the number of active tenants."""
        ...

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Return which of these running sequences, in order of admission, is preempted next."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a sequence's tenant for generated tokens."""
        ...

    def charge_each(self, sequences: SequenceOf[Sequence], layout: int) -> None:
        """Charge one token for each sequence. Equal `layout` means the very same sequences."""
        ...

    def ahead_of(self, tenant: str) -> tuple[int, int]:
        """Return about how many requests and prompt tokens are admitted before a new request of this tenant. In any
        thread."""
        ...
