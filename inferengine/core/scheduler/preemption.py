"""Preemption: which running sequence makes room when the KV blocks or the slots run out, and how.

- preempt: it gives its blocks back and computes its tokens again later.
- swap: its KV moves to host memory and back, where that is cheaper than computing it again (or the cost is unknown)
  and the host has room; else as above.
- reject: it ends with `overloaded`: an early error instead of a late answer.

Without tenants the sequence admitted last is preempted. With tenants it is the last one of the tenant with the most
running, and a tenant with much less than its share of the slots takes one from the tenant with the most.
"""

from __future__ import annotations

from enum import Enum

from inferengine.core.executor import Capacity
from inferengine.core.kv_cache.manager import PrefixHit, SwapSpace
from inferengine.core.scheduler.scheduler_state import SchedulerOptions, SchedulerState
from inferengine.core.sequence import Finished, Sequence

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
    gathers = sequence.request.pooling == "mean"  # its partial mean is kept by slot, not in its blocks
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
            if state.tenants is not None and state.tenants.share() < 1.0:
                victim = state.tenants.victim(state.running)
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
        """Free a slot, and blocks up to its share, for a tenant with nothing running or much less than its share.

        The tenant with the most running gives them up. Returns the sequence that can be admitted in this step.
        """
        state, kv = self._state, self._state.kv
        tenants = state.tenants
        claimant = None if tenants is None else tenants.claimant(now, state.num_slots)
        if tenants is None or claimant is None or claimant.num_inflight or state.waiting.is_isolating:
            return None
        num_tokens = self._capacity.max_model_len if self._contiguous else len(claimant.tokens)
        share = tenants.share()
        may_take_blocks = all(kv.blocks_needed(g, num_tokens) <= g.num_blocks * share for g in kv.groups)
        is_known_to_fit = False
        while not state.free_slots or not state.has_room(kv.lookup(claimant), num_tokens):
            if not is_known_to_fit and not self._could_fit(kv.lookup(claimant), num_tokens):
                return None
            is_known_to_fit = True
            victim = tenants.victim(state.running)
            is_preemptible = tenants.is_preemptible(victim, claimant, state.num_slots)
            if not is_preemptible or (state.free_slots and not may_take_blocks):
                return None
            self._wait_again(victim, choose_preemption_mode(self._policy, victim, kv.swap, self._capacity))
        return claimant

    def _wait_again(self, victim: Sequence, mode: PreemptionMode) -> None:
        self._state.wait_again(victim, swap=mode is PreemptionMode.SWAP)
        self.preempted.append(victim)

    def _could_fit(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether a claim can be met at all: of each tenant at least the sequence admitted first stays."""
        kv = self._state.kv
        staying = {sequence.request.tenant: sequence for sequence in reversed(self._state.running)}.values()
        for index, (group, pool, blocks) in enumerate(zip(kv.groups, kv.pools, hit.block_ids, strict=True)):
            held = {block for block in blocks if block is not None}
            kept = held.union(*(sequence.block_tables[index] for sequence in staying)) - {-1}
            missing = kv.blocks_needed(group, num_tokens) - len(held)
            if len(kept) + missing + self._state.watermark_blocks > pool.num_blocks:
                return False
        return True

    def _victim_beside(self, rows: list[Sequence]) -> Sequence:
        """The sequence to preempt for a row beside the planned ones; one without a row if there is any."""
        running, tenants = self._state.running, self._state.tenants
        if tenants is None or tenants.share() == 1.0:
            return running[-1]
        planned = set(rows)
        return tenants.victim([sequence for sequence in running if sequence not in planned] or running)
