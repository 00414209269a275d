"""Planner: which tokens to compute next. One algorithm, no phases, O(1) work per row and per block.

A step has a token budget. Running sequences go on first: those with one token pending (decodes) before those with more
(guesses to verify, then prompt chunks), so that a long prompt never delays a running stream by more than its chunk.
What is left of the budget admits waiting sequences. When blocks run out, the sequence admitted last gives way.
"""

from __future__ import annotations

from inferengine.core.executor import Capacity
from inferengine.core.kv_cache.manager import OfferedBlock, PrefixHit
from inferengine.core.scheduler.chunked_prefill import ChunkedPrefillController
from inferengine.core.scheduler.preemption import PreemptionMode, choose_preemption_mode
from inferengine.core.scheduler.scheduler_state import SchedulerOptions, SchedulerState
from inferengine.core.scheduler.step_builder import ScheduledStep, StepBuilder
from inferengine.core.sequence import PROMPT_LOGPROBS_COST, Finished, Sequence, SequenceStatus
from inferengine.core.speculation.controller import SpeculationController
from inferengine.core.speculation.proposers import Proposer
from inferengine.core.step_plan import TokenWrites

QUIET_STEPS = 8  # most steps for which nobody is asked again whether it would guess
LOOK_EVERY = 4  # of steps that meanwhile are only looked at now and then: that, too, takes microseconds
KV_FULL = "The KV cache is full. Try again later, or ask for fewer tokens."


