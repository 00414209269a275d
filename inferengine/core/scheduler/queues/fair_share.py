"""Fair share between tenants (Virtual Token Counter: Sheng et al., Fairness in Serving Large Language Models, 2024).

Each tenant has a counter of its service: its prompt tokens when a request is admitted first, its output tokens
as they are generated, an output token weighing more than a prompt token because it costs more. A waiting tenant of
which nothing runs is admitted before those of which something does; among equals the smallest counter is next. A tenant
that comes back after a pause starts no lower than the least served active one: idling earns nothing. Two
tenants that always have work get service within a constant of each other.

With one tenant this is first come, first served, in the same order and at the same cost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from inferengine.core.scheduler.queues.fcfs import FirstComeFirstServed
from inferengine.core.sequence import Sequence

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CLAIMED_SHARE = 0.25  # part of its share of slots that a tenant takes from others; with all of it two would alternate
MAX_IDLE_TENANTS = 10_000  # counters kept of tenants with nothing waiting
FEW_STALE = 32  # outdated heap entries that are kept in any case


class FairShare:
    """One queue in order of arrival per tenant; what was preempted goes to the head of its own."""

    def __init__(self) -> None:
        self._queues: dict[str, FirstComeFirstServed] = {}  # none of them is empty
        self._counters: dict[str, float] = {}
        self._num_running: Counter[str] = Counter()  # tenants with something running
        self._idle: list[tuple[float, str]] = []  # heap of waiting tenants of which nothing runs, and of the others:
        self._busy: list[tuple[float, str]] = []  # an entry counts if it is in the right one and equals the counter
        self._floor = 0.0  # where a tenant starts when no other is active
        self._head: FirstComeFirstServed | None = None
        self._counts: Counter[str] = Counter()  # tokens by tenant of the steps of this layout:
        self._layout = -1
        self._length = 0
        self.num_tokens = 0

    @property
    def tenants(self) -> FairShare:
        """This queue shares the engine between tenants."""
        return self

    # -- waiting -----------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self._count(sequence, 1)
        self._queue_of(sequence.request.tenant).push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence, before all that were never admitted."""
        self._count(sequence, 1)
        self._queue_of(sequence.request.tenant).push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        if len(self._queues) == 1:
            (self._head,) = self._queues.values()
            return self._head.peek(now, num_running)
        for heap, has_running in ((self._idle, False), (self._busy, True)):
            while heap:
                counter, tenant = heap[0]
                if tenant not in self._queues or (tenant in self._num_running) != has_running:
                    heapq.heappop(heap)
                elif counter != self._counters[tenant]:
                    heapq.heapreplace(heap, (self._counters[tenant], tenant))
                else:
                    self._head = self._queues[tenant]
                    return self._head.peek(now, num_running)
        return None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        if self._head is None:
            raise RuntimeError("pop without peek")
        sequence, self._head = self._head.pop(), None
        self._count(sequence, -1)
        tenant = sequence.request.tenant
        if not len(self._queues[tenant]):
            del self._queues[tenant]
        if not sequence.num_preemptions:
            num_prompt = sequence.num_prompt if sequence.leader is None else 1  # who shares a prompt computes one token
            self._counters[tenant] += PROMPT_WEIGHT * num_prompt * sequence.token_cost
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
        self._count(sequence, -1)
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        queue.remove(sequence)
        if not len(queue):  # only removed entries are left
            del self._queues[tenant]
            self._sweep()
            self._left(tenant)

    # -- running -----------------------------------------------------------------------------------------------------

    def started(self, sequence: Sequence) -> None:
        """Count a sequence as running."""
        tenant = sequence.request.tenant
        if tenant not in self._counters:  # dropped while the sequence waited for fault isolation, not here
            self._lift(tenant)
        self._num_running[tenant] += 1
        if self._num_running[tenant] == 1 and tenant in self._queues:
            self._enter(tenant)

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence as not running."""
        tenant = sequence.request.tenant
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
            if tenant in self._queues:
                self._enter(tenant)
            else:
                self._left(tenant)

    def claimant(self, now: float, num_slots: int) -> Sequence | None:
        """Return the next sequence if its tenant has much less than its share; None if it has to wait."""
        if not self._queues or not self._num_running or self.share() == 1.0:
            return None
        sequence = self.peek(now, len(self._num_running))
        if sequence is None:
            return None
        num_running = self._num_running[sequence.request.tenant]
        return sequence if num_running == 0 or num_running < CLAIMED_SHARE * self.share() * num_slots else None

    def share(self) -> float:
        """Return one over the number of active tenants."""
        return 1 / max(1, len(self._num_running.keys() | self._queues.keys()))

    def victim(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """Return the sequence admitted last of the tenant with the most running: a tenant that floods the engine must
        not preempt the others."""
        if len(self._num_running) > 1:
            count = Counter(sequence.request.tenant for sequence in candidates)
            heaviest = max(count, key=lambda tenant: (self._num_running[tenant], self._counters[tenant]))
            return next(item for item in reversed(candidates) if item.request.tenant == heaviest)
        return candidates[-1]

    def is_preemptible(self, sequence: Sequence, claimant: Sequence, num_slots: int) -> bool:
        """Whether the tenant of this running sequence keeps its share without it."""
        tenant, claiming = sequence.request.tenant, claimant.request.tenant
        num_running = self._num_running[tenant]
        if not self._num_running[claiming]:
            return num_running > 1
        # The less served tenant is admitted first: the victim must not get its slot back in the same step.
        is_after = (self._counters[claiming], claiming) < (self._counters[tenant], tenant)
        return is_after and num_running > self.share() * num_slots

    # -- counters ----------------------------------------------------------------------------------------------------

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a sequence's tenant for generated tokens."""
        tenant = sequence.request.tenant
        self._counters[tenant] = self._counters.get(tenant, 0.0) + OUTPUT_WEIGHT * num_tokens

    def charge_each(self, sequences: SequenceOf[Sequence], layout: int) -> None:
        """Charge one token for each sequence. Equal `layout` means the very same sequences."""
        if layout != self._layout:
            self._layout = layout
            if len(self._counters) == 1:  # no need to count for one tenant
                self._counts = Counter(dict.fromkeys(self._counters, len(sequences)))
            else:
                self._counts = Counter(sequence.request.tenant for sequence in sequences)
        for tenant, count in self._counts.items():
            self._counters[tenant] = self._counters.get(tenant, 0.0) + OUTPUT_WEIGHT * count

    def service(self, tenant: str) -> float:
        """Return the tenant's counter: weighted tokens, counted from where it last joined."""
        return self._counters.get(tenant, 0.0)

    def ahead_of(self, tenant: str) -> tuple[int, int]:
        """Return about how many requests and prompt tokens come before a new request of this tenant."""
        queue = self._queues.get(tenant)
        if queue is None:
            return 0, 0
        num_tenants = len(self._queues)
        return min(self._length, len(queue) * num_tenants), min(self.num_tokens, queue.num_tokens * num_tenants)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in sorted(self._queues, key=lambda name: (name in self._num_running, self._counters[name], name)):
            yield from self._queues[tenant]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _count(self, sequence: Sequence, change: int) -> None:
        self._length += change
        self.num_tokens += change * sequence.num_prompt

    def _queue_of(self, tenant: str) -> FirstComeFirstServed:
        queue = self._queues.get(tenant)
        if queue is None:
            if tenant not in self._num_running:
                self._lift(tenant)
            queue = self._queues[tenant] = FirstComeFirstServed()
            self._enter(tenant)
        return queue

    def _enter(self, tenant: str) -> None:
        """Put a waiting tenant into the heap that fits whether it has anything running."""
        heapq.heappush(self._busy if tenant in self._num_running else self._idle, (self._counters[tenant], tenant))
        self._sweep()

    def _sweep(self) -> None:
        """Drop outdated heap entries where they are the most: else they would pile up while nothing is admitted."""
        if len(self._idle) + len(self._busy) > FEW_STALE + 2 * len(self._queues):
            waiting = [(self._counters[tenant], tenant) for tenant in self._queues]
            self._idle = [entry for entry in waiting if entry[1] not in self._num_running]
            self._busy = [entry for entry in waiting if entry[1] in self._num_running]
            heapq.heapify(self._idle)
            heapq.heapify(self._busy)

    def _lift(self, tenant: str) -> None:
        """Raise the counter of a tenant that joins to that of the least served active one."""
        active = self._num_running.keys() | self._queues.keys()
        floor = min((self._counters[name] for name in active), default=self._floor)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        if len(self._counters) > MAX_IDLE_TENANTS + len(active):
            # clients choose the names: drop the idle tenants with the least service; joining again lifts them anyway
            idle = [name for name in self._counters if name not in active and name != tenant]
            for name in heapq.nsmallest(MAX_IDLE_TENANTS // 2, idle, key=self._counters.__getitem__):
                del self._counters[name]

    def _left(self, tenant: str) -> None:
        """Note that nothing of this tenant waits or runs. Tenants that come to an empty engine start from its counter:
        service that it got alone does not count against it."""
        if tenant not in self._num_running:
            self._floor = max(self._floor, self._counters[tenant])
