"""MemoryPlan: how a device's memory is divided for a model, from its config.json alone. The engine prints it and keeps
to it.

The number of KV blocks is as configured, or what fits into the memory that is free once the weights are loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inferengine.config import CPU_CACHE_SHARE
from inferengine.core.executor import KVGroup
from inferengine.errors import ConfigError, DoesNotFit
from inferengine.executor.cuda_graphs import MixedShape, graphs_to_capture, launches_s, shapes_to_capture, shared_sizes
from inferengine.executor.draft_model import read_draft_config, target_kv_bytes
from inferengine.executor.memory.prefix_groups import shares_prefixes
from inferengine.executor.parallel.communicator import inbox_bytes
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.slots import Slots
from inferengine.executor.tools.device_peaks import device_peaks
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.latent import UpProjection
from inferengine.layers.linear import Linear
from inferengine.layers.moe import ExpertLinear
from inferengine.layers.parallel import Shard
from inferengine.models import registry
from inferengine.models.hf_config import read_json
from inferengine.models.parallel import divide
from inferengine.quantization import gguf
from inferengine.quantization.apply import quantize
from inferengine.quantization.checkpoints import layout_of, mxfp4
from inferengine.quantization.schemes import EIGHT_BIT_PRODUCTS, bytes_per_weight

logger = logging.getLogger(__name__)

GIB = 1 << 30
CUDA_CONTEXT_BYTES = 600 * (1 << 20)  # driver, kernels and libraries of one process, measured on Hopper
COMMUNICATOR_BYTES = GIB  # NCCL's buffers between a device and its peers, as measured with two H200s
WHOLE = Shard()
CONTEXTS = (1024, 4096, 8192, 32768, 131072)
PROMPT_SHARE = 0.7  # of the data sheet's arithmetic that steps of prompts reach: 710 TFLOP/s of 989 on an H200
GRAPH_BYTES = 4 * (1 << 20)  # nodes of one captured step; its buffers are shared by all
DEFAULT_CPU_LIMIT_BYTES = GIB  # a model on a CPU is bound by arithmetic long before it needs more
DEFAULT_CUDA_SHARE = 0.92  # of all memory, weights and activations included
SMALL_HIDDEN = 1024  # up to which hidden size steps of embedding models wait for their launches
TYPICAL_TOKENS = 4096  # assumed length of a sequence, for dividing the memory among KV groups
SNAPSHOTS_SHARE = 1 / 16  # of the device, for snapshots of states
MOST_SNAPSHOTS = 4096  # more than there are prefixes in use, of models with small states
STATES_SHARE = 0.125  # of the device, for the states of all slots: with more, fewer requests run at once
EXPECTED_SHARE = 0.98  # of the planned cache: a warning is due for less, since allocators round and keep buffers


class CacheSettings(NamedTuple):
    """The part of the configuration that decides the cache's size. 0: decided by `plan_groups`."""

    block_size: int
    num_blocks: int
    memory_fraction: float
    swap_bytes: int
    max_num_seqs: int
    max_model_len: int
    max_chunk: int  # most tokens of one sequence in a step
    configured_model_len: int = 0  # model.max_model_len: room for one such sequence is kept, where it fits


