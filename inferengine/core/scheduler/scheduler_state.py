"""SchedulerState: which sequences run, which wait, and what each holds. Its moves keep slots and blocks whole.

Its counters and gauges are plain numbers, written by the loop, read by any thread. Percentiles and rates are computed
by the readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inferengine.core.constraints import Grammar
from inferengine.core.executor import Capacity
from inferengine.core.kv_cache import KVCacheManager, PrefixHit
from inferengine.core.scheduler.queues import POLICIES, FaultIsolationQueue
from inferengine.core.sequence import FinishDetail, Finished, Request, Sequence, SequenceStatus, terminal_row


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The limits of one step, the order of waiting, and what is preempted when blocks run out. 0 means: no limit."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = "fair"
    chunked_prefill: bool = True
    prefill_chunk: int = 0  # most prompt tokens of one sequence in a step
    max_num_decodes: int = 0  # most decode rows in a step; speculation is off where it is set
    itl_target_s: float = 0.0  # keep steps that carry decodes under this time by cutting prompt chunks
    itl_target_factor: float = 0.0  # or under so many times a step without prompts, where that is longer
    prefix_caching: bool = True
    eviction: str = "lru"
    preemption: str = "preempt"  # one of PREEMPTION_POLICIES
    watermark: float = 0.01
    kv_events: bool = False
    contiguous: bool = False  # every sequence reserves blocks for the longest length: the baseline for paging
    max_drafts: int = 0  # most draft tokens of one sequence in a step
    max_running_to_force: int = 0  # with more sequences running, a forced token is drawn in a step like any other
    max_running_to_draft: int = 32  # with more sequences running, the device is busy enough without speculation


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start of the engine."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_scheduled_rows: int = 0
    max_batch: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_output_tokens: int = 0
    num_embeddings: int = 0
    num_submitted: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_forced_tokens: int = 0  # of the output, appended because a grammar left no choice
    num_failed_allocations: int = 0  # times that an allocation did not fit at first
    num_corrupted: int = 0  # ended because their logits were no numbers


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Gauges at one moment."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_slots_held: int  # on the device, by running sequences
    num_blocks: int
    num_blocks_held: int
    num_blocks_cached: int  # free, with content that a prefix may reuse
    num_blocks_free: int  # free and empty
    kv_usage: float  # share of blocks held
    num_tokens_held: int  # tokens in the held blocks
    block_size: int
    num_evictions: int
    num_blocks_swapped_out: int
    num_blocks_swapped_in: int
    num_prefix_lookup_tokens: int
    num_prefix_hit_tokens: int
    num_drafted: int = 0  # draft tokens verified
    num_drafts_accepted: int = 0
    num_verified: int = 0  # rows that verified draft tokens
    drafts_accepted_by_position: tuple[int, ...] = ()
    running_adapters: tuple[int, ...] = ()  # of each running sequence with a LoRA adapter, its number
    block_ages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # histograms, see BlockAgeHistograms
    num_snapshots: int = 0  # of states, of models that have any
    num_snapshots_known: int = 0  # that a prefix can begin from
    num_snapshot_evictions: int = 0
    num_deferred: int = 0  # of the waiting ones those that could not start with all slots and blocks free

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified draft tokens that were accepted."""
        return self.num_drafts_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verified row: the accepted draft tokens and the one drawn after them. 1 without speculation."""
        return 1.0 + self.num_drafts_accepted / self.num_verified if self.num_verified else 1.0

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots of held blocks that hold no token."""
        slots = self.num_blocks_held * self.block_size
        return max(0.0, 1.0 - self.num_tokens_held / slots) if slots else 0.0


