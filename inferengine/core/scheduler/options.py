"""SchedulerOptions: everything about scheduling that can be chosen. Plain values; configuration is made from them."""

from __future__ import annotations

from dataclasses import dataclass


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