class MemoryPlan(NamedTuple):
    """Bytes. `kv_bytes_per_token` is of full-attention layers, `window_bytes_per_sequence` of all sliding ones of
    a long sequence. `groups` is how the engine divides its part of `kv_budget`; none where the rest does not fit."""

    weights: int
    draft_weights: int
    activations: int
    slots: int  # of running requests: their tokens and block tables
    graphs: int
    context: int
    kv_bytes_per_token: int
    window_bytes_per_sequence: int
    kv_budget: int  # a draft model's part among it; negative where the rest does not fit
    groups: list[KVGroup]
    cache: CacheSettings
    prompt_shapes: list[MixedShape]  # of the steps with prompts to capture; none for a CPU
    bytes_of_blocks: int = 0  # of all KV blocks, a draft model's among them
    left: int = 0  # what all else leaves of the device: more than kv_budget, which cache.memory_fraction limits
    states: int = 0  # of running requests, that no block holds
    num_snapshots: int = 0  # of states, for prefixes
    snapshots: int = 0

    @property
    def fits(self) -> bool:
        """Whether the model and its KV cache fit, with one sequence at least."""
        return bool(self.groups) and (not self.cache.num_blocks or self.bytes_of_blocks <= self.left)

    def sequences(self, num_tokens: int) -> int:
        """Return how many sequences of this length the KV cache holds at once."""
        if not self.groups:
            return 0
        count = sequences_at_once(self.groups, num_tokens, self.cache)
        return min(count, self.cache.max_num_seqs) if self.states else count

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit into full-attention layers; without such layers, into the smallest group."""
        full = [group.num_blocks for group in self.groups if group.window is None]
        return min(full or [group.num_blocks for group in self.groups] or [0]) * self.cache.block_size


class WeightBytes(NamedTuple):
    """The bytes of a model's parameters, and those of its experts among them."""

    whole: int
    experts: int


def weight_bytes(
    config: DecoderConfig,
    values: dict[str, object],
    dtype: torch.dtype,
    quantization: str = "none",
    shard: Shard = WHOLE,
) -> int:
    """Count the bytes of all parameters; arguments as of `weight_sizes`."""
    return weight_sizes(config, values, dtype, quantization, shard).whole


def weight_sizes(
    config: DecoderConfig,
    values: dict[str, object],
    dtype: torch.dtype,
    quantization: str = "none",
    shard: Shard = WHOLE,
) -> WeightBytes:
    """Count the bytes of all parameters on a model built without memory; shared ones count once. `quantization` is the
    configured scheme; that of a quantized checkpoint is in `values`, its config.json. `config` is the whole
    model's, of which a rank holds the part `shard`."""
    with torch.device("meta"):
        model = registry.family(values).build(REFERENCE, shard.divide(config))
        divide(model, config, shard)
    layout = layout_of(values)
    scheme = quantization if layout is None else layout.scheme
    if scheme == gguf.METHOD:
        meta, targets = torch.device("meta"), registry.family(values).weight_map(config).targets
        quantize(model, REFERENCE, values, targets, scheme="none", device=meta, dtype=dtype)
    projections = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    stored = {module: getattr(module, "source", None) for module in model.modules()}
    sources = {module: source.num_bytes() for module, source in stored.items() if source is not None}
    sizes = {id(parameter): float(parameter.numel() * dtype.itemsize) for parameter in model.parameters()}
    if scheme not in ("none", gguf.METHOD):
        for module in model.modules():
            is_mxfp4 = scheme == mxfp4.NAME  # of experts alone
            if isinstance(module, UpProjection):  # held as numbers, whatever is stored
                continue
            if isinstance(module, ExpertLinear) or (isinstance(module, Linear) and not is_mxfp4):
                assert module.weight is not None  # nothing is packed
                sizes[id(module.weight)] = module.weight.numel() * bytes_per_weight(scheme, module.in_features)
    experts = [sources[each] if each.weight is None else sizes[id(each.weight)] for each in projections]
    return WeightBytes(int(sum(sizes.values())) + sum(sources.values()), int(sum(experts)))


def activation_bytes(config: DecoderConfig, num_tokens: int, num_seqs: int, dtype: torch.dtype) -> int:
    """Return an upper bound of what the largest step allocates: its widest layer a few times over, and the logits."""
    layers = range(config.num_layers)
    widest = max(
        2 * max(config.intermediate_size_of(layer) for layer in layers),
        *(
            config.num_heads * kv.head_dim + 2 * kv.num_heads * kv.head_dim
            for kv in map(config.kv_shape, config.windows)
        ),
    )
    if config.layer_inputs is not None:  # of all layers: what the table has, and a projection
        widest += 2 * config.num_layers * config.layer_inputs.size
    if config.moe is not None:  # what each chosen expert has inside, and what it gives
        widest += config.moe.num_chosen * (config.moe.intermediate_size + config.hidden_size)
    states = 3 * num_seqs * config.state_bytes(dtype.itemsize) // max(1, config.num_layers)  # one layer's, in copies
    hidden = num_tokens * (widest + 4 * config.hidden_size) * 2 * dtype.itemsize
    return hidden + states + num_seqs * config.vocab_size * 12