class Planner:
    """Builds one step after the other out of a roster."""

    def __init__(
        self, roster: SchedulerState, capacity: Capacity, options: SchedulerOptions, proposer: Proposer | None = None
    ) -> None:
        self.roster = roster
        self.capacity = capacity
        self.options = options
        self.rejected: list[Finished] = []  # ended under pressure while a step was planned; the caller takes them
        self.chunks = ChunkedPrefillController(options.itl_target_s) if options.itl_target_s else None
        self.proposer = proposer if options.max_drafts and not options.max_num_decodes else None
        self.drafts = SpeculationController(options.max_drafts, options.max_running_to_draft)
        self.forced: list[tuple[Sequence, int, int]] = []  # (sequence, position, token) that the device does not know
        self._watermark_blocks = int(options.watermark * min(group.num_blocks for group in capacity.groups))
        self._decode_offset = 0
        self._step = 0
        self._waited_step = 0  # the last one that was not launched behind another, for the sake of guesses
        self._quiet_until = 0  # step before which nobody would guess
        self._begun_step = self._observed_step = 0  # the last ones that guesses were thought of in
        self._layout = 0
        self._last_sampled: list[Sequence] = []
        self._last_uids: list[int] = []
        self._last_layout = 0

    def plan(self, now: float) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed now (idle, or all wait for tokens under way)."""
        draft = StepBuilder(self.options.max_num_batched_tokens)
        stats = self.roster.stats
        claimant = self._settle_claim(now) if self.roster.tenants is not None else None
        preempted_before = stats.num_preemptions
        guesses = self._propose() if self.proposer is not None else {}
        prefilling = self._plan_decodes(draft, guesses, now)
        draft.end_decodes()
        for sequence, tokens in guesses.items():
            if sequence.status is SequenceStatus.RUNNING and draft.budget > len(tokens):
                draft.add_verification(sequence, tokens)
        if self.chunks is not None:
            draft.budget = self.chunks.limit(draft.num_decodes, draft.budget)
        reserved = 0
        if claimant is not None and self.options.chunked_prefill:
            reserved = min(claimant.num_pending * claimant.token_cost, draft.budget // 2)
        draft.budget -= reserved
        self._plan_chunks(draft, prefilling, now)
        draft.budget += reserved
        if stats.num_preemptions == preempted_before:
            self._admit(draft, now)
        if not draft.rows:
            return None
        return self._finish_plan(draft)

    def wants_results(self, last: ScheduledStep) -> bool:
        """Whether planning should wait for the steps under way: what a grammar allows next, where a sequence stands
        after its guesses, or what to guess next, depends on their tokens."""
        if last.plan.masked:
            return True
        if last.drafts or (self.proposer is not None and self._wants_to_guess(self.proposer)):
            self._waited_step = self._step + 1
            return True
        return False

    def _wants_to_guess(self, proposer: Proposer) -> bool:
        """Whether it is worth waiting for the tokens under way. A proposer on the host is asked what it would guess
        after the tokens that are known: where it has nothing to go by now, it will hardly have after one more."""
        if self._step + 1 < self._quiet_until:
            return False
        running, drafts = self.roster.running, self.drafts
        quiet = QUIET_STEPS
        if drafts.awake(len(running)):
            for sequence in running:
                if sequence.num_pending == 1 and drafts.is_due(sequence, sequence.num_tokens):
                    if proposer.on_device or proposer.propose(sequence, 1):
                        return True
                    drafts.nothing_offered(sequence)
                quiet = min(quiet, max(1, sequence.drafts_resume_at - sequence.num_tokens))
        self._quiet_until = self._step + 1 + quiet
        return False

    def observe(self, scheduled: ScheduledStep, duration_s: float) -> None:
        """How long a step took whose tokens are not committed yet: what chunks and guesses are measured by."""
        plan = scheduled.plan
        num_decodes, num_guesses = plan.num_decodes + len(scheduled.drafts), sum(plan.num_drafts)
        num_prompt_tokens = plan.num_tokens - num_decodes - num_guesses
        if self.chunks is not None:
            wanted = zip(scheduled.rows[plan.num_decodes :], plan.counts[plan.num_decodes :], strict=True)
            more = sum(count for row, count in wanted if row.request.params.prompt_logprobs is not None)
            self.chunks.observe(num_decodes, num_prompt_tokens + (PROMPT_LOGPROBS_COST - 1) * more, duration_s)
        if self.proposer is None or num_prompt_tokens or not num_decodes:
            return
        if plan.step < self._quiet_until and plan.step % LOOK_EVERY and not num_guesses:
            return
        drafted = [scheduled.rows[row] for row in scheduled.drafts]
        self.drafts.observe_step(
            num_decodes,
            num_guesses,
            duration_s,
            num_steps=min(LOOK_EVERY, plan.step - self._observed_step),
            has_waited=plan.step == self._waited_step,
            # the draft model has read their prompts in this step, or what came since its last guesses
            is_reading=self.proposer.on_device and any(sequence.is_draft_model_behind for sequence in drafted),
        )
        self._observed_step = plan.step

    def write_again(self, failed: ScheduledStep) -> None:
        """Forced tokens that a failed step should have told the device, of sequences that had no row in it: those with
        a row start over from their known tokens."""
        writes = failed.plan.token_writes
        if writes is not None:
            by_slot = {sequence.slot: sequence for sequence in self.roster.running if sequence not in failed.rows}
            for slot, position, token in zip(*writes, strict=True):
                if slot in by_slot:
                    self.forced.append((by_slot[slot], position, token))

    def new_layout(self) -> int:
        self._layout += 1
        return self._layout

    # -- rows --------------------------------------------------------------------------------------------------------

    def _propose(self) -> dict[Sequence, list[int]]:
        """Guesses for sequences whose tokens are all known, with blocks for them; nobody gives way for a guess."""
        running, proposer, drafts = self.roster.running, self.proposer, self.drafts
        step = self._step + 1
        if proposer is None or step < self._quiet_until:
            return {}
        num_steps, self._begun_step = step - self._begun_step, step
        if not drafts.begin(len(running), num_steps):
            return {}
        offers: dict[Sequence, list[int]] = {}
        for sequence in running:
            total = len(sequence.tokens)
            if sequence.num_inflight or total - sequence.num_computed != 1 or not drafts.is_due(sequence, total):
                continue
            if sequence.grammar is not None and proposer.on_device:
                continue  # the device cannot ask a grammar whether a guess is allowed
            most = min(drafts.length(sequence), sequence.max_total - total - 1)
            if most <= 0:
                continue
            tokens = proposer.propose(sequence, most)
            if sequence.grammar is not None:
                tokens = tokens[: sequence.grammar.validate(tokens)]
            if tokens:
                offers[sequence] = tokens
            else:
                drafts.nothing_offered(sequence)
        lengths = drafts.choose(
            {sequence: len(tokens) for sequence, tokens in offers.items()}, len(running), on_device=proposer.on_device
        )
        guesses: dict[Sequence, list[int]] = {}
        room = max(0, self.options.max_num_batched_tokens - len(running))  # nobody waits for a guess of somebody else
        for sequence, tokens in offers.items():
            tokens = tokens[: min(lengths.get(sequence, 0), room)]
            if tokens and self.roster.kv.allocate(sequence, len(sequence.tokens) + len(tokens)):
                guesses[sequence] = tokens
                drafts.begin_guesses(sequence)
                room -= len(tokens)
        return guesses

    def _plan_decodes(self, draft: StepBuilder, guesses: dict[Sequence, list[int]], now: float) -> list[Sequence]:
        """Give one token to every running sequence that has one pending, and count it as under way: a row in the draft
        stays. Returns those that have more."""
        if self.options.max_num_decodes:
            return self._plan_capped_decodes(draft, now)
        prefilling: list[Sequence] = []
        rows, starts, budget = draft.rows, draft.starts, draft.budget
        allocate = self.roster.kv.allocate
        for sequence in self.roster.running:  # who gives way is the last of them
            inflight = sequence.num_inflight
            total = len(sequence.tokens) + inflight
            computed = sequence.num_computed
            if total - computed != 1:
                if total > computed:
                    prefilling.append(sequence)
                continue
            if total >= sequence.max_total or (guesses and sequence in guesses):
                if sequence.request.pooling is not None:
                    prefilling.append(sequence)  # the last token of a prompt that nothing follows
                continue  # its last token is under way, or it gets more than one
            if budget == 0:
                break
            if total > sequence.capacity and not allocate(sequence, total):
                if (victim := self._make_room(sequence, total, rows, now)) is not None:
                    self._take_back(draft)
                    self._give_way(victim, now)
                    return self._plan_decodes(draft, guesses, now)
                if sequence.status is not SequenceStatus.RUNNING:
                    continue  # the sequence itself had to go
            rows.append(sequence)
            starts.append(computed)
            sequence.num_computed = total
            sequence.num_inflight = inflight + 1
            budget -= 1
        draft.budget = budget
        return prefilling

    def _plan_capped_decodes(self, draft: StepBuilder, now: float) -> list[Sequence]:
        """As above with at most `max_num_decodes` rows, taking turns among the running sequences."""
        running = self.roster.running
        prefilling = [s for s in running if s.num_pending > (0 if s.request.pooling is not None else 1)]
        ready = [s for s in running if s.num_pending == 1 and s.num_tokens < s.max_total]
        cap = min(self.options.max_num_decodes, draft.budget)
        begin = self._decode_offset % len(ready) if len(ready) > cap else 0
        for sequence in (ready[begin:] + ready[:begin])[:cap]:
            if sequence.status is SequenceStatus.RUNNING and self._make_room_beside(
                draft, sequence, sequence.num_tokens, now
            ):
                draft.rows.append(sequence)
                draft.starts.append(sequence.num_computed)
                sequence.num_computed += 1
                sequence.num_inflight += 1
        self._decode_offset = begin + cap
        draft.budget -= len(draft.rows)
        return prefilling

    def _plan_chunks(self, draft: StepBuilder, prefilling: list[Sequence], now: float) -> None:
        """Go on with prompts that are partly computed, in order of admission; tenants share what there is."""
        grants = self._grants(draft, prefilling) if self.roster.tenants is not None else None
        for sequence in prefilling:
            if draft.budget <= 0:
                return
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # a victim of this very step
            count = self._chunk(sequence, sequence.num_pending, draft)
            if grants is not None:
                cost = sequence.token_cost
                count = min(count, grants[sequence.request.tenant] // cost)
                grants[sequence.request.tenant] -= count * cost
            if count and self._make_room_beside(draft, sequence, sequence.num_computed + count, now):
                draft.add_chunk(sequence, count)

    def _grants(self, draft: StepBuilder, prefilling: list[Sequence]) -> dict[str, int] | None:
        """How many prompt tokens each tenant may have computed: equal parts, and what one does not need is the others'.
        None where that is all of the budget: there is one tenant, or prompts are not split."""
        pending: dict[str, int] = {}
        for sequence in prefilling:
            tenant = sequence.request.tenant
            pending[tenant] = pending.get(tenant, 0) + sequence.num_pending * sequence.token_cost
        if len(pending) < 2 or not self.options.chunked_prefill:
            return None
        budget = draft.budget
        grants: dict[str, int] = {}
        for tenant in sorted(pending, key=pending.__getitem__):
            grants[tenant] = min(pending[tenant], budget // (len(pending) - len(grants)))
            budget -= grants[tenant]
        return grants

    def _chunk(self, sequence: Sequence, pending: int, draft: StepBuilder) -> int:
        """How many of the pending tokens go into this step."""
        if not self.options.chunked_prefill:
            return pending if pending <= draft.budget or not draft.rows else 0  # too long for any budget: runs alone
        budget = draft.budget if draft.budget <= 0 else max(1, draft.budget // sequence.token_cost)
        limit = self.options.prefill_chunk
        return min(pending, budget, limit) if limit else min(pending, budget)

    def _finish_plan(self, draft: StepBuilder) -> ScheduledStep:
        samples, sampled = draft.advance()
        if sampled != self._last_sampled:
            self._last_sampled, self._last_layout = sampled, self.new_layout()
            self._last_uids = [sequence.uid for sequence in sampled]
        uids, layout = self._last_uids, self._last_layout
        self._step += 1
        roster, on_device = self.roster, self.proposer is not None and self.proposer.on_device
        writes = self._take_writes(draft, on_device) if self.forced or draft.drafts else None
        plan = draft.plan(self._step, samples, roster.kv, writes, on_device, has_grammars=roster.num_grammars > 0)
        stats = roster.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens
        stats.num_scheduled_rows += len(draft.rows)
        stats.max_batch = max(stats.max_batch, len(draft.rows))
        swapped_out, roster.swapped_out = roster.swapped_out, []
        offered: list[OfferedBlock] = []
        for row in range(plan.num_decodes, len(draft.rows)):
            if row not in draft.drafts:  # steps run in order: the next one may read what this one is going to write
                offered += roster.kv.cache_full_blocks(draft.rows[row], plan.starts[row] + plan.counts[row])
        return ScheduledStep(plan, draft.rows, sampled, uids, layout, swapped_out, draft.drafts, offered)

    def _take_writes(self, draft: StepBuilder, on_device: bool) -> TokenWrites:
        """Tokens that the device has to be told: forced ones of sequences that still run, and guesses."""
        writes = TokenWrites([], [], [])
        for sequence, position, token in self.forced:
            if sequence.slot >= 0:
                writes.slots.append(sequence.slot)
                writes.positions.append(position)
                writes.token_ids.append(token)
        self.forced = []
        for row, tokens in draft.drafts.items() if not on_device else ():
            slot, start = draft.rows[row].slot, draft.starts[row]
            writes.slots.extend([slot] * len(tokens))
            writes.positions.extend(range(start + 1, start + 1 + len(tokens)))
            writes.token_ids.extend(tokens)
        return writes

    # -- admission into a step ---------------------------------------------------------------------------------------

    def _admit(self, draft: StepBuilder, now: float) -> None:
        """Admit waiting sequences while budget, slots and blocks last."""
        roster = self.roster
        while draft.budget > 0 and roster.free_slots:
            sequence = roster.waiting.peek(now, len(roster.running))
            if sequence is None or sequence.num_inflight:
                return
            admitted = self._admit_swapped if sequence.host_tables is not None else self._admit_fresh
            count = admitted(sequence, draft)
            if count == 0:
                return
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now
                sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
                roster.stats.num_prompt_tokens += sequence.num_prompt
                roster.stats.num_cached_tokens += sequence.num_cached
            sequence.status = SequenceStatus.RUNNING
            roster.running.append(sequence)
            draft.add_admitted(sequence, count)

    def _admit_fresh(self, sequence: Sequence, draft: StepBuilder) -> int:
        """Give a sequence a slot, the blocks of its cached prefix, and room for its first chunk. 0: not now."""
        kv = self.roster.kv
        parent = self._fork_parent(sequence)
        hit = kv.fork(parent, sequence) if parent is not None else None
        if hit is None:
            parent, hit = None, kv.lookup(sequence)
        num_known = sequence.num_prompt - 1 if parent is not None else hit.num_tokens
        count = self._chunk(sequence, len(sequence.tokens) - num_known, draft)
        reserved = self.capacity.max_model_len if self.options.contiguous else 0
        if count == 0 or not self._fits(hit, max(reserved, len(sequence.tokens))):
            return 0
        self.roster.start(sequence)
        kv.adopt(sequence, hit)
        if not kv.allocate(sequence, max(reserved, num_known + count)):
            raise RuntimeError("an admitted sequence does not fit: _fits and allocate disagree")
        if parent is not None:
            kv.copy_partial(parent, sequence)
        return count

    def _admit_swapped(self, sequence: Sequence, draft: StepBuilder) -> int:
        """Bring back a sequence whose KV waits on the host. 0: not now."""
        count = self._chunk(sequence, sequence.num_pending, draft)
        if count == 0 or not self._fits_again(sequence, sequence.num_computed + count):
            return 0
        self.roster.start(sequence)
        self.roster.kv.swap_in(sequence)
        if not self.roster.kv.allocate(sequence, sequence.num_computed + count):
            raise RuntimeError("a swapped sequence does not fit: _fits_again and allocate disagree")
        return count

    def _fork_parent(self, sequence: Sequence) -> Sequence | None:
        """The running first choice whose prompt blocks can be shared, for a choice that has not begun."""
        if sequence.leader is None or sequence.num_output:
            return None
        parent = self.roster.sequences.get(sequence.leader)
        if parent is None or parent.status is not SequenceStatus.RUNNING or parent.num_computed < sequence.num_prompt:
            return None
        return parent

    # -- a tenant's own ----------------------------------------------------------------------------------------------

    def _settle_claim(self, now: float) -> Sequence | None:
        """A tenant with nothing running, or much less than its share, does not wait for others to end: the tenant with
        the most running gives it a slot, and blocks as far as they are its share. Returns the sequence that is admitted
        for it in this step."""
        roster, kv = self.roster, self.roster.kv
        tenants = roster.tenants
        claimant = None if tenants is None else tenants.claimant(now, roster.num_slots)
        if tenants is None or claimant is None or claimant.num_inflight or roster.waiting.is_isolating:
            return None
        num_tokens = self.capacity.max_model_len if self.options.contiguous else len(claimant.tokens)
        share = tenants.share()
        may_take_blocks = all(kv.blocks_needed(g, num_tokens) <= g.num_blocks * share for g in kv.groups)
        is_known_to_fit = False
        while not roster.free_slots or not self._fits(kv.lookup(claimant), num_tokens):
            if not is_known_to_fit and not self._could_fit(kv.lookup(claimant), num_tokens):
                return None
            is_known_to_fit = True
            victim = tenants.victim(roster.running)
            may_give_way = tenants.may_give_way(victim, claimant, roster.num_slots)
            if not may_give_way or (roster.free_slots and not may_take_blocks):
                return None
            relief = choose_preemption_mode(self.options.pressure, victim, kv.swap, self.capacity)
            roster.wait_again(victim, swap=relief is PreemptionMode.SWAP)
        return claimant

    def _could_fit(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether a claim can be met at all: of each tenant at least the one admitted first stays."""
        kv = self.roster.kv
        staying = {sequence.request.tenant: sequence for sequence in reversed(self.roster.running)}.values()
        for index, (group, pool, blocks) in enumerate(zip(kv.groups, kv.pools, hit.block_ids, strict=True)):
            held = {block for block in blocks if block is not None}
            kept = held.union(*(sequence.block_tables[index] for sequence in staying)) - {-1}
            missing = kv.blocks_needed(group, num_tokens) - len(held)
            if len(kept) + missing + self._watermark_blocks > pool.num_blocks:
                return False
        return True

    # -- room --------------------------------------------------------------------------------------------------------

    def _fits(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether a waiting sequence can be admitted: all of its known tokens beside the blocks of its hit (not only
        its first chunk: a prompt that stops half way would be thrown out again), and a reserve so that the running
        ones can grow. An empty engine needs no reserve."""
        kv = self.roster.kv
        reserve = self._watermark_blocks if self.roster.running else 0
        for group, pool, blocks in zip(kv.groups, kv.pools, hit.block_ids, strict=True):
            held = [block for block in blocks if block is not None]
            revived = sum(1 for block in held if pool.reference_count(block) == 0)
            if kv.blocks_needed(group, num_tokens) - len(held) + revived + reserve > pool.num_free:
                self.roster.stats.num_failed_allocations += 1
                return False
        return True

    def _fits_again(self, sequence: Sequence, num_tokens: int) -> bool:
        kv = self.roster.kv
        reserve = self._watermark_blocks if self.roster.running else 0
        needed = kv.blocks_for(num_tokens)
        for pool, table in zip(kv.pools, sequence.host_tables or [], strict=True):
            if needed - table.count(-1) + reserve > pool.num_free:
                self.roster.stats.num_failed_allocations += 1
                return False
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, rows: list[Sequence], now: float) -> Sequence | None:
        """Allocate for a decode; the sequence admitted last gives way until it fits, or until it is the sequence
        itself. Returns one that should give way and has a row already."""
        while not self.roster.kv.allocate(sequence, num_tokens):
            self.roster.stats.num_failed_allocations += 1
            running, tenants = self.roster.running, self.roster.tenants
            victim = running[-1]
            if tenants is not None and tenants.share() < 1.0:
                victim = tenants.victim(running)
                if victim in rows:
                    return victim
            self._give_way(victim, now)
            if victim is sequence:
                return None
        return None

    def _take_back(self, draft: StepBuilder) -> None:
        """Plan the decodes anew. What was allocated for them they will need."""
        for sequence, start in zip(draft.rows, draft.starts, strict=True):
            sequence.num_computed = start
            sequence.num_inflight -= 1
        draft.rows.clear()
        draft.starts.clear()

    def _victim_beside(self, draft: StepBuilder) -> Sequence:
        """Who gives way for a row beside those that are planned, of others if there are any."""
        running, tenants = self.roster.running, self.roster.tenants
        if tenants is None or tenants.share() == 1.0:
            return running[-1]
        planned = set(draft.rows)
        return tenants.victim([sequence for sequence in running if sequence not in planned] or running)

    def _make_room_beside(self, draft: StepBuilder, sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Allocate beside rows already planned, which never give way: their step is being built."""
        while not self.roster.kv.allocate(sequence, num_tokens):
            self.roster.stats.num_failed_allocations += 1
            victim = self._victim_beside(draft)
            if victim in draft.rows or (victim is sequence and draft.rows):
                return False
            self._give_way(victim, now)
            if victim is sequence:
                return False
        return True

    def _give_way(self, victim: Sequence, now: float) -> None:
        relief = choose_preemption_mode(self.options.pressure, victim, self.roster.kv.swap, self.capacity)
        if relief is PreemptionMode.REJECT:
            self.rejected.append(self.roster.finish(victim, "error", ("overloaded", KV_FULL), now))
        else:
            self.roster.wait_again(victim, swap=relief is PreemptionMode.SWAP)
