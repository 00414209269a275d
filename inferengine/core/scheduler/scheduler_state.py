"""SchedulerState: who runs, who waits, and what each sequence holds. Its moves keep slots and blocks whole.

Forks: the further choices of an `n > 1` request wait until the first one has computed the prompt that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inferengine.core.constraints import Grammar
from inferengine.core.executor import Capacity
from inferengine.core.kv_cache.manager import KVCacheManager
from inferengine.core.request import Request
from inferengine.core.scheduler.fault_isolation import FaultIsolationQueue
from inferengine.core.scheduler.queues import POLICIES
from inferengine.core.scheduler.scheduler_stats import SchedulerStats
from inferengine.core.sequence import FinishDetail, Finished, Sequence, SequenceStatus, terminal_row


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one step, the order of waiting, and what gives way under pressure. 0 means: no limit of its own."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = "fair"
    chunked_prefill: bool = True
    prefill_chunk: int = 0  # most prompt tokens of one sequence in a step
    max_num_decodes: int = 0  # most decode rows in a step; guessing ahead is off where it is set
    itl_target_s: float = 0.0  # keep steps that carry decodes under this time by cutting prompt chunks
    prefix_caching: bool = True
    eviction: str = "lru"
    pressure: str = "preempt"
    watermark: float = 0.01
    kv_events: bool = False
    contiguous: bool = False  # every sequence reserves blocks for the longest length: what paging is measured against
    max_drafts: int = 0  # most guesses ahead of one sequence in a step
    max_running_to_force: int = 0  # with more sequences running a forced token waits for its step as a drawn one does
    max_running_to_draft: int = 32  # with more sequences running, the device has enough to do without guesses


class WaitingForks:
    """Holds sequences that are not yet in the waiting queue, by the uid of the sequence they wait for."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[Sequence]] = {}
        self._num_held = 0

    def hold(self, parent_uid: int, sequence: Sequence) -> None:
        sequence.leader = parent_uid
        self._by_parent.setdefault(parent_uid, []).append(sequence)
        self._num_held += 1

    def holds(self, sequence: Sequence) -> bool:
        parent = sequence.leader
        return parent is not None and sequence in self._by_parent.get(parent, ())

    def release(self, parent_uid: int) -> list[Sequence]:
        """The sequences that waited for this one, in order."""
        released = self._by_parent.pop(parent_uid, [])
        self._num_held -= len(released)
        return released

    def remove(self, sequence: Sequence) -> None:
        parent = sequence.leader
        if parent is None:
            raise RuntimeError(f"{sequence} is no fork")
        self._by_parent[parent].remove(sequence)
        self._num_held -= 1
        if not self._by_parent[parent]:
            del self._by_parent[parent]

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_parent.values():
            yield from sequences


