"""Scheduler: which tokens to compute next. One algorithm, no phases, O(1) work per row and per block.

A step has a token budget. Running sequences go on first: those with one token pending (decodes) before those with more
(prompt chunks), so that a long prompt never delays a running stream by more than its chunk. What is left of the budget
admits waiting sequences. When blocks run out, the sequence admitted last gives its blocks back and waits again.

Overlap: `schedule` may be called again before `commit` of the step before. `num_computed` and `num_inflight` advance
when a step is planned, tokens are appended when it is committed. A sequence that turns out to have stopped may have one
more row under way; its token is dropped. Freed blocks may be given away at once, because the device executes plans in
order: the next writer comes after the last reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inferengine.core.chunk_control import ChunkController
from inferengine.core.executor import Capacity
from inferengine.core.forks import ForkRoom
from inferengine.core.kv_manager import KVCacheManager, PrefixHit
from inferengine.core.plan import StepResult, TokenLogprobs
from inferengine.core.pressure import Relief, choose_relief
from inferengine.core.queues import POLICIES, WaitingQueue
from inferengine.core.request import Request
from inferengine.core.sequence import Sequence, Status
from inferengine.core.stats import SchedulerSnapshot, SchedulerStats
from inferengine.core.step_draft import ScheduledStep, StepDraft
from inferengine.core.stopping import FinishDetail, Finished, stop_reason, terminal_row

__all__ = ["ScheduledStep", "Scheduler", "SchedulerOptions", "StepOutput"]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one step, the order of waiting, and what gives way under pressure. 0 means: no limit of its own."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefill_chunk: int = 0  # most prompt tokens of one sequence in a step
    max_num_decodes: int = 0  # most decode rows in a step
    itl_target_s: float = 0.0  # keep steps that carry decodes under this time by cutting prompt chunks
    prefix_caching: bool = True
    eviction: str = "lru"
    pressure: str = "preempt"
    watermark: float = 0.01
    kv_events: bool = False
    contiguous: bool = False  # every sequence reserves blocks for the longest length: what paging is measured against


class StepOutput(NamedTuple):
    """News of one step in columns: token_ids[i] was drawn for uids[i]. Equal `layout` means the very same `uids`."""

    step: int
    uids: list[int]
    token_ids: list[int]
    finished: list[Finished]
    layout: int
    logprobs: dict[int, TokenLogprobs] | None = None  # by uid


class Scheduler:
    """Owns the sequences, the waiting queue and the block tables. Pure: no clock, no threads, no device."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions) -> None:
        self.capacity = capacity
        self.options = options
        self.kv = KVCacheManager(
            capacity.groups,
            capacity.block_size,
            max_chunk=options.max_num_batched_tokens if options.chunked_prefill else capacity.max_model_len,
            prefix_caching=options.prefix_caching,
            eviction=options.eviction,
            record_events=options.kv_events,
        )
        self.waiting: WaitingQueue = POLICIES[options.policy]()
        self.forks = ForkRoom()
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        self.stats = SchedulerStats()
        self.rejected: list[Finished] = []  # ended under pressure while a step was planned; the caller takes them
        self._chunks = ChunkController(options.itl_target_s) if options.itl_target_s else None
        self._num_slots = min(capacity.max_num_seqs, options.max_num_seqs)
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        self._watermark_blocks = int(options.watermark * min(group.num_blocks for group in capacity.groups))
        self._decode_offset = 0
        self._swapped_out: list[Sequence] = []  # since the last plan
        self._step = 0
        self._layout = 0
        self._last_uids: list[int] = []
        self._last_layout = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request. It fits the empty pool: admission has seen to that."""
        sequence = Sequence(request, num_groups=len(self.capacity.groups))
        self.sequences[request.uid] = sequence
        parent = self.sequences.get(request.fork_of) if request.fork_of is not None else None
        if parent is not None and parent.first_token_s is None:
            self.forks.hold(parent.uid, sequence)
        else:
            self.waiting.push(sequence)
        self.stats.num_submitted += 1
        return sequence

    def cancel(self, uid: int, reason: str, detail: FinishDetail, now: float) -> Finished | None:
        """End a request in whatever state it is; its blocks are free on return. None: there is no such request."""
        sequence = self.sequences.get(uid)
        return None if sequence is None else self._finish(sequence, reason, detail, now)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledStep | None:
        """Plan the next step, or None when nothing can be computed now (idle, or all wait for tokens under way)."""
        draft = StepDraft(self.options.max_num_batched_tokens)
        preempted_before = self.stats.num_preemptions
        prefilling = self._plan_decodes(draft, now)
        draft.end_decodes()
        if self._chunks is not None:
            draft.budget = self._chunks.limit(draft.num_decodes, draft.budget)
        self._plan_chunks(draft, prefilling, now)
        if self.stats.num_preemptions == preempted_before:
            self._admit(draft, now)
        if not draft.rows:
            return None
        return self._finish_plan(draft)

    def commit(self, scheduled: ScheduledStep, result: StepResult, now: float) -> StepOutput:
        """Append the tokens of a finished step, end what stopped, and offer full blocks for reuse."""
        plan, kv = scheduled.plan, self.kv
        finished: list[Finished] = []
        uids, token_ids, layout = scheduled.uids, result.token_ids, scheduled.layout
        dropped: set[int] | None = None
        for row, message in (result.failed_rows or {}).items():
            sequence = scheduled.rows[row]
            if sequence.status is not Status.FINISHED:
                finished.append(self._finish(sequence, "error", ("engine_error", message), now))
        for row in range(plan.num_decodes, len(scheduled.rows)):
            sequence = scheduled.rows[row]
            if sequence.status is Status.RUNNING and not plan.samples[row]:  # rows that draw follow below
                kv.cache_full_blocks(sequence, plan.starts[row] + plan.counts[row])
        for index, sequence in enumerate(scheduled.sampled):
            if sequence.status is Status.FINISHED:
                dropped = dropped or set()
                dropped.add(index)
                continue
            token_id = token_ids[index]
            tokens = sequence.tokens
            tokens.append(token_id)
            sequence.num_inflight -= 1
            if len(tokens) >= sequence.next_event_at or token_id in sequence.stop_ids:
                stopped = self._look_at(sequence, token_id, now)
                if stopped is not None:
                    finished.append(self._finish(sequence, *stopped, now))
        if dropped:
            keep = [index for index in range(len(uids)) if index not in dropped]
            uids, token_ids = [uids[i] for i in keep], [token_ids[i] for i in keep]
            layout = self._new_layout()
        if self.waiting.wants_charges:
            for sequence in scheduled.sampled:
                self.waiting.charge(sequence, 1)
        self.stats.num_output_tokens += len(uids)
        logprobs = None
        if result.logprobs:
            live = set(uids)
            by_uid = ((scheduled.rows[row].uid, item) for row, item in result.logprobs.items())
            logprobs = {uid: item for uid, item in by_uid if uid in live}
        return StepOutput(plan.step, uids, token_ids, finished, layout, logprobs)

    def observe(self, scheduled: ScheduledStep, duration_s: float) -> None:
        """How long the device took for a step: what the chunk controller learns from."""
        if self._chunks is not None:
            plan = scheduled.plan
            self._chunks.observe(plan.num_decodes, plan.num_tokens - plan.num_decodes, duration_s)

    def fail(self, scheduled: ScheduledStep, rows: list[int] | None, message: str, now: float) -> list[Finished]:
        """A step did not give a result: end the requests of `rows`, or of the whole step where no culprit is known.
        The others have lost the step's work, so they start over from their known tokens."""
        culprits = set(range(len(scheduled.rows)) if rows is None else rows)
        finished: list[Finished] = []
        for row, sequence in enumerate(scheduled.rows):
            if sequence.status is Status.FINISHED:
                continue
            if row in culprits:
                finished.append(self._finish(sequence, "error", ("engine_error", message), now))
                continue
            if scheduled.plan.samples[row]:
                sequence.num_inflight -= 1
            if sequence.status is Status.RUNNING:
                self._wait_again(sequence)
            else:
                self._forget_host_copy(sequence)  # it lacks this step's KV
        for sequence in scheduled.swapped_out:
            self._forget_host_copy(sequence)  # it may never have been made
        return finished

    # -- questions ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot:
        pools = self.kv.pools
        held = sum(pool.num_held for pool in pools)
        cached = sum(pool.num_evictable for pool in pools)
        return SchedulerSnapshot(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.forks),
            num_waiting_tokens=self.waiting.num_tokens,
            num_blocks=sum(pool.num_blocks for pool in pools),
            num_blocks_held=held,
            num_blocks_cached=cached,
            num_blocks_free=sum(pool.num_free for pool in pools) - cached,
            kv_usage=self.kv.usage,
            num_tokens_held=sum(sequence.num_computed for sequence in self.running) * len(pools),
            block_size=self.capacity.block_size,
            num_evictions=self.kv.num_evictions,
            num_blocks_swapped_out=self.kv.swap.num_blocks_out,
            num_blocks_swapped_in=self.kv.swap.num_blocks_in,
            num_prefix_lookup_tokens=self.kv.num_lookup_tokens,
            num_prefix_hit_tokens=self.kv.num_hit_tokens,
        )

    def check(self) -> None:
        """Invariants, for tests and for an idle engine. Raises RuntimeError."""
        self.kv.check()
        slots = {sequence.slot for sequence in self.running}
        if len(slots) != len(self.running) or len(slots) + len(self._free_slots) != self._num_slots:
            raise RuntimeError(f"slots leak: {len(slots)} in use, {len(self._free_slots)} free")
        if len(self.running) + len(self.waiting) + len(self.forks) != len(self.sequences):
            raise RuntimeError("a sequence is neither running nor waiting")
        for sequence in self.running:
            if sequence.num_computed > sequence.capacity or sequence.num_pending < 0:
                raise RuntimeError(f"{sequence} has computed more than its blocks hold, or than it has tokens")
        if not self.running and any(pool.num_held for pool in self.kv.pools):
            raise RuntimeError("blocks are held and nothing runs")
        if not self.sequences and any(pool.num_held for pool in self.kv.swap.pools):
            raise RuntimeError("host blocks are held and nothing waits")

    # -- inside a step -----------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: StepDraft, now: float) -> list[Sequence]:
        """Give one token to every running sequence that has one pending. Returns those that have more."""
        prefilling: list[Sequence] = []
        running, rows, starts = self.running, draft.rows, draft.starts
        budget = draft.budget
        if self.options.max_num_decodes:
            return self._plan_capped_decodes(draft, now)
        index = 0
        while index < len(running):
            sequence = running[index]
            computed = sequence.num_computed
            total = len(sequence.tokens) + sequence.num_inflight
            if total - computed != 1:
                if total > computed:
                    prefilling.append(sequence)
                index += 1
                continue
            if total >= sequence.max_total:
                index += 1  # its last token is under way
                continue
            if budget == 0:
                break
            if total > sequence.capacity and not self._make_room(sequence, total, now):
                continue  # the sequence itself had to go: `index` is at the next one
            rows.append(sequence)
            starts.append(computed)
            budget -= 1
            index += 1
        draft.budget = budget
        return prefilling

    def _plan_capped_decodes(self, draft: StepDraft, now: float) -> list[Sequence]:
        """As above with at most `max_num_decodes` rows, taking turns among the running sequences."""
        prefilling = [sequence for sequence in self.running if sequence.num_pending > 1]
        ready = [s for s in self.running if s.num_pending == 1 and s.num_tokens < s.max_total]
        cap = min(self.options.max_num_decodes, draft.budget)
        begin = self._decode_offset % len(ready) if len(ready) > cap else 0
        for sequence in (ready[begin:] + ready[:begin])[:cap]:
            if sequence.status is Status.RUNNING and self._make_room_beside(draft, sequence, sequence.num_tokens, now):
                draft.rows.append(sequence)
                draft.starts.append(sequence.num_computed)
        self._decode_offset = begin + cap
        draft.budget -= len(draft.rows)
        return prefilling

    def _plan_chunks(self, draft: StepDraft, prefilling: list[Sequence], now: float) -> None:
        """Go on with prompts that are partly computed, in order of admission."""
        for sequence in prefilling:
            if draft.budget == 0:
                return
            if sequence.status is not Status.RUNNING:
                continue  # a victim of this very step
            count = self._chunk(sequence.num_pending, draft)
            if count and self._make_room_beside(draft, sequence, sequence.num_computed + count, now):
                draft.add_chunk(sequence, count)

    def _admit(self, draft: StepDraft, now: float) -> None:
        """Admit waiting sequences while budget, slots and blocks last."""
        while draft.budget > 0 and self._free_slots:
            sequence = self.waiting.peek(now, len(self.running))
            if sequence is None or sequence.num_inflight:
                return
            admitted = self._admit_swapped if sequence.host_tables is not None else self._admit_fresh
            count = admitted(sequence, draft)
            if count == 0:
                return
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
                self.stats.num_prompt_tokens += sequence.num_prompt
                self.stats.num_cached_tokens += sequence.num_cached
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            draft.add_admitted(sequence, count)

    def _admit_fresh(self, sequence: Sequence, draft: StepDraft) -> int:
        """Give a sequence a slot, the blocks of its cached prefix, and room for its first chunk. 0: not now."""
        parent = self._fork_parent(sequence)
        hit = self.kv.fork(parent, sequence) if parent is not None else None
        if hit is None:
            parent, hit = None, self.kv.lookup(sequence)
        num_known = sequence.num_prompt - 1 if parent is not None else hit.num_tokens
        count = self._chunk(len(sequence.tokens) - num_known, draft)
        reserved = self.capacity.max_model_len if self.options.contiguous else 0
        if count == 0 or not self._fits(hit, max(reserved, len(sequence.tokens))):
            return 0
        self.waiting.pop()
        sequence.slot = self._free_slots.pop()
        self.kv.adopt(sequence, hit)
        if not self.kv.allocate(sequence, max(reserved, num_known + count)):
            raise RuntimeError("an admitted sequence does not fit: _fits and allocate disagree")
        if parent is not None:
            self.kv.copy_partial(parent, sequence)
        return count

    def _admit_swapped(self, sequence: Sequence, draft: StepDraft) -> int:
        """Bring back a sequence whose KV waits on the host. 0: not now."""
        count = self._chunk(sequence.num_pending, draft)
        if count == 0 or not self._fits_again(sequence, sequence.num_computed + count):
            return 0
        self.waiting.pop()
        sequence.slot = self._free_slots.pop()
        self.kv.swap_in(sequence)
        if not self.kv.allocate(sequence, sequence.num_computed + count):
            raise RuntimeError("a swapped sequence does not fit: _fits_again and allocate disagree")
        return count

    def _fork_parent(self, sequence: Sequence) -> Sequence | None:
        """The running first choice whose prompt blocks can be shared, for a choice that has not begun."""
        if sequence.request.fork_of is None or sequence.num_output:
            return None
        parent = self.sequences.get(sequence.request.fork_of)
        if parent is None or parent.status is not Status.RUNNING or parent.num_computed < sequence.num_prompt:
            return None
        return parent

    def _finish_plan(self, draft: StepDraft) -> ScheduledStep:
        samples, sampled = draft.advance()
        uids = [sequence.uid for sequence in sampled]
        if uids == self._last_uids:
            uids, layout = self._last_uids, self._last_layout
        else:
            layout = self._new_layout()
            self._last_uids, self._last_layout = uids, layout
        self._step += 1
        plan = draft.plan(self._step, samples, self.kv)
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens
        stats.num_scheduled_rows += len(draft.rows)
        stats.max_batch = max(stats.max_batch, len(draft.rows))
        swapped_out, self._swapped_out = self._swapped_out, []
        return ScheduledStep(plan, draft.rows, sampled, uids, layout, swapped_out)

    def _chunk(self, pending: int, draft: StepDraft) -> int:
        """How many of the pending tokens go into this step."""
        if not self.options.chunked_prefill:
            return pending if pending <= draft.budget or not draft.rows else 0  # too long for any budget: runs alone
        limit = self.options.prefill_chunk
        return min(pending, draft.budget, limit) if limit else min(pending, draft.budget)

    # -- room --------------------------------------------------------------------------------------------------------

    def _fits(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether a waiting sequence can be admitted: all of its known tokens beside the blocks of its hit (not only
        its first chunk: a prompt that stops half way would be thrown out again), and a reserve so that the running
        ones can grow. An empty engine needs no reserve."""
        kv = self.kv
        reserve = self._watermark_blocks if self.running else 0
        for group, pool, blocks in zip(kv.groups, kv.pools, hit.block_ids, strict=True):
            held = [block for block in blocks if block is not None]
            revived = sum(1 for block in held if pool.reference_count(block) == 0)
            if kv.blocks_needed(group, num_tokens) - len(held) + revived + reserve > pool.num_free:
                self.stats.num_pressure_events += 1
                return False
        return True

    def _fits_again(self, sequence: Sequence, num_tokens: int) -> bool:
        reserve = self._watermark_blocks if self.running else 0
        needed = self.kv.blocks_for(num_tokens)
        for pool, table in zip(self.kv.pools, sequence.host_tables or [], strict=True):
            if needed - table.count(-1) + reserve > pool.num_free:
                self.stats.num_pressure_events += 1
                return False
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Allocate for a decode; the sequence admitted last gives way until it fits. False: that was the sequence."""
        while not self.kv.allocate(sequence, num_tokens):
            self.stats.num_pressure_events += 1
            victim = self.running[-1]
            self._give_way(victim, now)
            if victim is sequence:
                return False
        return True

    def _make_room_beside(self, draft: StepDraft, sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Allocate beside rows already planned, which never give way: their step is being built."""
        while not self.kv.allocate(sequence, num_tokens):
            self.stats.num_pressure_events += 1
            victim = self.running[-1]
            if victim in draft.rows or (victim is sequence and draft.rows):
                return False
            self._give_way(victim, now)
            if victim is sequence:
                return False
        return True

    def _give_way(self, victim: Sequence, now: float) -> None:
        relief = choose_relief(self.options.pressure, victim, self.kv.swap, self.capacity)
        if relief is Relief.REJECT:
            message = "The KV cache is full. Try again later, or ask for fewer tokens."
            self.rejected.append(self._finish(victim, "error", ("overloaded", message), now))
        else:
            self._wait_again(victim, swap=relief is Relief.SWAP)

    # -- life and death ----------------------------------------------------------------------------------------------

    def _look_at(self, sequence: Sequence, token_id: int, now: float) -> tuple[str, FinishDetail] | None:
        """A committed token that is the first, may end the sequence, or fills a block."""
        length = len(sequence.tokens)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            self._release_forks(sequence)
        if length > sequence.next_hash_at and sequence.status is Status.RUNNING:
            self.kv.cache_full_blocks(sequence, length - 1)
        sequence.next_event_at = min(sequence.max_total, sequence.next_hash_at + 1)
        return stop_reason(sequence, token_id)

    def _wait_again(self, sequence: Sequence, *, swap: bool = False) -> None:
        """Give everything back and wait. The tokens stay; the KV goes to the host or is computed again, as far as it is
        not found in the prefix cache."""
        self.running.remove(sequence)
        if swap:
            self.kv.swap_out(sequence)
            self._swapped_out.append(sequence)
        else:
            self.kv.release(sequence)
            sequence.num_computed = 0
        self._free_slot(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_back(sequence)

    def _forget_host_copy(self, sequence: Sequence) -> None:
        if sequence.host_tables is not None:
            self.kv.swap.drop(sequence)
            sequence.num_computed = 0

    def _finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        was_running, was_held = sequence.status is Status.RUNNING, self.forks.holds(sequence)
        sequence.status = Status.FINISHED
        if was_running:
            self.running.remove(sequence)
            self.kv.release(sequence)
            self._free_slot(sequence)
        elif was_held:
            self.forks.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.kv.swap.drop(sequence)
        self._release_forks(sequence)
        del self.sequences[sequence.uid]
        self.stats.num_finished += 1
        return terminal_row(sequence, reason, detail, now)

    def _release_forks(self, parent: Sequence) -> None:
        for sequence in self.forks.release(parent.uid):
            self.waiting.push(sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _new_layout(self) -> int:
        self._layout += 1
        return self._layout
