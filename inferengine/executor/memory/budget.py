"""The number of KV blocks: as configured, or what fits into the memory that is free once the weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from inferengine.core.executor import KVGroup
from inferengine.errors import DoesNotFit
from inferengine.layers.decoder_config import DecoderConfig

GIB = 1 << 30
DEFAULT_CPU_SHARE = 0.25  # of free memory
DEFAULT_CPU_LIMIT_BYTES = GIB  # a model on a CPU is bound by arithmetic long before it needs more
DEFAULT_CUDA_SHARE = 0.92  # of all memory, weights and activations included
TYPICAL_TOKENS = 4096  # assumed length of a sequence, for dividing the memory among KV groups


class CacheSettings(NamedTuple):
    """The part of the configuration that decides the cache's size. 0: decided by `plan_groups`."""

    block_size: int
    num_blocks: int
    memory_fraction: float
    swap_bytes: int
    max_num_seqs: int
    max_model_len: int
    max_chunk: int  # most tokens of one sequence in a step
    asked_model_len: int = 0  # the configured length: room for one such sequence is kept, where it fits


def block_bytes(config: DecoderConfig, group: int, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers of a group."""
    return block_size * config.kv_bytes_per_token(group, dtype.itemsize)


def plan_groups(config: DecoderConfig, settings: CacheSettings, dtype: torch.dtype, budget_bytes: int) -> list[KVGroup]:
    """Divide `budget_bytes` into blocks per KV group, no more than all slots could ever use.

    Raises DoesNotFit when not even one sequence of one step fits.
    """
    windows = config.group_windows
    size = settings.block_size
    longest = [_blocks_of(window, settings.max_model_len, settings) for window in windows]
    if settings.num_blocks:
        counts = [settings.num_blocks] * len(windows)
    else:
        typical = min(TYPICAL_TOKENS, settings.max_model_len)
        costs = [block_bytes(config, group, size, dtype) for group in range(len(windows))]
        share, once = [held_blocks(window, typical, size) for window in windows], _blocks_once(windows, settings)
        rest = budget_bytes - sum(count * cost for count, cost in zip(once, costs, strict=True))
        if rest < sum(count * cost for count, cost in zip(share, costs, strict=True)):  # hardly one sequence
            share, once, rest = longest, [0] * len(windows), budget_bytes
        whole = sum(count * cost for count, cost in zip(share, costs, strict=True))
        units = rest / whole
        one = [held_blocks(window, settings.asked_model_len, size) for window in windows]
        one_bytes = sum(count * cost for count, cost in zip(one, costs, strict=True))
        if one_bytes <= rest and any(int(units * each) < least for each, least in zip(share, one, strict=True)):
            units = (rest - one_bytes) / whole  # room for that one first, the rest for typical ones
        else:
            one = [0] * len(windows)
        counts = [
            min(int(units * each) + least + extra, most * settings.max_num_seqs)
            for each, least, extra, most in zip(share, one, once, longest, strict=True)
        ]
    if min(counts) < 2:
        raise DoesNotFit(
            f"{budget_bytes / GIB:.2f} GiB for the KV cache hold no sequence: raise cache.memory_fraction, or set "
            "cache.num_blocks",
            "cache.memory_fraction",
        )
    host = [0] * len(windows)
    if settings.swap_bytes:
        costs = [count * block_bytes(config, group, size, dtype) for group, count in enumerate(counts)]
        host = [int(count * settings.swap_bytes / sum(costs)) for count in counts]
    return [KVGroup(count, window, num_host) for count, window, num_host in zip(counts, windows, host, strict=True)]


def sequences_at_once(groups: list[KVGroup], num_tokens: int, settings: CacheSettings) -> int:
    """Return how many sequences of this length the groups hold at once, while prompts are computed in chunks."""
    once = _blocks_once([group.window for group in groups], settings)
    return min(
        max(0, group.num_blocks - extra) // held_blocks(group.window, num_tokens, settings.block_size)
        for group, extra in zip(groups, once, strict=True)
    )


def held_blocks(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return the blocks that a sequence of this length holds between steps; those left of a window are freed."""
    needed = -(-num_tokens // block_size)
    return needed if window is None else min(needed, -(-window // block_size) + 1)


def _blocks_once(windows: Sequence[int | None], settings: CacheSettings) -> list[int]:
    """Further blocks for all sequences together: those of a step's prompt chunks, until their windows have moved on."""
    return [0 if window is None else -(-settings.max_chunk // settings.block_size) for window in windows]


def device_budget_bytes(total: int, memory_fraction: float, taken: int) -> int:
    """Return what a CUDA device's share leaves for the KV cache, where everything else takes `taken` bytes."""
    return int(total * (memory_fraction or DEFAULT_CUDA_SHARE)) - taken


def host_budget_bytes(free: int, memory_fraction: float) -> int:
    """Return the part of a host's free memory that the KV cache may have."""
    if memory_fraction:
        return int(free * memory_fraction)
    return min(int(free * DEFAULT_CPU_SHARE), DEFAULT_CPU_LIMIT_BYTES)


def _blocks_of(window: int | None, num_tokens: int, settings: CacheSettings) -> int:
    """The most blocks that a sequence of this length holds, by the scheduler's own rule."""
    needed = -(-num_tokens // settings.block_size)
    return needed if window is None else min(needed, -(-(window + settings.max_chunk) // settings.block_size) + 1)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping, on this machine and in the control groups (version 2) of
    this process. Page cache that the kernel can reclaim counts as free. `root`: the folder of /proc and /sys, for
    tests."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *(left for folder in _control_groups(root) if (left := _left_in_group(folder)) is not None)])


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's control group and of those above it that are visible here."""
    top = root / "sys/fs/cgroup"
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [top]
    own = next((entry.removeprefix("0::").strip("/") for entry in entries if entry.startswith("0::")), "")
    folder = top / own
    return [folder, *(above for above in folder.parents if above.is_relative_to(top))]


def _left_in_group(folder: Path) -> int | None:
    """The bytes left in a control group; None: it has no limit. Page cache counts as used there, but can be
    reclaimed."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        entries = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    stat = dict(entry.split() for entry in entries)
    return int(limit) - used + int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
