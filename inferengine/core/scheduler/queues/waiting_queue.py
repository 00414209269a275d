"""What the scheduler needs of a waiting queue: the policy is an object, the scheduler does not know which."""

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
        """Who shares the engine between tenants; None: nobody asks whose a request is."""
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

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class TenantShares(Protocol):
    """What a queue that knows tenants is told and asked beyond the order of waiting."""

    def started(self, sequence: Sequence) -> None:
        """The sequence that `pop` returned runs."""
        ...

    def stopped(self, sequence: Sequence) -> None:
        """A sequence runs no more; if it waits again, it has been pushed back."""
        ...

    def claimant(self, now: float, num_slots: int) -> Sequence | None:
        """The waiting sequence, which `peek` returns, of a tenant that has much less than its share of the slots, or
        nothing running, while others run."""
        ...

    def is_preemptible(self, sequence: Sequence, claimant: Sequence, num_slots: int) -> bool:
        """Whether the tenant of this running sequence keeps its own without it."""
        ...

    def share(self) -> float:
        """Part of the engine that is a tenant's own: one over the number of active ones."""
        ...

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Which of these running ones, in order of admission, gives way when room runs out."""
        ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens were generated for a sequence."""
        ...

    def charge_each(self, sequences: SequenceOf[Sequence], layout: int) -> None:
        """A token was generated for each. Equal `layout` means the very same sequences."""
        ...

    def ahead_of(self, tenant: str) -> tuple[int, int]:
        """Requests and prompt tokens that are admitted before a new request of this tenant, about. May be asked from
        any thread."""
        ...
