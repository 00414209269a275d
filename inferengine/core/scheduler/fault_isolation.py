"""FaultIsolationQueue: finds the request that makes steps fail, where the executor does not know which one it is.

A step that throws has lost its work, not its requests: outputs are logs and a draw is a function of (seed, position),
so whatever is computed again gives the same. All rows of the failed step are suspects. They run again, all together
first (the failure may not come again), then in halves. A half that fails is halved again, and the request that fails
alone is the culprit. Meanwhile no other request is computed: it would be a suspect too. A culprit costs at most
log2(suspects) + 2 failed steps. Where too many tries in a row fail no single request is at fault, and all suspects end.

It wraps the waiting queue, because that is what suspects do: they wait for their try, or for the end of the others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from inferengine.core.scheduler.queues import WaitingQueue
from inferengine.core.scheduler.queues.waiting_queue import TenantShares
from inferengine.core.sequence import Sequence, SequenceStatus

MAX_UNEXPLAINED_FAILURES = 4  # beyond, a try gets no longer: all others wait for its end
SPARE_TRIES = 4  # failed tries in a row, beyond those that lead to one culprit, after which it is nobody's fault


class FaultIsolationQueue:
    """A WaitingQueue. Without suspects it is the one inside."""

    def __init__(self, inner: WaitingQueue) -> None:
        self.inner = inner
        self._ends: dict[Sequence, int] = {}  # of suspects: tokens computed when the try has gone well
        self._groups: list[list[Sequence]] = []  # still to be tried, the next one last
        self._trial: list[Sequence] = []  # tried now
        self._ready: deque[Sequence] = deque()  # of these, who waits to be admitted
        self._cleared: list[Sequence] = []  # have gone well, and wait for the others
        self._most_tries = 0
        self._num_failed = 0  # tries in a row
        self._found = False  # a culprit, in this incident

    # -- suspects ----------------------------------------------------------------------------------------------------

    @property
    def is_isolating(self) -> bool:
        return bool(self._trial)

    def isolate(self, sequences: SequenceOf[Sequence], ends: SequenceOf[int]) -> list[Sequence]:
        """A step of these running sequences failed, which would have computed them up to `ends`. Returns who is to be
        ended for it; all others that run are to be put back into this queue."""
        if not self._trial:
            for sequence, end in zip(sequences, ends, strict=True):
                self._ends[sequence] = end + 4 ** min(sequence.num_unexplained_failures, MAX_UNEXPLAINED_FAILURES) - 1
            self._most_tries = len(sequences).bit_length() + SPARE_TRIES
            self._num_failed, self._found = 0, False
            self._begin(list(sequences))
            return []
        # A try that fails: only those that had a row in it are any wiser.
        rows = set(sequences)
        failed = [sequence for sequence in self._trial if sequence in rows]
        others = [sequence for sequence in _live(self._trial) if sequence not in rows]
        self._num_failed += 1
        if others:
            self._groups.append(others)
        if len(failed) == 1 or self._num_failed > self._most_tries:
            self._found = True
            self._begin(failed)
            return failed if len(failed) == 1 else [*failed, *(one for group in self._groups for one in group)]
        half = (len(failed) + 1) // 2
        self._groups.append(failed[half:])
        self._begin(failed[:half])
        return []

    def next_trial(self) -> list[Sequence]:
        """Between two steps, with none under way: where the try has gone well, on to the next. Returns the sequences
        that are to be put back meanwhile."""
        tried = _live(self._trial)
        if self._ready or any(one.num_inflight or one.num_computed < self._ends[one] for one in tried):
            return []
        if tried:
            self._num_failed = 0
        is_last = not any(map(_live, self._groups))
        if is_last and not self._found:
            for sequence in [*tried, *self._cleared]:
                sequence.num_unexplained_failures += (
                    1  # the next try is longer: something shows only later, or in company
                )
        self._trial = []
        self._try_next()
        return [] if is_last else tried

    # -- the queue ---------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return self.inner.num_tokens + sum(sequence.num_prompt for sequence in self._held())

    @property
    def tenants(self) -> TenantShares | None:
        return self.inner.tenants

    def push(self, sequence: Sequence) -> None:
        self.inner.push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        if sequence in self._trial:
            self._ready.append(sequence)
        elif any(sequence in group for group in self._groups):
            pass  # it has its place there
        elif sequence in self._ends:
            self._cleared.append(sequence)
        else:
            self.inner.push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        if self._trial:
            return self._ready[0] if self._ready else None
        return self.inner.peek(now, num_running)

    def pop(self) -> Sequence:
        return self._ready.popleft() if self._trial else self.inner.pop()

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self._ends:
            self.inner.remove(sequence)
            return
        for held in (self._ready, self._cleared, *self._groups):
            if sequence in held:
                held.remove(sequence)

    def __len__(self) -> int:
        return len(self.inner) + sum(1 for _ in self._held())

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._held()
        yield from self.inner

    # -- inside ------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterator[Sequence]:
        yield from list(self._ready)  # the I/O thread asks how many wait: a deque must not change under its iterator
        for group in self._groups:
            yield from group
        yield from self._cleared

    def _begin(self, group: list[Sequence]) -> None:
        """Try these, which are about to be put back."""
        self._trial, self._ready = group, deque()

    def _try_next(self) -> None:
        while self._groups:
            group = _live(self._groups.pop())
            if group:
                self._trial, self._ready = group, deque(group)
                return
        cleared, self._cleared = self._cleared, []
        self._ends.clear()
        for sequence in reversed(cleared):
            self.inner.push_back(sequence)


def _live(group: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in group if sequence.status is not SequenceStatus.FINISHED]
