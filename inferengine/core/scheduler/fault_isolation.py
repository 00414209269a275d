"""FaultIsolationQueue: finds the request that makes steps fail, where the executor does not know which one it is.

A failed step has lost its work, not its requests: outputs are logs and a draw is a function of (seed, position), so
computing it again gives the same. All sequences with a row in the failed step are suspects. They run again, all
together first (the failure may not occur again), then in halves. A half that fails is halved again, and the request
that fails alone is at fault. Meanwhile no other request is computed: it would be a suspect, too. This costs at most
log2(suspects) + 2 failed steps. If too many trials in a row fail, no single request is at fault, and all suspects end.

It wraps the waiting queue, because suspects wait: for their trial, or for the end of the others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from inferengine.core.scheduler.queues import WaitingQueue
from inferengine.core.scheduler.queues.waiting_queue import TenantShares
from inferengine.core.sequence import Sequence, SequenceStatus

MAX_UNEXPLAINED_FAILURES = 4  # more of them make a trial no longer: all other requests wait for its end
SPARE_TRIALS = 4  # failed trials in a row, beyond those that halving needs, after which no single one is at fault


class FaultIsolationQueue:
    """A WaitingQueue. Without suspects it behaves as the policy's queue inside."""

    def __init__(self, inner: WaitingQueue) -> None:
        self.inner = inner
        self._ends: dict[Sequence, int] = {}  # of suspects: tokens computed at the end of a successful trial
        self._groups: list[list[Sequence]] = []  # waiting for their trial, the next one last
        self._trial: list[Sequence] = []  # the group under trial
        self._ready: deque[Sequence] = deque()  # those of the trial that wait to be admitted
        self._cleared: list[Sequence] = []  # had a successful trial, and wait for the others
        self._max_trials = 0
        self._num_failed = 0  # failed trials in a row
        self._found = False  # whether any sequence was at fault since the first failure

    # -- suspects ----------------------------------------------------------------------------------------------------

    @property
    def is_isolating(self) -> bool:
        """Whether a trial is under way."""
        return bool(self._trial)

    def isolate(self, sequences: SequenceOf[Sequence], ends: SequenceOf[int]) -> list[Sequence]:
        """Take in a failed step of these running sequences, which would have computed them up to `ends`.

        Returns the sequences at fault. The caller ends them, and puts all others that run back into this queue.
        """
        if not self._trial:
            for sequence, end in zip(sequences, ends, strict=True):
                self._ends[sequence] = end + 4 ** min(sequence.num_unexplained_failures, MAX_UNEXPLAINED_FAILURES) - 1
            self._max_trials = len(sequences).bit_length() + SPARE_TRIALS
            self._num_failed, self._found = 0, False
            self._begin(list(sequences))
            return []
        # A failed trial says something only about the sequences that had a row in the step.
        rows = set(sequences)
        failed = [sequence for sequence in self._trial if sequence in rows]
        others = [sequence for sequence in _unfinished(self._trial) if sequence not in rows]
        self._num_failed += 1
        if others:
            self._groups.append(others)
        if len(failed) == 1 or self._num_failed > self._max_trials:
            self._found = True
            self._begin(failed)
            return failed if len(failed) == 1 else [*failed, *(one for group in self._groups for one in group)]
        half = (len(failed) + 1) // 2
        self._groups.append(failed[half:])
        self._begin(failed[:half])
        return []

    def next_trial(self) -> list[Sequence]:
        """Go on to the next trial if this one was successful. Call it between two steps, with none under way.

        Returns the sequences of the successful trial, for the caller to put back into this queue.
        """
        tried = _unfinished(self._trial)
        if self._ready or any(one.num_inflight or one.num_computed < self._ends[one] for one in tried):
            return []
        if tried:
            self._num_failed = 0
        is_last = not any(map(_unfinished, self._groups))
        if is_last and not self._found:
            for sequence in [*tried, *self._cleared]:
                # longer trials next time: the failure needs more tokens, or other requests
                sequence.num_unexplained_failures += 1
        self._trial = []
        self._try_next()
        return [] if is_last else tried

    # -- the queue ---------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Prompt tokens waiting, of suspects and others."""
        return self.inner.num_tokens + sum(sequence.num_prompt for sequence in self._held())

    @property
    def tenants(self) -> TenantShares | None:
        """The shares of tenants of the policy's queue."""
        return self.inner.tenants

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        self.inner.push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Add a preempted sequence: to its trial, to the cleared ones, or to the policy's queue."""
        if sequence in self._trial:
            self._ready.append(sequence)
        elif any(sequence in group for group in self._groups):
            pass  # it is in its group already
        elif sequence in self._ends:
            self._cleared.append(sequence)
        else:
            self.inner.push_back(sequence)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Return the next sequence of the trial; without one, the policy's."""
        if self._trial:
            return self._ready[0] if self._ready else None
        return self.inner.peek(now, num_running)

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returned."""
        return self._ready.popleft() if self._trial else self.inner.pop()

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence."""
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
        yield from list(self._ready)  # a copy: the I/O thread iterates, too, and a deque must not change meanwhile
        for group in self._groups:
            yield from group
        yield from self._cleared

    def _begin(self, group: list[Sequence]) -> None:
        """Start the trial of these sequences, which the caller is about to put back."""
        self._trial, self._ready = group, deque()

    def _try_next(self) -> None:
        while self._groups:
            group = _unfinished(self._groups.pop())
            if group:
                self._trial, self._ready = group, deque(group)
                return
        cleared, self._cleared = self._cleared, []
        self._ends.clear()
        for sequence in reversed(cleared):
            self.inner.push_back(sequence)


def _unfinished(group: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in group if sequence.status is not SequenceStatus.FINISHED]