class WaitingForks:
    """The further choices of `n > 1` requests, until the first choice has computed the prompt that they share."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[Sequence]] = {}
        self._num_held = 0

    def hold(self, parent_uid: int, sequence: Sequence) -> None:
        """Keep a sequence until `release` of its parent."""
        sequence.leader = parent_uid
        self._by_parent.setdefault(parent_uid, []).append(sequence)
        self._num_held += 1

    def holds(self, sequence: Sequence) -> bool:
        """Return whether the sequence has been added and has not ended."""
        parent = sequence.leader
        return parent is not None and sequence in self._by_parent.get(parent, ())

    def release(self, parent_uid: int) -> list[Sequence]:
        """Take out the sequences that waited for this one, in order."""
        released = self._by_parent.pop(parent_uid, [])
        self._num_held -= len(released)
        return released

    def remove(self, sequence: Sequence) -> None:
        """Take out one sequence. Raises RuntimeError if it has no parent."""
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
    """Every unfinished sequence is in exactly one place: `running`, the waiting queue, `forks` (waiting for its first
    choice's prompt), or `compiling` (waiting for its grammar)."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions) -> None:
        self.kv = KVCacheManager(
            capacity.groups,
            capacity.block_size,
            max_chunk=options.max_num_batched_tokens if options.chunked_prefill else capacity.max_model_len,
            prefix_caching=options.prefix_caching and (capacity.num_snapshots > 0 or not capacity.has_states),
            eviction=options.eviction,
            record_events=options.kv_events,
            num_snapshots=capacity.num_snapshots if capacity.has_states else 0,
        )
        self._shares_prompts = not capacity.has_states or self.kv.snapshots is not None
        self.num_slots = min(capacity.max_num_seqs, options.max_num_seqs)
        self.free_slots = list(range(self.num_slots - 1, -1, -1))
        self.watermark_blocks = int(options.watermark * min(group.num_blocks for group in capacity.groups))
        self.sequences: dict[int, Sequence] = {}  # all of them, by uid
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = FaultIsolationQueue(POLICIES[options.policy]())
        self.shares = self.waiting.shares
        self.forks = WaitingForks()
        self.compiling: dict[int, Sequence] = {}
        self.unsent_tokens: list[tuple[Sequence, int, int]] = []  # (sequence, position, token) unknown to the device
        self.num_grammars = 0  # unfinished sequences with a grammar
        self.num_scored = 0  # unfinished sequences that ask for log-probabilities
        self.stats = SchedulerStats()
        self._num_groups = len(capacity.groups)
        self._swapped_out: list[Sequence] = []
        self._layout = 0

    # -- in ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request."""
        first = None if request.fork_of is None else self.sequences.get(request.fork_of)
        sequence = Sequence(request, num_groups=self._num_groups, first=first)
        self.sequences[request.uid] = sequence
        self.stats.num_submitted += 1
        self.num_scored += request.wants_logprobs
        if request.grammar is None:
            self._queue(sequence)
        else:
            self.num_grammars += 1
            sequence.status = SequenceStatus.WAITING_GRAMMAR
            self.compiling[request.uid] = sequence
        return sequence

    def grammar_ready(self, uid: int, grammar: Grammar) -> None:
        """Queue a sequence whose grammar is compiled. Does nothing if the sequence has ended meanwhile."""
        sequence = self.compiling.pop(uid, None)
        if sequence is not None:
            sequence.grammar = grammar
            sequence.status = SequenceStatus.WAITING
            self._queue(sequence)

    def start(self, sequence: Sequence) -> None:
        """Give a slot to the sequence that the waiting queue's `peek` returned. The caller adds it to `running`."""
        self.waiting.pop()
        if self.shares is not None:
            self.shares.started(sequence)
        sequence.slot = self.free_slots.pop()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for anything: a slot, a shared prompt, a grammar."""
        return len(self.waiting) + len(self.forks) + len(self.compiling)

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for the prompt of their first choice, or for the search for a faulty request to end."""
        return len(self.forks) + (len(self.waiting) if self.waiting.is_isolating else 0)

    # -- out ---------------------------------------------------------------------------------------------------------

    def wait_again(self, sequence: Sequence, *, swap: bool = False) -> None:
        """Move a running sequence back to the waiting queue; its slot and blocks are free on return.

        The tokens stay. With `swap` the KV goes to the host; else what the prefix cache has lost is computed again.
        """
        self.running.remove(sequence)
        if swap:
            self.kv.swap_out(sequence)
            self._swapped_out.append(sequence)
        else:
            self.kv.release(sequence)
            sequence.num_computed = 0
        self._free_slot(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_back(sequence)
        if self.shares is not None:
            self.shares.stopped(sequence)

    def finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        """End a sequence wherever it is. Everything it holds is free on return."""
        status, was_held = sequence.status, self.forks.holds(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.next_check_at = 0
        if status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.kv.release(sequence)
            self._free_slot(sequence)
            if self.shares is not None:
                self.shares.stopped(sequence)
        elif status is SequenceStatus.WAITING_GRAMMAR:
            del self.compiling[sequence.uid]
        elif was_held:
            self.forks.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.kv.swap.drop(sequence)
        if sequence.request.grammar is not None:
            self.num_grammars -= 1
        self.num_scored -= sequence.request.wants_logprobs
        self.release_forks(sequence)
        del self.sequences[sequence.uid]
        self.stats.num_finished += 1
        return terminal_row(sequence, reason, detail, now)

    def release_forks(self, parent: Sequence) -> None:
        """Queue the other choices of a prompt that is computed.

        If its choice ended before that, the next choice computes the prompt for the others: n choices never cost more
        than one prompt. It tells the prompt's log-probabilities too.
        """
        released = self.forks.release(parent.uid)
        if released and parent.first_token_s is None:
            leader = released.pop(0)
            leader.leader = None
            self._ask_about_prompt(leader, parent.request.params.prompt_logprobs)
            for sequence in released:
                self.forks.hold(leader.uid, sequence)
            released = [leader]
        for sequence in released:
            self.waiting.push(sequence)

    def drop_host_copy(self, sequence: Sequence) -> None:
        """Drop the KV on the host of a sequence, whose step failed: it will be computed again."""
        if sequence.host_tables is not None:
            self.kv.swap.drop(sequence)
            sequence.num_computed = 0

    # -- room --------------------------------------------------------------------------------------------------------

    def has_room(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Return whether the blocks for `num_tokens` tokens of a waiting sequence are free, beside those of its prefix
        hit.

        All of its known tokens must fit, not only the first chunk: a prompt that stops half way would be preempted
        again. While others run, the watermark is kept free so that they can grow.
        """
        kv = self.kv
        reserve = self.watermark_blocks if self.running else 0
        for group, pool, blocks in zip(kv.groups, kv.pools, hit.block_ids, strict=True):
            shared = sum(1 for block in blocks if block is not None and pool.reference_count(block))
            if kv.blocks_needed(group, num_tokens) - shared + reserve > pool.num_free:
                self.stats.num_failed_allocations += 1
                return False
        return True

    def has_room_for_swapped(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return the same as `has_room`, for a sequence whose KV is on the host. All its blocks come back, of which it
        may have more than its tokens need: draft tokens had some."""
        reserve = self.watermark_blocks if self.running else 0
        needed = self.kv.blocks_for(num_tokens)
        for pool, table in zip(self.kv.pools, sequence.host_tables or [], strict=True):
            if max(needed, len(table)) - table.count(-1) + reserve > pool.num_free:
                self.stats.num_failed_allocations += 1
                return False
        return True

    # -- for the next plan -------------------------------------------------------------------------------------------

    def new_layout(self) -> int:
        """Return a number that no list of sampled sequences has had before."""
        self._layout += 1
        return self._layout

    def take_swapped_out(self) -> list[Sequence]:
        """Return the sequences swapped out since the last call."""
        swapped_out, self._swapped_out = self._swapped_out, []
        return swapped_out

    def take_unsent_tokens(self) -> list[tuple[Sequence, int, int]]:
        """Return the tokens that the device does not know, once."""
        unsent, self.unsent_tokens = self.unsent_tokens, []
        return unsent

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants. Raises RuntimeError."""
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
        if not self.running and self.kv.snapshots is not None and self.kv.snapshots.num_reserved:
            raise RuntimeError("snapshots are reserved and nothing runs")
        if not self.sequences and any(pool.num_held for pool in self.kv.swap.pools):
            raise RuntimeError("host blocks are held and nothing waits")
        if self.num_grammars != sum(sequence.request.grammar is not None for sequence in self.sequences.values()):
            raise RuntimeError("grammars are miscounted")
        if self.num_scored != sum(sequence.request.wants_logprobs for sequence in self.sequences.values()):
            raise RuntimeError("requests for log-probabilities are miscounted")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ask_about_prompt(self, sequence: Sequence, prompt_logprobs: int | None) -> None:
        """Let a sequence that has not run tell so many log-probabilities of each of its prompt's tokens."""
        if prompt_logprobs is not None:
            self.num_scored -= sequence.request.wants_logprobs
            params = sequence.request.params.replace(prompt_logprobs=prompt_logprobs)
            sequence.request = replace(sequence.request, params=params)
            self.num_scored += sequence.request.wants_logprobs

    def _queue(self, sequence: Sequence) -> None:
        fork_of = sequence.request.fork_of
        parent = self.sequences.get(fork_of) if fork_of is not None else None
        if parent is not None and parent.first_token_s is None and self._shares_prompts:
            self.forks.hold(parent.uid, sequence)
        else:
            self.waiting.push(sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