def with_whole_prompts(settings: ExecutorSettings, config: DecoderConfig) -> ExecutorSettings:
    """Adapt the settings to a model whose tokens see later ones: a step has room for the longest prompt. Raises
    ConfigError for what has no meaning there."""
    if config.is_causal:
        return settings
    why = "the model's tokens see later ones: it makes embeddings and"
    if settings.draft_folder is not None:
        raise ConfigError("speculation.draft_model", f"{why} drafts no tokens: set speculation.method to none")
    if settings.cache_dtype == "fp8":
        raise ConfigError("cache.dtype", f"{why} reads no cache: set it to auto")
    if config.scores and settings.pooling not in ("auto", "cls"):
        raise ConfigError("model.pooling", "the model scores pairs by the first token's state: set it to auto")
    small = config.hidden_size <= SMALL_HIDDEN
    tokens = settings.whole_prompt_tokens if small else settings.max_num_batched_tokens
    return replace(settings, max_num_batched_tokens=max(tokens, context_length(settings, config)))


def with_states(settings: ExecutorSettings, config: DecoderConfig, device_bytes: int) -> ExecutorSettings:
    """Adapt the settings to a model that keeps states of running requests: so many run at once that their states take
    STATES_SHARE of the device, and so many snapshots are kept that they take what is configured. Raises ConfigError for
    what cannot be done with states."""
    if not config.states:
        return settings
    why = "the model keeps a state of every request that is of its latest token alone (convolutions, recurrences)"
    if settings.draft_folder is not None:
        raise ConfigError("speculation.draft_model", f"{why} and cannot be taken back: set speculation.method to none")
    if settings.swap_bytes:
        raise ConfigError("scheduler.preemption", f"{why}, which is not swapped: set it to preempt")
    one = state_bytes(config, settings, 1)
    most = int(device_bytes * STATES_SHARE) // one
    if settings.prefix_caching:
        limit = settings.snapshot_bytes or int(device_bytes * SNAPSHOTS_SHARE)
        if settings.device.type == "cpu" and not settings.snapshot_bytes:
            limit = min(limit, DEFAULT_CPU_LIMIT_BYTES)
        settings = replace(settings, num_snapshots=min(limit // one, MOST_SNAPSHOTS))
    if most >= settings.max_num_seqs:
        return settings
    logger.warning(
        "engine.max_num_seqs is %d instead of %d: the states of so many requests take %.0f %% of the device",
        max(1, most),
        settings.max_num_seqs,
        100 * STATES_SHARE,
    )
    return replace(settings, max_num_seqs=max(1, most))


def state_bytes(config: DecoderConfig, settings: ExecutorSettings, num_rows: int) -> int:
    """Return the bytes of the states of so many slots or snapshots."""
    return num_rows * config.state_bytes(settings.compute_dtype(config).itemsize)


def slot_bytes(config: DecoderConfig, cache: CacheSettings) -> int:
    """Return the bytes of the state of running requests."""
    slots = Slots(
        num_slots=cache.max_num_seqs,
        max_model_len=cache.max_model_len,
        block_size=cache.block_size,
        group_blocks=[0 for _ in config.group_windows],
        vocab_size=config.vocab_size,
        device=torch.device("meta"),
    )
    return slots.num_bytes


def graph_bytes(config: DecoderConfig, settings: ExecutorSettings, dtype: torch.dtype, shapes: list[MixedShape]) -> int:
    """Estimate the bytes of the CUDA graphs: their nodes, and the buffers of the largest step, which all of them share.
    `shapes` are those of the steps with prompts."""
    num_graphs = len(graphs_to_capture(settings.max_num_seqs)) + len(shapes)
    if shares_prefixes(settings, config):
        num_graphs += len(shared_sizes(settings.max_num_seqs))
    num_tokens = max([settings.max_num_seqs, *(shape.num_tokens for shape in shapes)])
    num_rows = max([settings.max_num_seqs, *(shape.num_rows for shape in shapes)])
    return num_graphs * GRAPH_BYTES + activation_bytes(config, num_tokens, num_rows, dtype)


def _token_s(config: DecoderConfig, values: dict[str, object], settings: ExecutorSettings, dtype: torch.dtype) -> float:
    """Return estimated device seconds per token of a step; 0 without a CUDA device here, which keeps every shape."""
    if not torch.cuda.is_available():
        return 0.0
    values_in_floats = {**values, "quantization_config": None, "compression_config": None}
    whole = weight_bytes(config, values_in_floats, dtype, shard=heaviest(settings))
    found = device_peaks(settings.device, dtype, weight_bytes=whole, tflops=settings.peak_tflops)
    if found is None:
        return 0.0
    peaks, faster = found
    layout = layout_of(values)
    scheme = settings.quantization if layout is None else layout.scheme
    tables = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    idle = (1.0 - config.chosen_share) * config.num_expert_weights + config.num_layer_input_weights
    operations = 2.0 * (whole // dtype.itemsize - tables / settings.tensor_parallel - idle)
    rate = PROMPT_SHARE * peaks.operations_per_s * (faster if scheme in EIGHT_BIT_PRODUCTS else 1.0)
    return operations / rate


def exchange_bytes(config: DecoderConfig, settings: ExecutorSettings, dtype: torch.dtype) -> int:
    """Return what a CUDA device keeps for exchanges with other ranks."""
    if settings.tensor_parallel == 1:
        return 0
    row_bytes, rows = config.hidden_size * dtype.itemsize, settings.max_num_batched_tokens
    inbox = 0 if settings.deterministic else inbox_bytes(settings.tensor_parallel, row_bytes, rows)
    return COMMUNICATOR_BYTES + inbox


def make_plan(settings: ExecutorSettings, device_bytes: int, launch_s: float | None = None) -> MemoryPlan:
    """Plan a device with `device_bytes`, of which nothing is taken yet: each device of a divided model. `launch_s`: the
    host's seconds to launch a step kernel by kernel, where they were measured. Raises ConfigError."""
    whole, _ = registry.read_model_config(settings.folder)
    config = heaviest(settings).divide(whole)
    values = read_json(settings.folder / "config.json")
    dtype, kv_dtype = settings.compute_dtype(config), settings.kv_dtype(config)
    on_cuda = settings.device.type == "cuda"
    settings = with_whole_prompts(with_states(settings, config, device_bytes), config)
    cache = cache_settings(settings, context_length(settings, config))
    states = state_bytes(config, settings, settings.max_num_seqs + 1)
    snapshots = state_bytes(config, settings, settings.num_snapshots)
    weights = weight_bytes(whole, values, dtype, settings.quantization, heaviest(settings))
    draft, draft_weights = None, 0
    if settings.draft_folder is not None:
        draft = read_draft_config(settings.draft_folder, whole, cache.max_model_len)
        draft_weights = weight_bytes(draft, read_json(settings.draft_folder / "config.json"), dtype)
    activations = activation_bytes(config, settings.max_num_batched_tokens, settings.max_num_seqs, dtype)
    slots, context, graphs = slot_bytes(config, cache), 0, 0
    shapes: list[MixedShape] = []
    if on_cuda:
        context = CUDA_CONTEXT_BYTES + exchange_bytes(config, settings, dtype)
        token_s = _token_s(whole, values, settings, dtype)
        sizes = settings.max_num_seqs, settings.max_num_batched_tokens
        if launch_s is None:
            launch_s = launches_s(whole, settings.tensor_parallel)
        shapes = shapes_to_capture(*sizes, token_s, launch_s)
        if settings.cuda_graphs and config.implementation == "native" and config.is_causal:
            graphs = graph_bytes(config, settings, dtype, shapes)
        taken = weights + draft_weights + activations + slots + states + snapshots + context + graphs
        budget = device_budget_bytes(device_bytes, settings.memory_fraction, taken)
        left = device_bytes - taken
    else:
        rank_bytes = device_bytes // settings.tensor_parallel  # ranks share the host's memory
        rank_bytes -= 2 * states + snapshots  # a step keeps what it overwrites (models/recurrent.py)
        budget = host_budget_bytes(max(0, rank_bytes - weights), settings.memory_fraction)
        left = rank_bytes - resident_bytes(settings, weights + draft_weights)
    full = window_bytes = 0
    for group, window in enumerate(config.group_windows):
        per_token = config.kv_bytes_per_token(group, kv_dtype.itemsize)
        if window is None:
            full += per_token
        else:
            window_bytes += per_token * settings.block_size * held_blocks(window, 1 << 40, settings.block_size)
    own = budget if draft is None else target_kv_bytes(budget, config, draft)
    try:
        groups = plan_groups(config, cache, kv_dtype, own) if own > 0 or cache.num_blocks else []
    except ConfigError:  # not even one sequence
        groups = []
    bytes_of_blocks = sum(
        group.num_blocks * block_bytes(config, index, cache.block_size, kv_dtype) for index, group in enumerate(groups)
    )
    if draft is not None and groups:  # it has as many blocks as the first group, which holds every position
        bytes_of_blocks += groups[0].num_blocks * block_bytes(draft, 0, cache.block_size, kv_dtype)
    return MemoryPlan(
        weights=weights,
        draft_weights=draft_weights,
        activations=activations,
        slots=slots,
        graphs=graphs,
        context=context,
        kv_bytes_per_token=full,
        window_bytes_per_sequence=window_bytes,
        kv_budget=budget,
        groups=groups,
        cache=cache,
        prompt_shapes=shapes,
        bytes_of_blocks=bytes_of_blocks,
        left=left,
        states=states,
        num_snapshots=settings.num_snapshots,
        snapshots=snapshots,
    )


def resident_bytes(settings: ExecutorSettings, weights: int) -> int:
    """Return the fewest bytes that `weights` take once packed on a CPU, which may keep fp32 weights in 16 bits."""
    values = read_json(settings.folder / "config.json")
    float32 = settings.dtype in (None, torch.float32) and settings.quantization == "none" and layout_of(values) is None
    return weights // 2 if float32 else weights


def heaviest(settings: ExecutorSettings) -> Shard:
    """Return the rank that holds the most of a divided model, the first: what is planned for it is planned for all."""
    return Shard(0, settings.tensor_parallel)


def held_budget(plan: MemoryPlan, memory_fraction: float, *, total: int, free: int, step: int) -> int:
    """Return the bytes for the KV cache of a CUDA device once the weights are loaded: as planned, or what is left where
    more is taken than planned. `step`: measured bytes of the largest step, slots included. The planned memory of a
    draft model and of the CUDA graphs, which come later, stays free."""
    taken = total - free + step + plan.graphs + plan.draft_weights
    left = device_budget_bytes(total, memory_fraction, taken)
    if left < EXPECTED_SHARE * plan.kv_budget:
        logger.warning(
            "%.2f GiB are left for the KV cache instead of %.2f: other programs, or adapters, take more than planned",
            left / GIB,
            plan.kv_budget / GIB,
        )
    return min(plan.kv_budget, left)


LONGEST_EMBEDDED = 8192  # tokens of a prompt that is computed in one step, where model.max_model_len is not set


def context_length(settings: ExecutorSettings, config: DecoderConfig) -> int:
    """Return the most tokens of a sequence. Raises ConfigError where the configured length exceeds the model's."""
    wanted = settings.max_model_len
    if wanted > config.max_position:
        raise ConfigError(
            "model.max_model_len", f"the model was made for {config.max_position} tokens; {wanted} are too many"
        )
    return wanted or (config.max_position if config.is_causal else min(config.max_position, LONGEST_EMBEDDED))


def cache_settings(settings: ExecutorSettings, max_model_len: int) -> CacheSettings:
    """Return the part of the settings that decides the size of the cache. Raises ConfigError where the blocks that are
    asked for hold no sequence."""
    if settings.num_blocks == 1:
        raise ConfigError("cache.num_blocks", "one block holds no sequence: ask for at least 2, or 0 for what fits")
    return CacheSettings(
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        memory_fraction=settings.memory_fraction,
        swap_bytes=settings.swap_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_chunk=settings.max_num_batched_tokens if settings.chunked_prefill else max_model_len,
        configured_model_len=settings.max_model_len,
    )


# -- blocks ------------------------------------------------------------------------------------------------------------


def block_bytes(config: DecoderConfig, group: int, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers of a group."""
    return block_size * config.kv_bytes_per_token(group, dtype.itemsize)


def plan_groups(config: DecoderConfig, settings: CacheSettings, dtype: torch.dtype, budget_bytes: int) -> list[KVGroup]:
    """Divide `budget_bytes` into blocks per KV group, no more than all slots could ever use.

    Raises DoesNotFit when not even one sequence of one step fits.
    """
    windows = config.group_windows
    size = settings.block_size
    if settings.num_blocks:
        counts = [settings.num_blocks] * len(windows)
    else:
        costs = [block_bytes(config, group, size, dtype) for group in range(len(windows))]

        def bytes_of(blocks: Sequence[int]) -> int:
            return sum(count * cost for count, cost in zip(blocks, costs, strict=True))

        longest = [_blocks_of(window, settings.max_model_len, settings) for window in windows]
        typical_tokens = min(TYPICAL_TOKENS, settings.max_model_len)
        typical = [held_blocks(window, typical_tokens, size) for window in windows]
        chunks = _chunk_blocks(windows, settings)
        rest = budget_bytes - bytes_of(chunks)
        if rest < bytes_of(typical):  # hardly one sequence
            typical, chunks, rest = longest, [0] * len(windows), budget_bytes
        num_typical = rest / bytes_of(typical)
        configured = [held_blocks(window, settings.configured_model_len, size) for window in windows]
        configured_bytes = bytes_of(configured)
        has_room = all(int(num_typical * each) >= one for each, one in zip(typical, configured, strict=True))
        if has_room or configured_bytes > rest:
            configured = [0] * len(windows)
        else:  # room for that one first, the rest for typical ones
            num_typical = (rest - configured_bytes) / bytes_of(typical)
        counts = [
            min(int(num_typical * each) + one + extra, most * settings.max_num_seqs)
            for each, one, extra, most in zip(typical, configured, chunks, longest, strict=True)
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
    chunks = _chunk_blocks([group.window for group in groups], settings)
    return min(
        max(0, group.num_blocks - extra) // held_blocks(group.window, num_tokens, settings.block_size)
        for group, extra in zip(groups, chunks, strict=True)
    )


def held_blocks(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return the blocks that a sequence of this length holds between steps; those left of a window are freed."""
    needed = -(-num_tokens // block_size)
    return needed if window is None else min(needed, -(-window // block_size) + 1)


def _chunk_blocks(windows: Sequence[int | None], settings: CacheSettings) -> list[int]:
    """Return the further blocks for all sequences together: those of a step's prompt chunks, until their windows have
    moved on."""
    return [0 if window is None else -(-settings.max_chunk // settings.block_size) for window in windows]


def device_budget_bytes(total: int, memory_fraction: float, taken: int) -> int:
    """Return what a CUDA device's budget leaves for the KV cache, where everything else takes `taken` bytes."""
    return int(total * (memory_fraction or DEFAULT_CUDA_SHARE)) - taken


def host_budget_bytes(free: int, memory_fraction: float) -> int:
    """Return the part of a host's free memory that the KV cache may have."""
    if memory_fraction:
        return int(free * memory_fraction)
    return min(int(free * CPU_CACHE_SHARE), DEFAULT_CPU_LIMIT_BYTES)


def _blocks_of(window: int | None, num_tokens: int, settings: CacheSettings) -> int:
    """Return the most blocks that a sequence of this length holds, by the scheduler's own rule."""
    needed = -(-num_tokens // settings.block_size)
    return needed if window is None else min(needed, -(-(window + settings.max_chunk) // settings.block_size) + 1)


# -- free memory -------------------------------------------------------------------------------------------------------


def device_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device, or the free bytes of this host."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else free_host_bytes()


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
    """Return the folders of this process's control group and of those above it that are visible here."""
    top = root / "sys/fs/cgroup"
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [top]
    own = next((entry.removeprefix("0::").strip("/") for entry in entries if entry.startswith("0::")), "")
    folder = top / own
    return [folder, *(above for above in folder.parents if above.is_relative_to(top))]


def _left_in_group(folder: Path) -> int | None:
    """Return the bytes left in a control group; None: it has no limit. Page cache counts as used there, but can be
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


# -- as text -----------------------------------------------------------------------------------------------------------


def plan_contexts(plan: MemoryPlan) -> list[int]:
    """Return the context lengths that a plan is shown for."""
    longest = plan.cache.max_model_len
    return [length for length in CONTEXTS if length < longest] + [longest]


def plan_lines(plan: MemoryPlan) -> list[str]:
    """Format the plan as lines of a table."""
    rows = [
        ("weights", plan.weights),
        ("draft model's weights", plan.draft_weights),
        ("activations of the largest step", plan.activations),
        ("slots of running requests", plan.slots),
        *([(f"states of {plan.cache.max_num_seqs} running requests", plan.states)] if plan.states else []),
        *([(f"{plan.num_snapshots} snapshots of states", plan.snapshots)] if plan.snapshots else []),
        ("captured graphs", plan.graphs),
        ("device context", plan.context),
        ("KV cache", plan.bytes_of_blocks or plan.kv_budget),
    ]
    lines = [f"  {name:<34}{size / GIB:>9.2f} GiB" for name, size in rows]
    if plan.cache.num_blocks:
        lines.append(f"  {'  without cache.num_blocks':<34}{plan.kv_budget / GIB:>9.2f} GiB")
    if plan.kv_bytes_per_token:
        lines.append(f"  {'KV per token':<34}{plan.kv_bytes_per_token / 1024:>9.1f} KiB")
    if plan.window_bytes_per_sequence:
        lines.append(f"  {'sliding windows per sequence':<34}{plan.window_bytes_per_sequence / (1 << 20):>9.1f} MiB")
    if not plan.groups:
        lines.append("  It does not fit: take a smaller model or number format, or a larger device.")
        return lines
    if not plan.fits:
        lines.append(
            f"  It does not fit: cache.num_blocks asks for {plan.bytes_of_blocks / GIB:.2f} GiB, and all else leaves "
            f"{max(0, plan.left) / GIB:.2f}. Leave it out, or ask for fewer blocks."
        )
        return lines
    lines.append(f"  {'tokens in the KV cache':<34}{plan.num_kv_tokens:>9,}")
    lines.append("  context length      sequences at once")
    lines += [f"  {length:>14,}      {plan.sequences(length):>17,}" for length in plan_contexts(plan)]
    if len(plan.groups) > 1 and not plan.cache.configured_model_len and not plan.sequences(plan.cache.max_model_len):
        lines.append("  Set model.max_model_len to have room kept for one sequence of that length, where it fits.")
    return lines


def plan_figures(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as a JSON object: sizes in bytes, and how many sequences of each length fit at once."""
    sizes = {
        name: getattr(plan, name)
        for name in (
            *("weights", "draft_weights", "activations", "slots", "states", "snapshots", "graphs", "context"),
            "kv_budget",
        )
    }
    return {
        "fits": plan.fits,
        "bytes": {**sizes, "kv_cache": plan.bytes_of_blocks or plan.kv_budget},
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "window_bytes_per_sequence": plan.window_bytes_per_sequence,
        "kv_tokens": plan.num_kv_tokens if plan.groups else 0,
        "sequences_at_once": {str(length): plan.sequences(length) for length in plan_contexts(plan)}
        if plan.groups
        else {},
    }
