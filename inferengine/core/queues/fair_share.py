"""Fair share per tenant by virtual token counters (Sheng et al., "Fairness in Serving LLMs", OSDI 2024).

Each tenant has a counter of the service it got: its prompt tokens when a request is admitted, its output tokens as they
are generated, an output token weighing more than a prompt token because it costs more. The waiting tenant with the
smallest counter is admitted next. A tenant that comes back after a pause starts at the smallest counter of those that
wait, so idling saves up nothing. Two tenants that always have work get service within a constant of each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from inferengine.core.queues.first_come import FirstComeFirstServed, is_mostly_removed
from inferengine.core.sequence import Sequence

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MAX_IDLE_TENANTS = 10_000  # counters kept of tenants with nothing waiting


class FairShare:
    """One queue in order of arrival per tenant; the least served tenant's head is next."""

    wants_charges = True

    def __init__(self) -> None:
        self._queues: dict[str, FirstComeFirstServed] = {}
        self._counters: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # lazily ordered: an entry is valid if it equals the counter
        self._preempted = FirstComeFirstServed()
        self._head: FirstComeFirstServed | None = None
        self._length = 0
        self.num_tokens = 0

    def push(self, sequence: Sequence) -> None:
        self._count(sequence, 1)
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            self._lift(tenant)
            queue = self._queues[tenant] = FirstComeFirstServed()
            heapq.heappush(self._heap, (self._counters[tenant], tenant))
        queue.push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        self._count(sequence, 1)
        self._preempted.push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        self._head = self._preempted
        sequence = self._preempted.peek(now, num_running)
        if sequence is not None:
            return sequence
        while self._heap:
            counter, tenant = self._heap[0]
            queue = self._queues.get(tenant)
            sequence = queue.peek(now, num_running) if queue is not None else None
            if queue is None or sequence is None:
                heapq.heappop(self._heap)
                if queue is not None and not len(queue):
                    del self._queues[tenant]
                continue
            if counter != self._counters[tenant]:
                heapq.heapreplace(self._heap, (self._counters[tenant], tenant))
                continue
            self._head = queue
            return sequence
        return None

    def pop(self) -> Sequence:
        if self._head is None:
            raise RuntimeError("pop without peek")
        sequence = self._head.pop()
        self._count(sequence, -1)
        if self._head is not self._preempted:
            self._counters[sequence.request.tenant] += PROMPT_WEIGHT * sequence.num_prompt
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._count(sequence, -1)
        if sequence.num_preemptions:
            self._preempted.remove(sequence)
            return
        queue = self._queues[sequence.request.tenant]
        queue.remove(sequence)
        if not len(queue):  # what is left of it is marks
            del self._queues[sequence.request.tenant]
            if is_mostly_removed(len(self._heap) - len(self._queues), len(self._heap)):
                self._heap = [(self._counters[tenant], tenant) for tenant in self._queues]
                heapq.heapify(self._heap)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.tenant
        self._counters[tenant] = self._counters.get(tenant, 0.0) + OUTPUT_WEIGHT * num_tokens

    def service(self, tenant: str) -> float:
        """Weighted tokens that the tenant got, counted from where it last joined."""
        return self._counters.get(tenant, 0.0)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for tenant in sorted(self._queues, key=lambda name: (self._counters[name], name)):
            yield from self._queues[tenant]

    def _count(self, sequence: Sequence, change: int) -> None:
        self._length += change
        self.num_tokens += change * sequence.num_prompt

    def _lift(self, tenant: str) -> None:
        """A tenant that joins starts no lower than the least served one that waits."""
        floor = min((self._counters[name] for name in self._queues), default=0.0)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)
        if len(self._counters) > MAX_IDLE_TENANTS + len(self._queues):
            # tenants come from outside: forget the idle ones that got least; joining again lifts them anyway
            idle = [name for name in self._counters if name not in self._queues and name != tenant]
            for name in heapq.nsmallest(MAX_IDLE_TENANTS // 2, idle, key=self._counters.__getitem__):
                del self._counters[name]
