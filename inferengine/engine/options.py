"""Scheduler options and admission limits, from the configuration and the measured capacity."""

from __future__ import annotations

from inferengine.config import Config
from inferengine.core.executor import Capacity
from inferengine.core.scheduler.queues import AdmissionLimits
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.speculation import speculation_method
from inferengine.errors import ConfigError

# With how many running sequences draft tokens are still proposed, by whether speculation.method is `auto`.
MAX_RUNNING = {True: 2, False: 16}
# The default of scheduler.itl_target_ms: docs/performance.md says how these were chosen.
ITL_TARGET_S = 0.060
ITL_TARGET_FACTOR = 3.0


def scheduler_options(config: Config, capacity: Capacity, *, is_service: bool = True) -> SchedulerOptions:
    """Return the options of [scheduler], [cache] and [speculation]. `is_service` false: nobody reads tokens as they
    come, so by default no step is kept short for them. Raises ConfigError where two keys contradict."""
    scheduler, cache = config.scheduler, config.cache
    if scheduler.preemption == "swap" and not cache.swap_gib:
        raise ConfigError("cache.swap_gib", "must be above 0 where scheduler.preemption is swap")
    if scheduler.preemption == "swap" and capacity.has_states:
        raise ConfigError("scheduler.preemption", "the model keeps states, which are not swapped: set it to preempt")
    contiguous = cache.layout == "contiguous"
    if contiguous and max(group.num_blocks for group in capacity.groups) * capacity.block_size < capacity.max_model_len:
        raise ConfigError("cache.layout", "contiguous needs room for one sequence of model.max_model_len tokens")
    method = speculation_method(config.speculation.method, capacity)
    itl_target_s, itl_target_factor = scheduler.itl_target_ms / 1e3, 0.0
    if itl_target_s < 0:
        itl_target_s, itl_target_factor = (ITL_TARGET_S, ITL_TARGET_FACTOR) if is_service else (0.0, 0.0)
    return SchedulerOptions(
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_num_seqs=capacity.max_num_seqs,
        policy=scheduler.policy,
        chunked_prefill=scheduler.chunked_prefill and capacity.is_causal,
        prefill_chunk=scheduler.prefill_chunk,
        max_num_decodes=scheduler.max_num_decodes,
        itl_target_s=itl_target_s,
        itl_target_factor=itl_target_factor,
        prefix_caching=cache.prefix_caching and not contiguous and capacity.is_causal,
        eviction=cache.eviction,
        preemption=scheduler.preemption,
        watermark=cache.watermark,
        kv_events=cache.events,
        contiguous=contiguous,
        max_drafts=0 if method == "none" else config.speculation.max_drafts,
        max_running_to_force=capacity.max_forced_rows,
        max_running_to_draft=max_running_to_draft(config),
    )


def unused_features(capacity: Capacity) -> tuple[str, ...]:
    """Return what the engine has and the model cannot use: some of it where it keeps a state of every request, more
    where its tokens see later ones."""
    if not capacity.is_causal:
        unused = ("generation", "prefix_caching", "speculation", "swap")
        return ("embeddings", *unused) if capacity.scores else unused
    if not capacity.has_states:
        return ()
    return ("speculation", "swap") if capacity.num_snapshots else ("prefix_caching", "speculation", "swap")


def max_running_to_draft(config: Config) -> int:
    """Return with how many running sequences draft tokens are still proposed. `auto` must never cost speed: with four
    sequences on a CPU a draft model gave 0.95 to 1.24 times the tokens, depending on their text, so it stops before."""
    speculation = config.speculation
    return speculation.max_running or MAX_RUNNING[speculation.method == "auto"]


def admission_limits(config: Config, capacity: Capacity) -> AdmissionLimits:
    """Return limits that the intake checks before it accepts a request."""
    full = [group.num_blocks for group in capacity.groups if group.window is None]
    blocks = min(full or [group.num_blocks for group in capacity.groups])
    return AdmissionLimits(
        max_model_len=capacity.max_model_len,
        num_kv_tokens=blocks * capacity.block_size,
        max_queued_requests=config.scheduler.max_queued_requests,
        max_queued_tokens=config.scheduler.max_queued_tokens,
        max_tenant_requests=config.scheduler.max_tenant_requests,
    )
