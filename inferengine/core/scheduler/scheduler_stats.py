"""Counters and gauges of the scheduler: plain numbers, written by the loop, read by any thread.

Percentiles and rates are computed by the readers.
"""

from __future__ import annotations

from dataclasses import dataclass


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
