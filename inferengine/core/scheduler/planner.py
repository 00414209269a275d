"""Planner: which tokens to compute next. One algorithm without phases, O(1) work per row and per block.

A step has a token budget. Running sequences come first: those with one token pending (decodes) before those with more
(draft tokens to verify, then prompt chunks), so that a long prompt delays a running stream by no more than its chunk.
What is left of the budget admits waiting sequences.

Prompts are limited twice: a target for the time of a step bounds them all, so that running streams keep their rhythm
(ChunkedPrefillController), and shares divide what is left (`divide_budget`).

When the KV blocks or the slots run out, running sequences make room (Preemptor). How:

- preempt: it gives its blocks back and computes its tokens again later.
- swap: its KV moves to host memory and back, where that is cheaper than computing it again (or the cost is unknown)
  and the host has room; else as above.
- reject: it ends with `overloaded`: an early error instead of a late answer.

Which one: where the engine is not shared, the sequence admitted last. Where it is, the last one of the share with the
most running, and a share with much less than its slots takes one from the share with the most.

StepBuilder: collects the rows of a step while it is being planned. ScheduledStep: the plan with its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum
from typing import NamedTuple

from inferengine.core.executor import Capacity, PooledRow, SlotInit, SnapshotWrite, StepPlan, TokenWrites
from inferengine.core.kv_cache import KVCacheManager, OfferedBlock, SwapSpace
from inferengine.core.scheduler.queues import Claim
from inferengine.core.scheduler.scheduler_state import SchedulerOptions, SchedulerState
from inferengine.core.sequence import PROMPT_LOGPROBS_COST, SHARE_LEVELS, Finished, Sequence, SequenceStatus, Share
from inferengine.core.speculation import Speculator

# -- preemption --------------------------------------------------------------------------------------------------------

PREEMPTION_POLICIES = ("preempt", "swap", "reject")
KV_FULL = "The KV cache is full. Try again later, or ask for fewer tokens."


class PreemptionMode(Enum):
    """What becomes of a preempted sequence's KV, or of the sequence itself."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    REJECT = "reject"


def choose_preemption_mode(policy: str, sequence: Sequence, swap: SwapSpace, capacity: Capacity) -> PreemptionMode:
    """Return how this sequence makes room under a policy of PREEMPTION_POLICIES."""
    if policy == "reject":
        return PreemptionMode.REJECT
    gathers = sequence.request.gathers  # its partial mean is kept by slot, not in its blocks
    if capacity.has_states:  # which no host block would hold
        return PreemptionMode.RECOMPUTE
    if policy == "swap" and sequence.num_computed and not gathers and swap.has_room(sequence):
        num_blocks = sum(len(table) for table in sequence.block_tables)
        swap_s = 2 * num_blocks * capacity.swap_block_s  # there and back
        recompute_s = sequence.num_computed * capacity.prefill_token_s
        if swap_s == 0.0 or recompute_s == 0.0 or swap_s < recompute_s:
            return PreemptionMode.SWAP
    return PreemptionMode.RECOMPUTE