class SchedulerState:
    """Every unfinished sequence is in exactly one place: running, in the waiting queue, waiting for its first choice's
    prompt (forks), or waiting for its grammar (compiling)."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions) -> None:
        self.kv = KVCacheManager(
            capacity.groups,
            capacity.block_size,
            max_chunk=options.max_num_batched_tokens if options.chunked_prefill else capacity.max_model_len,
            prefix_caching=options.prefix_caching,
            eviction=options.eviction,
            record_events=options.kv_events,
        )
        self.num_groups = len(capacity.groups)
        self.num_slots = min(capacity.max_num_seqs, options.max_num_seqs)
        self.free_slots = list(range(self.num_slots - 1, -1, -1))
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting = FaultIsolationQueue(POLICIES[options.policy]())
        self.tenants = self.waiting.tenants
        self.forks = WaitingForks()
        self.compiling: dict[int, Sequence] = {}
        self.swapped_out: list[Sequence] = []  # since the last plan
        self.num_grammars = 0  # unfinished sequences with a grammar
        self.stats = SchedulerStats()

    # -- in ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request."""
        sequence = Sequence(request, num_groups=self.num_groups)
        self.sequences[request.uid] = sequence
        self.stats.num_submitted += 1
        if request.grammar is None:
            self._queue(sequence)
        else:
            self.num_grammars += 1
            sequence.status = SequenceStatus.WAITING_GRAMMAR
            self.compiling[request.uid] = sequence
        return sequence

    def grammar_ready(self, uid: int, grammar: Grammar) -> None:
        """The grammar of a sequence is compiled; nothing happens if the sequence has ended meanwhile."""
        sequence = self.compiling.pop(uid, None)
        if sequence is not None:
            sequence.grammar = grammar
            sequence.status = SequenceStatus.WAITING
            self._queue(sequence)

    def start(self, sequence: Sequence) -> None:
        """Take the sequence that the waiting queue's `peek` returned into the running ones; it gets a slot."""
        self.waiting.pop()
        if self.tenants is not None:
            self.tenants.started(sequence)
        sequence.slot = self.free_slots.pop()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.forks) + len(self.compiling)

    # -- out ---------------------------------------------------------------------------------------------------------

    def wait_again(self, sequence: Sequence, *, swap: bool = False) -> None:
        """Give everything back and wait. The tokens stay; the KV goes to the host or is computed again, as far as it is
        not found in the prefix cache."""
        self.running.remove(sequence)
        if swap:
            self.kv.swap_out(sequence)
            self.swapped_out.append(sequence)
        else:
            self.kv.release(sequence)
            sequence.num_computed = 0
        self._free_slot(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_back(sequence)
        if self.tenants is not None:
            self.tenants.stopped(sequence)

    def finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        """End a sequence wherever it is. Everything it holds is free on return."""
        status, was_held = sequence.status, self.forks.holds(sequence)
        sequence.status = SequenceStatus.FINISHED
        if status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.kv.release(sequence)
            self._free_slot(sequence)
            if self.tenants is not None:
                self.tenants.stopped(sequence)
        elif status is SequenceStatus.WAITING_GRAMMAR:
            del self.compiling[sequence.uid]
        elif was_held:
            self.forks.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.kv.swap.drop(sequence)
        if sequence.request.grammar is not None:
            self.num_grammars -= 1
        self.release_forks(sequence)
        del self.sequences[sequence.uid]
        self.stats.num_finished += 1
        return terminal_row(sequence, reason, detail, now)

    def release_forks(self, parent: Sequence) -> None:
        """The prompt is computed: the other choices may go. Where its choice ended before, the next one computes the
        prompt for the others: n choices never cost more than one prompt."""
        released = self.forks.release(parent.uid)
        if released and parent.first_token_s is None:
            leader = released.pop(0)
            leader.leader = None
            for sequence in released:
                self.forks.hold(leader.uid, sequence)
            released = [leader]
        for sequence in released:
            self.waiting.push(sequence)

    def forget_host_copy(self, sequence: Sequence) -> None:
        """The KV on the host cannot be trusted: compute it again."""
        if sequence.host_tables is not None:
            self.kv.swap.drop(sequence)
            sequence.num_computed = 0

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants. Raises RuntimeError."""
        self.kv.check()
        slots = {sequence.slot for sequence in self.running}
        if len(slots) != len(self.running) or len(slots) + len(self.free_slots) != self.num_slots:
            raise RuntimeError(f"slots leak: {len(slots)} in use, {len(self.free_slots)} free")
        if len(self.running) + self.num_waiting != len(self.sequences):
            raise RuntimeError("a sequence is neither running nor waiting")
        for sequence in self.running:
            verifying = sequence.num_inflight and sequence.num_computed > sequence.num_tokens
            if sequence.num_computed > sequence.capacity or (sequence.num_pending < 0 and not verifying):
                raise RuntimeError(f"{sequence} has computed more than its blocks hold, or than it has tokens")
        if not self.running and any(pool.num_held for pool in self.kv.pools):
            raise RuntimeError("blocks are held and nothing runs")
        if not self.sequences and any(pool.num_held for pool in self.kv.swap.pools):
            raise RuntimeError("host blocks are held and nothing waits")
        if self.num_grammars != sum(sequence.request.grammar is not None for sequence in self.sequences.values()):
            raise RuntimeError("grammars are miscounted")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _queue(self, sequence: Sequence) -> None:
        fork_of = sequence.request.fork_of
        parent = self.sequences.get(fork_of) if fork_of is not None else None
        if parent is not None and parent.first_token_s is None:
            self.forks.hold(parent.uid, sequence)
        else:
            self.waiting.push(sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
