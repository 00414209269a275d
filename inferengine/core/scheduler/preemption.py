"""Pressure: what happens to the sequence that must make room when the KV blocks run out.

- preempt: it gives its blocks back and computes its tokens again later.
- swap: its KV moves to host memory and back, where that is cheaper than computing it again (or the cost is unknown)
  and the host has room; else as above.
- reject: it ends with `overloaded`. For those who would rather fail early than be slow.
"""

from __future__ import annotations

from enum import Enum

from inferengine.core.executor import Capacity
from inferengine.core.kv_cache.swap import SwapSpace
from inferengine.core.sequence import Sequence


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    REJECT = "reject"


PREEMPTION_POLICIES = ("preempt", "swap", "reject")


def choose_preemption_mode(policy: str, sequence: Sequence, swap: SwapSpace, capacity: Capacity) -> PreemptionMode:
    """How this victim makes room."""
    if policy == "reject":
        return PreemptionMode.REJECT
    gathers = sequence.request.pooling == "mean"  # what it has gathered so far lies with its slot, not in its blocks
    if policy == "swap" and sequence.num_computed and not gathers and swap.has_room(sequence):
        num_blocks = sum(len(table) for table in sequence.block_tables)
        swap_s = 2 * num_blocks * capacity.swap_block_s  # there and back
        recompute_s = sequence.num_computed * capacity.prefill_token_s
        if swap_s == 0.0 or recompute_s == 0.0 or swap_s < recompute_s:
            return PreemptionMode.SWAP
    return PreemptionMode.RECOMPUTE
