"""Measures a loaded model by running steps over a small cache: the memory of the largest step, the magnitudes of an FP8
cache, and how long swapping and prefill take. From this and the free memory follows the size of the KV cache."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from inferengine.core.executor import BlockUpdates, KVGroup
from inferengine.executor.cuda_graphs import MixedShape
from inferengine.executor.draft_model import read_draft_config, target_kv_bytes
from inferengine.executor.memory.kv_cache import SAMPLE_TOKENS, sample_tokens, set_scales
from inferengine.executor.memory.plan import (
    cache_settings,
    free_host_bytes,
    heaviest,
    held_budget,
    host_budget_bytes,
    make_plan,
    plan_groups,
    state_bytes,
)
from inferengine.executor.warm_up import StepRunner, compile_kernels, prompt_plan, steps_of_each_class
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.parallel import Communicator

SWAP_SAMPLE_TOKENS = 64  # of the prompt that the time per prefill token is measured with
LAUNCHED_TOKENS, LAUNCHED_TIMES = 64, 4  # of the prompt that the time to launch a step is measured with


MOST_SHAPES = 256  # of steps with prompts to capture: more than there are


class MeasuredRunner(StepRunner, Protocol):
    """An executor whose cache may be replaced: before it serves."""

    whole: DecoderConfig  # of the model, of which `config` is this rank's part
    communicator: Communicator | None  # to other ranks

    def allocate(self, groups: list[KVGroup], max_model_len: int, kv_dtype: torch.dtype | None = None) -> None:
        """Allocate a KV cache and the slots. `kv_dtype`: of the cache, where it is not the configured one."""
        ...

    def release(self) -> None:
        """Give back the KV cache and the slots."""
        ...


class CacheSize(NamedTuple):
    """How the KV cache's memory is divided, and the shapes of steps with prompts that are captured as CUDA graphs."""

    groups: list[KVGroup]
    prompt_shapes: list[MixedShape]


def size_cache(runner: MeasuredRunner, max_model_len: int) -> CacheSize:
    """Decide the number of blocks of each KV group; on the way, measure the scales of an FP8 cache and set them.

    Raises DoesNotFit where not even one sequence has room.
    """
    settings, config = runner.settings, heaviest(runner.settings).divide(runner.whole)
    kv_dtype = settings.kv_dtype(config)
    if kv_dtype != settings.compute_dtype(config):
        _set_kv_scales(runner, max_model_len)
    shapes: list[MixedShape] = []
    if runner.device.type == "cpu":
        states = state_bytes(config, settings, 2 * (settings.max_num_seqs + 1) + settings.num_snapshots)
        free = free_host_bytes() // settings.tensor_parallel - states  # a step keeps what it overwrites
        budget = host_budget_bytes(max(0, free), settings.memory_fraction)
    else:
        step, launch_s = _measure_steps(runner, max_model_len)
        free, total = torch.cuda.mem_get_info(runner.device)
        plan = make_plan(settings, total, launch_s)
        shapes = plan.prompt_shapes
        budget = held_budget(plan, settings.memory_fraction, total=total, free=free, step=step)
    if runner.communicator is not None:
        budget, shapes = _agree(runner.communicator, budget, shapes, runner.device)
    if settings.draft_folder is not None:
        draft = read_draft_config(settings.draft_folder, runner.whole, max_model_len)
        budget = target_kv_bytes(budget, config, draft)
    cache = cache_settings(settings, max_model_len)
    return CacheSize(plan_groups(config, cache, kv_dtype, budget), shapes)


def swap_times(runner: StepRunner) -> tuple[float, float]:
    """Measure the seconds to move one block of all layers between host and device, and to compute a prompt token."""
    layers = list(zip(runner.kv.layers, runner.kv.host_layers, strict=True))
    begin = time.perf_counter()
    for layer, host in layers:
        host[:1].copy_(layer[-1:])
        layer[-1:].copy_(host[:1])
    block_s = (time.perf_counter() - begin) / 2
    count = min(SWAP_SAMPLE_TOKENS, runner.settings.max_num_batched_tokens, runner.slots.tokens.shape[1] - 1)
    plan = prompt_plan(runner, count)
    runner.execute(plan).result()
    begin = time.perf_counter()
    runner.execute(plan).result()
    return block_s, (time.perf_counter() - begin) / count