class Preemptor:
    """Makes room for the rows of the step that is being planned. `preempted` and `rejected` are of this step."""

    def __init__(self, state: SchedulerState, capacity: Capacity, options: SchedulerOptions) -> None:
        self.preempted: list[Sequence] = []
        self.rejected: list[Finished] = []
        self._state = state
        self._capacity = capacity
        self._policy = options.preemption
        self._contiguous = options.contiguous

    def begin_step(self) -> None:
        """Start new lists: those of the step before belong to its result."""
        self.preempted, self.rejected = [], []

    def allocate_decode(self, sequence: Sequence, num_tokens: int, rows: list[Sequence], now: float) -> Sequence | None:
        """Allocate for a decode, preempting until it fits or until the sequence itself had to go.

        Returns a sequence of `rows` that should be preempted for it: its row has to be taken back first.
        """
        state = self._state
        while not state.kv.allocate(sequence, num_tokens):
            state.stats.num_failed_allocations += 1
            victim = state.running[-1]
            if state.shares is not None and state.shares.is_shared:
                victim = state.shares.victim(state.running)
                if victim in rows:
                    return victim
            self.preempt(victim, now)
            if victim is sequence:
                return None
        return None

    def allocate_beside(self, rows: list[Sequence], sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Allocate for a row beside the planned `rows`, which are never preempted. False: it does not fit."""
        while not self._state.kv.allocate(sequence, num_tokens):
            self._state.stats.num_failed_allocations += 1
            victim = self._victim_beside(rows)
            if victim in rows or (victim is sequence and rows):
                return False
            self.preempt(victim, now)
            if victim is sequence:
                return False
        return True

    def preempt(self, victim: Sequence, now: float) -> None:
        """Take a running sequence's blocks and slot away."""
        mode = choose_preemption_mode(self._policy, victim, self._state.kv.swap, self._capacity)
        if mode is PreemptionMode.REJECT:
            self.rejected.append(self._state.finish(victim, "error", ("overloaded", KV_FULL), now))
        else:
            self._wait_again(victim, mode)

    def claim_share(self, now: float) -> Sequence | None:
        """Free a slot, and blocks up to its share, for whoever has nothing running or much less than its share.

        Whoever has the most running gives them up. Returns the sequence that can be admitted in this step.
        """
        state = self._state
        if state.shares is None or not state.shares.is_shared or state.waiting.is_isolating:
            return None
        for claim in state.shares.claims(now, state.num_slots, has_free_slot=bool(state.free_slots)):
            if not claim.sequence.num_inflight and self._meet(claim):
                return claim.sequence
            if self.preempted:
                return None
        return None

    def _meet(self, claim: Claim) -> bool:
        state, kv, claimant = self._state, self._state.kv, claim.sequence
        num_tokens = self._capacity.max_model_len if self._contiguous else len(claimant.tokens)
        may_take_blocks = all(kv.blocks_needed(g, num_tokens) <= g.num_blocks * claim.fraction for g in kv.groups)
        is_known_to_fit = False
        while not state.free_slots or not state.has_room(kv.lookup(claimant), num_tokens):
            victim = claim.victim(state.running)
            if victim is None or (state.free_slots and not may_take_blocks):
                return False
            if not is_known_to_fit and not self._could_fit(claim, num_tokens):
                return False
            is_known_to_fit = True
            self._wait_again(victim, choose_preemption_mode(self._policy, victim, kv.swap, self._capacity))
            claim.admit_first()
        return True

    def _wait_again(self, victim: Sequence, mode: PreemptionMode) -> None:
        self._state.wait_again(victim, swap=mode is PreemptionMode.SWAP)
        self.preempted.append(victim)

    def _could_fit(self, claim: Claim, num_tokens: int) -> bool:
        """Return whether a claim can be met at all."""
        kv, hit = self._state.kv, self._state.kv.lookup(claim.sequence)
        staying = list(claim.staying(self._state.running))
        for index, (group, pool, blocks) in enumerate(zip(kv.groups, kv.pools, hit.block_ids, strict=True)):
            held = {block for block in blocks if block is not None}
            kept = held.union(*(sequence.block_tables[index] for sequence in staying)) - {-1}
            missing = kv.blocks_needed(group, num_tokens) - len(held)
            if len(kept) + missing + self._state.watermark_blocks > pool.num_blocks:
                return False
        return True

    def _victim_beside(self, rows: list[Sequence]) -> Sequence:
        """Return the sequence to preempt for a row beside the planned ones; one without a row if there is any."""
        running, shares = self._state.running, self._state.shares
        if shares is None or not shares.is_shared:
            return running[-1]
        planned = set(rows)
        return shares.victim([sequence for sequence in running if sequence not in planned] or running)


# -- planning ----------------------------------------------------------------------------------------------------------


STEP_TIME_SMOOTHING = 0.1  # weight of a new step in the times that limit prompts
MINIMUM_CHUNK = 16  # prompts advance even when the target cannot be met


class ScheduledStep(NamedTuple):
    """A plan with the sequences behind its rows. The executor sees only the plan."""

    plan: StepPlan
    rows: list[Sequence]
    sampled: list[Sequence]  # sequences of the sampling rows, in row order
    uids: list[int]  # their uids
    layout: int  # equal for two steps only if `uids` is the same list
    swapped_out: list[Sequence]  # sequences whose KV this plan moves to the host
    draft_tokens: dict[int, list[int]]  # by row: the draft tokens that it verifies
    offered: list[OfferedBlock]  # blocks that this plan fills and that the next one may reuse


class StepBuilder:
    """Rows collected so far, decodes first, and what is left of the token budget."""

    __slots__ = (
        "admitted",
        "budget",
        "counts",
        "draft_tokens",
        "num_decodes",
        "pooled",
        "rows",
        "slot_inits",
        "starts",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_decodes = 0
        self.admitted: list[Sequence] = []
        self.slot_inits: list[SlotInit] = []  # of the admitted sequences
        self.draft_tokens: dict[int, list[int]] = {}  # by row
        self.pooled: list[PooledRow] = []

    def end_decodes(self) -> None:
        """Declare all rows so far decodes; the following are not."""
        self.num_decodes = len(self.rows)
        self.counts = [1] * self.num_decodes

    def undo_decodes(self) -> None:
        """Drop the rows so far, all of them decodes. Their blocks stay allocated for the next attempt."""
        for sequence, start in zip(self.rows, self.starts, strict=True):
            sequence.num_computed = start
            sequence.num_inflight -= 1
        self.rows.clear()
        self.starts.clear()

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """Add a row that computes the next `count` tokens."""
        self.rows.append(sequence)
        self.starts.append(sequence.num_computed)
        self.counts.append(count)
        self.budget -= count * sequence.token_cost

    def add_verification(self, sequence: Sequence, draft_tokens: list[int]) -> None:
        """Add a row that computes the pending token and the draft tokens after it. Comes after the decodes."""
        self.draft_tokens[len(self.rows)] = draft_tokens
        self.add_chunk(sequence, 1 + len(draft_tokens))

    def add_admitted(self, sequence: Sequence, count: int) -> None:
        """Add a row of a sequence whose state the device does not have."""
        request = sequence.request
        self.admitted.append(sequence)
        self.slot_inits.append(
            SlotInit(
                sequence.slot,
                list(sequence.tokens) if sequence.num_output else request.prompt_ids,
                sequence.num_prompt,
                request.params,
                request.seed,
                sorted(sequence.end_ids) if request.params.min_tokens else (),
                request.adapter,
                sequence.snapshot,
            )
        )
        self.add_chunk(sequence, count)

    def advance(self) -> tuple[list[bool], list[Sequence]]:
        """Count the tokens of all rows as computed, and their draws as under way; those of decodes are counted already.

        Returns (samples, sampled sequences).
        """
        num_decodes, rows = self.num_decodes, self.rows
        sampled = rows[:num_decodes]
        samples = [True] * num_decodes
        for row in range(num_decodes, len(rows)):
            sequence = rows[row]
            sequence.num_computed += self.counts[row]
            draws = sequence.num_computed >= len(sequence.tokens) + sequence.num_inflight
            if sequence.request.pooling is not None:
                gathers, is_first = sequence.request.gathers, sequence.request.pooling == "cls"
                if draws or gathers:
                    self.pooled.append(PooledRow(row, gathers, draws, is_first))
                draws = False
            samples.append(draws)
            if draws:
                sequence.num_inflight += 1
                sampled.append(sequence)
        return samples, sampled

    def plan(
        self,
        step: int,
        samples: list[bool],
        kv: KVCacheManager,
        token_writes: TokenWrites | None,
        device_drafts: bool,
        *,
        has_grammars: bool,
        snapshots: list[SnapshotWrite],
    ) -> StepPlan:
        """Make the plan of the rows; takes the block updates and copies that `kv` has collected."""
        num_drafts: list[int] = []
        if self.draft_tokens:
            num_drafts = [0] * len(self.rows)
            for row, tokens in self.draft_tokens.items():
                num_drafts[row] = len(tokens)
        return StepPlan(
            step=step,
            slots=[sequence.slot for sequence in self.rows],
            starts=self.starts,
            counts=self.counts,
            samples=samples,
            num_decodes=self.num_decodes,
            num_tokens=sum(self.counts),
            admitted=self.slot_inits,
            block_updates=kv.take_updates(),
            swap_out=kv.swap.out.take(),
            copies=kv.take_copies(),
            swap_in=kv.swap.back.take(),
            token_writes=token_writes,
            num_drafts=num_drafts,
            device_drafts=device_drafts and bool(num_drafts),
            masked=self._masked(samples) if has_grammars else (),
            pooled=self.pooled,
            snapshots=snapshots,
        )

    def _masked(self, samples: list[bool]) -> list[int]:
        """Return the indices, among all draws, of those that need a grammar's mask."""
        masked: list[int] = []
        index = 0
        for row, sequence in enumerate(self.rows):
            if samples[row]:
                draws = 1 + len(self.draft_tokens.get(row, ())) if self.draft_tokens else 1
                if sequence.grammar is not None:
                    masked.extend(range(index, index + draws))
                index += draws
        return masked


class PlannedStep(NamedTuple):
    """What was decided for one step."""

    step: ScheduledStep | None  # None: nothing can be computed now (idle, or all wait for tokens under way)
    admitted: list[Sequence]  # from waiting to running
    preempted: list[Sequence]  # from running to waiting
    rejected: list[Finished]  # ended because the KV cache is full (policy `reject`)


class Planner:
    """Builds one step after the other from the scheduler's state."""

    def __init__(
        self, state: SchedulerState, capacity: Capacity, options: SchedulerOptions, speculator: Speculator
    ) -> None:
        self._state = state
        self._capacity = capacity
        self._options = options
        self._speculator = speculator
        self._preemptor = Preemptor(state, capacity, options)
        self._chunked_prefill = (
            ChunkedPrefillController(options.itl_target_s, options.itl_target_factor) if options.itl_target_s else None
        )
        self._decode_offset = 0
        self._step = 0
        self._last_sampled: list[Sequence] = []
        self._last_uids: list[int] = []
        self._last_layout = 0

    def plan(self, now: float) -> PlannedStep:
        """Plan the next step."""
        builder, preemptor = StepBuilder(self._options.max_num_batched_tokens), self._preemptor
        preemptor.begin_step()
        claimant = preemptor.claim_share(now)
        num_claimed = len(preemptor.preempted)
        proposals = self._speculator.propose(self._step + 1) if self._speculator.proposer is not None else {}
        prefilling = self._plan_decodes(builder, proposals, now)
        builder.end_decodes()
        for sequence, tokens in proposals.items():
            if sequence.status is SequenceStatus.RUNNING and builder.budget > len(tokens):
                builder.add_verification(sequence, tokens)
        if self._chunked_prefill is not None:
            builder.budget = self._chunked_prefill.limit(builder.num_decodes, builder.budget)
        reserved = 0
        if claimant is not None and self._options.chunked_prefill:
            reserved = min(claimant.num_pending * claimant.token_cost, builder.budget // 2)
        builder.budget -= reserved
        self._plan_chunks(builder, prefilling, now)
        builder.budget += reserved
        if len(preemptor.preempted) == num_claimed:
            self._admit(builder, now)
        step = self._finish(builder) if builder.rows else None
        return PlannedStep(step, builder.admitted, preemptor.preempted, preemptor.rejected)

    def wants_results(self, last: ScheduledStep) -> bool:
        """Return whether planning should wait for the steps under way.

        It should where a grammar may force what follows their tokens, which then need no steps, where a sequence stands
        after its draft tokens is open, or what to propose next. Else masks are made once the tokens before are known,
        while the next step runs.
        """
        has_drafts = bool(last.draft_tokens)
        most = self._options.max_running_to_force
        forces = not 0 < most < len(self._state.running)
        if last.plan.masked and (has_drafts or (forces and any(map(_may_force, last.rows)))):
            return True
        return self._speculator.wants_results(self._step + 1, has_drafts)

    def observe(self, scheduled: ScheduledStep, duration_s: float) -> None:
        """Learn from the time of a step whose tokens are not committed yet, for chunked prefill and speculation."""
        plan = scheduled.plan
        num_decodes, num_draft_tokens = plan.num_decodes + len(scheduled.draft_tokens), sum(plan.num_drafts)
        num_prompt_tokens = plan.num_tokens - num_decodes - num_draft_tokens
        if self._chunked_prefill is not None:
            chunks = zip(scheduled.rows[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True)
            more = sum(count for row, count in chunks if row.request.params.prompt_logprobs is not None)
            num_costly = num_prompt_tokens + (PROMPT_LOGPROBS_COST - 1) * more
            self._chunked_prefill.observe(num_decodes, num_costly, duration_s)
        if self._speculator.proposer is not None and num_decodes and not num_prompt_tokens:
            verified = [scheduled.rows[row] for row in scheduled.draft_tokens]
            self._speculator.observe_step(plan.step, num_decodes, num_draft_tokens, verified, duration_s)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _plan_decodes(self, builder: StepBuilder, proposals: dict[Sequence, list[int]], now: float) -> list[Sequence]:
        """Give one token to every running sequence that has one pending, and count it as under way. Returns the
        sequences that have more pending."""
        if self._options.max_num_decodes:
            return self._plan_capped_decodes(builder, now)
        prefilling: list[Sequence] = []
        rows, starts, budget = builder.rows, builder.starts, builder.budget
        allocate = self._state.kv.allocate
        for sequence in self._state.running:
            inflight = sequence.num_inflight
            total = len(sequence.tokens) + inflight
            computed = sequence.num_computed
            if total - computed != 1:
                if total > computed:
                    prefilling.append(sequence)
                continue
            if total >= sequence.max_total or (proposals and sequence in proposals):
                if sequence.request.pooling is not None:
                    prefilling.append(sequence)  # the last token of a prompt without output
                continue  # its last token is under way, or it gets more than one
            if budget == 0:
                break
            if total > sequence.capacity and not allocate(sequence, total):
                victim = self._preemptor.allocate_decode(sequence, total, rows, now)
                if victim is not None:
                    builder.undo_decodes()
                    self._preemptor.preempt(victim, now)
                    return self._plan_decodes(builder, proposals, now)
                if sequence.status is not SequenceStatus.RUNNING:
                    continue  # it was preempted itself
            rows.append(sequence)
            starts.append(computed)
            sequence.num_computed = total
            sequence.num_inflight = inflight + 1
            budget -= 1
        builder.budget = budget
        return prefilling

    def _plan_capped_decodes(self, builder: StepBuilder, now: float) -> list[Sequence]:
        """Plan as `_plan_decodes` does, at most `max_num_decodes` rows, in turns among the running sequences."""
        running, allocate = self._state.running, self._preemptor.allocate_beside
        prefilling = [s for s in running if s.num_pending > (0 if s.request.pooling is not None else 1)]
        ready = [s for s in running if s.num_pending == 1 and s.num_tokens < s.max_total]
        cap = min(self._options.max_num_decodes, builder.budget)
        begin = self._decode_offset % len(ready) if len(ready) > cap else 0
        for sequence in (ready[begin:] + ready[:begin])[:cap]:
            is_running = sequence.status is SequenceStatus.RUNNING
            if is_running and allocate(builder.rows, sequence, sequence.num_tokens, now):
                builder.rows.append(sequence)
                builder.starts.append(sequence.num_computed)
                sequence.num_computed += 1
                sequence.num_inflight += 1
        self._decode_offset = begin + cap
        builder.budget -= len(builder.rows)
        return prefilling

    def _plan_chunks(self, builder: StepBuilder, prefilling: list[Sequence], now: float) -> None:
        """Continue prompts that are partly computed, in order of admission; shares divide the budget."""
        budgets = None
        if self._state.shares is not None and self._options.chunked_prefill:
            budgets = divide_budget(prefilling, builder.budget)
        for sequence in prefilling:
            if builder.budget <= 0:
                return
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted in this step
            count = self._chunk(sequence, sequence.num_pending, builder)
            if budgets is not None:
                cost, left = sequence.token_cost, budgets[sequence.request.share]
                count = (
                    min(count, max(1, left // cost)) if left > 0 else 0
                )  # 1: as in _chunk, else nobody might advance
                budgets[sequence.request.share] -= count * cost
            if count and self._preemptor.allocate_beside(builder.rows, sequence, sequence.num_computed + count, now):
                builder.add_chunk(sequence, count)

    def _chunk(self, sequence: Sequence, pending: int, builder: StepBuilder) -> int:
        """Return how many of the pending tokens go into this step."""
        budget = builder.budget
        if not self._options.chunked_prefill:
            return pending if pending <= budget or not builder.rows else 0  # longer than any budget: runs alone
        if budget > 0:
            budget = max(1, budget // sequence.token_cost)
        limit = self._options.prefill_chunk
        return min(pending, budget, limit) if limit else min(pending, budget)

    # -- admission into a step ---------------------------------------------------------------------------------------

    def _admit(self, builder: StepBuilder, now: float) -> None:
        """Admit waiting sequences while budget, slots and blocks last."""
        state = self._state
        while builder.budget > 0 and state.free_slots:
            sequence = state.waiting.peek(now, len(state.running))
            if sequence is None or sequence.num_inflight:
                return
            admit = self._admit_swapped if sequence.host_tables is not None else self._admit_fresh
            count = admit(sequence, builder)
            if count == 0:
                return
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
                state.stats.num_prompt_tokens += sequence.num_prompt
                state.stats.num_cached_tokens += sequence.num_cached
            sequence.status = SequenceStatus.RUNNING
            state.running.append(sequence)
            builder.add_admitted(sequence, count)

    def _admit_fresh(self, sequence: Sequence, builder: StepBuilder) -> int:
        """Give a sequence a slot, the blocks of its cached prefix, and room for its first chunk. 0: not now."""
        kv = self._state.kv
        parent = self._fork_parent(sequence)
        hit = kv.fork(parent, sequence) if parent is not None else None
        if hit is None:
            parent, hit = None, kv.lookup(sequence)
        num_known = sequence.num_prompt - 1 if parent is not None else hit.num_tokens
        count = self._chunk(sequence, len(sequence.tokens) - num_known, builder)
        reserved = self._capacity.max_model_len if self._options.contiguous else 0
        if count == 0 or not self._state.has_room(hit, max(reserved, len(sequence.tokens))):
            return 0
        self._state.start(sequence)
        kv.adopt(sequence, hit)
        if not kv.allocate(sequence, max(reserved, num_known + count)):
            raise RuntimeError("an admitted sequence does not fit: has_room and allocate disagree")
        if parent is not None:
            kv.copy_partial(parent, sequence)
        return count

    def _admit_swapped(self, sequence: Sequence, builder: StepBuilder) -> int:
        """Bring back a sequence whose KV is on the host. 0: not now."""
        count = self._chunk(sequence, sequence.num_pending, builder)
        if count == 0 or not self._state.has_room_for_swapped(sequence, sequence.num_computed + count):
            return 0
        self._state.start(sequence)
        self._state.kv.swap_in(sequence)
        if not self._state.kv.allocate(sequence, sequence.num_computed + count):
            raise RuntimeError("a swapped sequence does not fit: has_room_for_swapped and allocate disagree")
        return count

    def _fork_parent(self, sequence: Sequence) -> Sequence | None:
        """Return the running first choice whose prompt blocks can be shared, for a choice that has not begun."""
        if sequence.leader is None or sequence.num_output or self._capacity.has_states:
            return None
        parent = self._state.sequences.get(sequence.leader)
        if parent is None or parent.status is not SequenceStatus.RUNNING or parent.num_computed < sequence.num_prompt:
            return None
        return parent

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _finish(self, builder: StepBuilder) -> ScheduledStep:
        """Make the plan of the collected rows."""
        samples, sampled = builder.advance()
        state, proposer = self._state, self._speculator.proposer
        if sampled != self._last_sampled:
            self._last_sampled, self._last_layout = sampled, state.new_layout()
            self._last_uids = [sequence.uid for sequence in sampled]
        self._step += 1
        on_device = proposer is not None and proposer.on_device
        writes = self._take_writes(builder, on_device) if state.unsent_tokens or builder.draft_tokens else None
        rows, stats, kv = builder.rows, state.stats, state.kv
        offered: list[OfferedBlock] = []
        for row in range(builder.num_decodes, len(rows)):
            if row not in builder.draft_tokens:  # steps run in order: the next one may read what this one writes
                offered += kv.cache_full_blocks(rows[row], builder.starts[row] + builder.counts[row])
        plan = builder.plan(
            self._step,
            samples,
            kv,
            writes,
            on_device,
            has_grammars=state.num_grammars > 0,
            snapshots=kv.save_states(rows, builder.starts, builder.counts, builder.num_decodes),
        )
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens
        stats.num_scheduled_rows += len(rows)
        stats.max_batch = max(stats.max_batch, len(rows))
        return ScheduledStep(
            plan,
            rows,
            sampled,
            self._last_uids,
            self._last_layout,
            state.take_swapped_out(),
            builder.draft_tokens,
            offered,
        )

    def _take_writes(self, builder: StepBuilder, on_device: bool) -> TokenWrites:
        """Return the tokens that the device does not know: forced ones of running sequences, and draft tokens of the
        host."""
        writes = TokenWrites([], [], [])
        for sequence, position, token in self._state.take_unsent_tokens():
            if sequence.slot >= 0:
                writes.slots.append(sequence.slot)
                writes.positions.append(position)
                writes.token_ids.append(token)
        for row, tokens in builder.draft_tokens.items() if not on_device else ():
            slot, start = builder.rows[row].slot, builder.starts[row]
            writes.slots.extend([slot] * len(tokens))
            writes.positions.extend(range(start + 1, start + 1 + len(tokens)))
            writes.token_ids.extend(tokens)
        return writes


class ChunkedPrefillController:
    """Limits the prompt tokens of a step by a target for its time. Pure: the caller measures the steps.

    The time of a step is modelled as base + slope × prompt tokens. Both are learnt from finished steps: the base from
    steps that only decode, the slope from what steps with prompts took beyond it, all of them together, so that a
    few tokens that cost a whole step do not pass for the price of a token.
    """

    def __init__(self, target_s: float, base_factor: float = 0.0) -> None:
        """`base_factor`: the target is at least so many bases, so that prompts keep a share of a slow device."""
        self._target_s = target_s
        self._base_factor = base_factor
        self._base_s = 0.0
        self._beyond_s = 0.0  # of steps with prompts, in the mean
        self._num_tokens = 0.0  # of prompts in such a step, in the mean

    def observe(self, num_decodes: int, num_prompt_tokens: int, duration_s: float) -> None:
        """Learn from a finished step."""
        if num_prompt_tokens == 0:
            if num_decodes:
                self._base_s = _mix(self._base_s, duration_s)
            return
        self._beyond_s = _mix(self._beyond_s, max(0.0, duration_s - self._base_s))
        self._num_tokens = _mix(self._num_tokens, num_prompt_tokens)

    def limit(self, num_decodes: int, budget: int) -> int:
        """Return the most prompt tokens beside `num_decodes` decodes: the whole budget where there are no decodes."""
        if num_decodes == 0 or self._beyond_s == 0.0:
            return budget
        target_s = max(self._target_s, self._base_factor * self._base_s)
        room = int((target_s - self._base_s) * self._num_tokens / self._beyond_s)
        return min(budget, max(MINIMUM_CHUNK, room))


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else old + STEP_TIME_SMOOTHING * (new - old)


def divide_budget(prefilling: SequenceOf[Sequence], budget: int) -> dict[Share, int] | None:
    """Divide a budget of prompt tokens between shares, level by level: equal parts, of which unneeded rests go to the
    others.

    None where only one share has prompts to compute: all of the budget is its own.
    """
    pending: dict[Share, int] = {}
    for sequence in prefilling:
        share = sequence.request.share
        pending[share] = pending.get(share, 0) + sequence.num_pending * sequence.token_cost
    return None if len(pending) < 2 else _divide(pending, budget, 0)


def _divide(pending: dict[Share, int], budget: int, level: int) -> dict[Share, int]:
    if level == SHARE_LEVELS:
        return dict.fromkeys(pending, budget)  # it has one key
    parts: dict[str, dict[Share, int]] = {}
    for share, num_tokens in pending.items():
        parts.setdefault(share[level], {})[share] = num_tokens
    budgets: dict[Share, int] = {}
    num_left = len(parts)
    for part in sorted(parts.values(), key=lambda part: sum(part.values())):
        given = min(sum(part.values()), budget // num_left)
        budgets |= _divide(part, given, level + 1)
        budget, num_left = budget - given, num_left - 1
    return budgets


def _may_force(sequence: Sequence) -> bool:
    """Return whether a sequence's grammar may force tokens soon."""
    if sequence.grammar is None or not sequence.can_be_forced:
        return False
    return len(sequence.tokens) < sequence.overlaps_at
