"""Checks whether a model fits into the free memory, before any of it is read.

Each layer is packed, or rounded, before the next one is read, so loading needs hardly more than what is packed. Only
the experts of a mixture are all there in the number format that the engine computes in before the first is rounded. The
checkpoint's files do not count: they are mapped, and the kernel can reclaim those pages. A device needs the same of its
own memory; a host that loads for a device needs almost nothing.

Only what cannot work is refused: the smallest known figure is compared with the free memory. Packing may halve fp32
weights on a CPU, for example. Swap is not counted; `engine.check_memory = false` allows its use.
"""

from __future__ import annotations

import torch

from inferengine.errors import ConfigError, DoesNotFit
from inferengine.executor.draft_model import read_draft_config, target_kv_bytes
from inferengine.executor.memory.plan import (
    GIB,
    MemoryPlan,
    block_bytes,
    device_budget_bytes,
    free_host_bytes,
    heaviest,
    host_budget_bytes,
    plan_groups,
    resident_bytes,
    weight_sizes,
)
from inferengine.executor.settings import ExecutorSettings
from inferengine.models import registry
from inferengine.models.hf_config import read_json
from inferengine.quantization.checkpoints import layout_of

REMEDY = (
    "take a smaller model or number format, or a machine with more memory; 'inferengine plan-memory MODEL' shows what "
    "it takes, and engine.check_memory = false loads it all the same"
)


def require_fit(settings: ExecutorSettings, plan: MemoryPlan, free_bytes: int | None = None) -> None:
    """Raise DoesNotFit where the model cannot be loaded and served in the free memory. `free_bytes` None: measure
    it."""
    if free_bytes is None:
        free_bytes = free_device_bytes(settings.device)
        if settings.device.type == "cpu":  # which all ranks share
            free_bytes //= settings.tensor_parallel
    if reason := misfit(settings, plan, free_bytes):
        raise DoesNotFit(f"{settings.folder.name} does not fit: {reason}: {REMEDY}")


def free_device_bytes(device: torch.device) -> int:
    """Measure the bytes that can be allocated now."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()


def misfit(settings: ExecutorSettings, plan: MemoryPlan, free_bytes: int) -> str:
    """Return why the model cannot be loaded and served; empty: no reason is known."""
    loading = loading_bytes(settings, plan)
    if loading > free_bytes:
        return f"its weights take {loading / GIB:.1f} GiB while they are loaded, and {free_bytes / GIB:.1f} are free"
    if settings.device.type == "cuda":
        if plan.groups and not plan.fits:
            return (
                f"a KV cache of {plan.bytes_of_blocks / GIB:.1f} GiB is asked for (cache.num_blocks), and weights, "
                f"activations and graphs leave {max(0, plan.left) / GIB:.1f}"
            )
        return "" if plan.groups else _misfit_of_budget(settings, plan)
    left_bytes = free_bytes - plan.states - resident_bytes(settings, plan.weights + plan.draft_weights)
    return _misfit_of_host_cache(settings, plan, left_bytes)


def loading_bytes(settings: ExecutorSettings, plan: MemoryPlan) -> int:
    """Return the most bytes that the weights take while they are loaded, but for the numbers of the layer that is being
    rounded. Experts that the engine itself quantizes are all loaded before the first is rounded."""
    config, _ = registry.read_model_config(settings.folder)
    values = read_json(settings.folder / "config.json")
    if settings.quantization == "none" or layout_of(values) is not None:
        return plan.weights
    dtype, shard = settings.compute_dtype(config), heaviest(settings)
    numbers, codes = (
        weight_sizes(config, values, dtype, scheme, shard).experts for scheme in ("none", settings.quantization)
    )
    return plan.weights + numbers - codes


def _misfit_of_budget(settings: ExecutorSettings, plan: MemoryPlan) -> str:
    taken = plan.weights + plan.draft_weights + plan.activations + plan.slots + plan.graphs + plan.context + plan.states
    budget = device_budget_bytes(int(torch.cuda.mem_get_info(settings.device)[1]), settings.memory_fraction, 0)
    return (
        f"{taken / GIB:.1f} GiB of weights, activations and graphs leave no room for a sequence in the "
        f"{budget / GIB:.1f} GiB that cache.memory_fraction allows"
    )


def _misfit_of_host_cache(settings: ExecutorSettings, plan: MemoryPlan, left_bytes: int) -> str:
    """Return why the KV cache of a CPU does not fit into what the weights leave; empty: it fits."""
    whole, _ = registry.read_model_config(settings.folder)
    config = heaviest(settings).divide(whole)
    kv_dtype = settings.kv_dtype(config)
    budget = host_budget_bytes(max(0, left_bytes), settings.memory_fraction)
    if settings.draft_folder is not None:
        draft = read_draft_config(settings.draft_folder, whole, plan.cache.max_model_len)
        budget = target_kv_bytes(budget, config, draft)
    try:
        groups = plan_groups(config, plan.cache, kv_dtype, budget)
    except ConfigError:
        return (
            f"its weights leave {left_bytes / GIB:.2f} GiB, and the KV cache's share of that (cache.memory_fraction) "
            "holds no sequence"
        )
    size = plan.cache.block_size
    taken = sum(group.num_blocks * block_bytes(config, index, size, kv_dtype) for index, group in enumerate(groups))
    if taken > left_bytes:
        key = " (cache.num_blocks)" if plan.cache.num_blocks else ""
        return f"a KV cache of {taken / GIB:.1f} GiB is asked for{key}, and its weights leave {left_bytes / GIB:.1f}"
    return ""