def _set_kv_scales(runner: MeasuredRunner, max_model_len: int) -> None:
    """Run a prompt through the model with a cache of the model's own number format, and set the scales of the FP8 cache
    from the magnitudes that it leaves there."""
    settings, config = runner.settings, runner.config
    count = max(1, min(SAMPLE_TOKENS, settings.max_num_batched_tokens, max_model_len - 1))
    blocks = list(range(-(-count // settings.block_size)))
    groups = [KVGroup(len(blocks), window) for window in config.group_windows]
    runner.allocate(groups, max_model_len, settings.compute_dtype(config))
    plan, slot = prompt_plan(runner, count), runner.slots.num_slots
    tokens = sample_tokens(config.vocab_size, count)
    plan = plan._replace(
        admitted=[plan.admitted[0]._replace(token_ids=tokens)],
        block_updates=[BlockUpdates([slot] * len(blocks), blocks, blocks) for _ in groups],
    )
    runner.execute(plan).result()
    set_scales(runner.model, config, _largest(runner))
    runner.release()


def _agree(
    communicator: Communicator, budget: int, shapes: list[MixedShape], device: torch.device
) -> tuple[int, list[MixedShape]]:
    """Return the least budget of all ranks, and the shapes that all of them would capture: ranks must run each step
    alike."""
    codes = [shape.decodes << 32 | shape.prompt_tokens for shape in shapes]
    row = torch.full((1 + MOST_SHAPES,), -1, dtype=torch.int64)
    row[: 1 + len(codes)] = torch.tensor([budget, *codes])
    rows = communicator.all_gather(row.to(device)).tolist()
    common = set.intersection(*(set(found[1:]) for found in rows))
    agreed = [shape for shape, code in zip(shapes, codes, strict=True) if code in common]
    return min(found[0] for found in rows), agreed


def _largest(runner: MeasuredRunner) -> list[tuple[float, float]]:
    """Return the largest key and value of each layer, over the heads of all ranks."""
    found = runner.kv.magnitudes()
    if runner.communicator is None:
        return found
    most = runner.communicator.all_gather(torch.tensor(found, device=runner.device)).amax(0)
    return [(float(key), float(value)) for key, value in most.tolist()]


def _measure_steps(runner: MeasuredRunner, max_model_len: int) -> tuple[int, float]:
    """Measure, on CUDA, the bytes that the largest step needs beside weights and cache, slots included, and the host's
    seconds to launch a step kernel by kernel: by running steps over a cache that is only the scratch block."""
    torch.cuda.synchronize(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.allocate([KVGroup(0, window) for window in runner.config.group_windows], max_model_len)
    settings = runner.settings
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    largest = prompt_plan(runner, settings.max_num_batched_tokens // rows, rows)
    # All at once: most kernels of warm-up are the same over this cache, and would else be compiled after the largest
    # step's, which few processes compile.
    compile_kernels([lambda: runner.execute(largest), *steps_of_each_class(runner)], runner.model)
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.execute(largest).result()
    peak = torch.cuda.max_memory_allocated(runner.device) - before
    launch_s = launch_time(runner) if settings.cuda_graphs else 0.0
    runner.release()
    torch.cuda.empty_cache()
    return peak, launch_s


def launch_time(runner: StepRunner) -> float:
    """Measure the host's seconds to launch a step of a small prompt kernel by kernel: the least of some, of which the
    first loads kernels."""
    plan = prompt_plan(runner, LAUNCHED_TOKENS)
    seconds = []
    for _ in range(LAUNCHED_TIMES):
        begin = time.perf_counter()
        draws = runner.execute(plan)
        seconds.append(time.perf_counter() - begin)
        draws.result()
    return min(seconds)
