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

from inferengine.core.executor import Capacity
from inferengine.core.kv_manager import KVCacheManager, PrefixHit
from inferengine.core.plan import SlotInit, StepPlan, StepResult, TokenLogprobs
from inferengine.core.queues import POLICIES, WaitingQueue
from inferengine.core.request import Request
from inferengine.core.sequence import Sequence, Status
from inferengine.core.stats import SchedulerSnapshot, SchedulerStats
from inferengine.core.stopping import FinishDetail, Finished, stop_reason, terminal_row


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one step and the order of waiting."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefill_chunk: int = 0  # 0: the whole budget
    prefix_caching: bool = True
    watermark: float = 0.01


class ScheduledStep(NamedTuple):
    """A plan with the sequences behind its rows. The executor sees only the plan."""

    plan: StepPlan
    rows: list[Sequence]
    sampled: list[Sequence]  # sequences of the sampling rows, in row order
    uids: list[int]  # their uids
    layout: int  # equal for two steps only if `uids` is the same list


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
        )
        self.waiting: WaitingQueue = POLICIES[options.policy]()
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        self.stats = SchedulerStats()
        self._free_slots = list(range(min(capacity.max_num_seqs, options.max_num_seqs) - 1, -1, -1))
        self._watermark_blocks = int(options.watermark * min(group.num_blocks for group in capacity.groups))
        self._step = 0
        self._layout = 0
        self._last_uids: list[int] = []
        self._last_layout = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue an accepted request. It fits the empty pool: admission has seen to that."""
        sequence = Sequence(request, num_groups=len(self.capacity.groups))
        self.sequences[request.uid] = sequence
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
        rows: list[Sequence] = []
        starts: list[int] = []
        admitted: list[SlotInit] = []
        prefilling: list[Sequence] = []
        budget = self._plan_decodes(rows, starts, prefilling)
        num_decodes = len(rows)
        counts = [1] * num_decodes
        preempted_before = self.stats.num_preemptions
        budget = self._plan_chunks(prefilling, rows, starts, counts, budget)
        if self.stats.num_preemptions == preempted_before:
            self._admit(rows, starts, counts, admitted, budget, now)
        if not rows:
            return None
        return self._finish_plan(rows, starts, counts, num_decodes, admitted)

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
        self.stats.num_output_tokens += len(uids)
        logprobs = None
        if result.logprobs:
            live = set(uids)
            logprobs = {
                scheduled.rows[row].uid: item
                for row, item in result.logprobs.items()
                if scheduled.rows[row].uid in live
            }
        return StepOutput(plan.step, uids, token_ids, finished, layout, logprobs)

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
            else:
                if scheduled.plan.samples[row]:
                    sequence.num_inflight -= 1
                if sequence.status is Status.RUNNING:
                    self._preempt(sequence)
        return finished

    # -- questions ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot:
        pools = self.kv.pools
        held = sum(pool.num_held for pool in pools)
        cached = sum(pool.num_evictable for pool in pools)
        return SchedulerSnapshot(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting.num_tokens,
            num_blocks=sum(pool.num_blocks for pool in pools),
            num_blocks_held=held,
            num_blocks_cached=cached,
            num_blocks_free=sum(pool.num_free for pool in pools) - cached,
            kv_usage=self.kv.usage,
            num_tokens_held=sum(sequence.num_computed for sequence in self.running) * len(pools),
            block_size=self.capacity.block_size,
            num_evictions=self.kv.num_evictions,
            num_prefix_lookup_tokens=self.kv.num_lookup_tokens,
            num_prefix_hit_tokens=self.kv.num_hit_tokens,
        )

    def check(self) -> None:
        """Invariants, for tests and for an idle engine. Raises RuntimeError."""
        self.kv.check()
        slots = [sequence.slot for sequence in self.running]
        if len(set(slots)) != len(slots) or len(slots) + len(self._free_slots) != min(
            self.capacity.max_num_seqs, self.options.max_num_seqs
        ):
            raise RuntimeError(f"slots leak: {len(slots)} in use, {len(self._free_slots)} free")
        if len(self.running) + len(self.waiting) != len(self.sequences):
            raise RuntimeError("a sequence is neither running nor waiting")
        if not self.sequences and any(pool.num_held for pool in self.kv.pools):
            raise RuntimeError("blocks are held and nothing runs")

    # -- inside a step -----------------------------------------------------------------------------------------------

    def _plan_decodes(self, rows: list[Sequence], starts: list[int], prefilling: list[Sequence]) -> int:
        """Give one token to every running sequence that has one pending. Collects those with more in `prefilling`."""
        budget = self.options.max_num_batched_tokens
        running = self.running
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
            if total > sequence.capacity and not self._make_room(sequence, total):
                continue  # the sequence itself was preempted: `index` is at the next one
            rows.append(sequence)
            starts.append(computed)
            budget -= 1
            index += 1
        # a victim may have been collected before it was preempted
        prefilling[:] = [sequence for sequence in prefilling if sequence.status is Status.RUNNING]
        return budget

    def _plan_chunks(
        self, prefilling: list[Sequence], rows: list[Sequence], starts: list[int], counts: list[int], budget: int
    ) -> int:
        """Go on with prompts that are partly computed, in order of admission."""
        for sequence in prefilling:
            if budget == 0 or sequence.status is not Status.RUNNING:
                continue
            count = self._chunk(sequence.num_pending, budget)
            if count == 0:
                continue
            if not self._make_room_for_chunk(sequence, sequence.num_computed + count, prefilling, rows):
                continue
            rows.append(sequence)
            starts.append(sequence.num_computed)
            counts.append(count)
            budget -= count
        return budget

    def _admit(
        self,
        rows: list[Sequence],
        starts: list[int],
        counts: list[int],
        admitted: list[SlotInit],
        budget: int,
        now: float,
    ) -> None:
        """Admit waiting sequences while budget, slots and blocks last."""
        while budget > 0 and self._free_slots:
            sequence = self.waiting.peek(now)
            if sequence is None or sequence.num_inflight:
                return
            hit = self.kv.lookup(sequence)
            count = self._chunk(len(sequence.tokens) - hit.num_tokens, budget)
            if count == 0 or not self._fits(hit, len(sequence.tokens)):
                return
            self.waiting.pop()
            sequence.slot = self._free_slots.pop()
            self.kv.adopt(sequence, hit)
            if not self.kv.allocate(sequence, hit.num_tokens + count):
                raise RuntimeError("an admitted sequence does not fit: _fits and allocate disagree")
            self._start(sequence, hit.num_tokens, admitted, now)
            rows.append(sequence)
            starts.append(hit.num_tokens)
            counts.append(count)
            budget -= count

    def _start(self, sequence: Sequence, num_hit: int, admitted: list[SlotInit], now: float) -> None:
        request = sequence.request
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now
            sequence.num_cached = min(num_hit, sequence.num_prompt)
            self.stats.num_prompt_tokens += sequence.num_prompt
            self.stats.num_cached_tokens += sequence.num_cached
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        admitted.append(
            SlotInit(
                sequence.slot,
                list(sequence.tokens) if sequence.num_output else request.prompt_ids,
                sequence.num_prompt,
                request.params,
                request.seed,
                sorted(sequence.stop_ids) if request.params.min_tokens else (),
            )
        )

    def _finish_plan(
        self,
        rows: list[Sequence],
        starts: list[int],
        counts: list[int],
        num_decodes: int,
        admitted: list[SlotInit],
    ) -> ScheduledStep:
        sampled: list[Sequence] = rows[:num_decodes]
        samples = [True] * num_decodes
        for sequence in sampled:
            sequence.num_computed += 1
            sequence.num_inflight += 1
        for row in range(num_decodes, len(rows)):
            sequence = rows[row]
            sequence.num_computed += counts[row]
            draws = sequence.num_computed == len(sequence.tokens) + sequence.num_inflight
            samples.append(draws)
            if draws:
                sequence.num_inflight += 1
                sampled.append(sequence)
        uids = [sequence.uid for sequence in sampled]
        if uids == self._last_uids:
            uids, layout = self._last_uids, self._last_layout
        else:
            layout = self._new_layout()
            self._last_uids, self._last_layout = uids, layout
        self._step += 1
        num_tokens = sum(counts)
        stats = self.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += num_tokens
        stats.num_scheduled_rows += len(rows)
        stats.max_batch = max(stats.max_batch, len(rows))
        plan = StepPlan(
            step=self._step,
            slots=[sequence.slot for sequence in rows],
            starts=starts,
            counts=counts,
            samples=samples,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            admitted=admitted,
            block_updates=self.kv.take_updates(),
        )
        return ScheduledStep(plan, rows, sampled, uids, layout)

    def _chunk(self, pending: int, budget: int) -> int:
        """How many of the pending tokens go into this step."""
        limit = self.options.prefill_chunk
        if not self.options.chunked_prefill:
            whole = budget >= self.options.max_num_batched_tokens  # a prompt longer than the budget runs alone
            return pending if pending <= budget or whole else 0
        return min(pending, budget, limit) if limit else min(pending, budget)

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

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate for a decode; preempt from the tail until it fits. False: the sequence itself had to go."""
        while not self.kv.allocate(sequence, num_tokens):
            self.stats.num_pressure_events += 1
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _make_room_for_chunk(
        self, sequence: Sequence, num_tokens: int, prefilling: list[Sequence], rows: list[Sequence]
    ) -> bool:
        """Allocate for a prompt chunk. Rows already planned are never preempted: their step is being built."""
        while not self.kv.allocate(sequence, num_tokens):
            self.stats.num_pressure_events += 1
            victim = self.running[-1]
            if victim is sequence and not rows:
                self._preempt(victim)
                return False
            if victim is sequence or victim in rows:
                return False
            self._preempt(victim)
        return True

    def _look_at(self, sequence: Sequence, token_id: int, now: float) -> tuple[str, FinishDetail] | None:
        """A committed token that is the first, may end the sequence, or fills a block."""
        length = len(sequence.tokens)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if length > sequence.next_hash_at and sequence.status is Status.RUNNING:
            self.kv.cache_full_blocks(sequence, length - 1)
        sequence.next_event_at = min(sequence.max_total, sequence.next_hash_at + 1)
        return stop_reason(sequence, token_id)

    # -- life and death ----------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Give everything back and wait again. The tokens stay; what was computed may still be in the prefix cache."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push_back(sequence)

    def _finish(self, sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
        was_running = sequence.status is Status.RUNNING
        sequence.status = Status.FINISHED
        if was_running:
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)
        del self.sequences[sequence.uid]
        self.stats.num_finished += 1
        return terminal_row(sequence, reason, detail, now)

    def _give_back(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _new_layout(self) -> int:
        self._layout += 1
        return self._layout
