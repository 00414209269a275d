"""KVCache: the KV tensors of a model, their host tensors for swapping, and a plan's block copies.

The keys and values of an FP8 cache are divided by a scale per layer before they are stored as e4m3. Scales are measured
once, by running a prompt of random tokens through the model with a cache of its own number format. The relative
precision of e4m3 is the same over 15 octaves, so the scale only has to put all magnitudes well inside them: the largest
one seen is stored as the largest code divided by HEADROOM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import nn

from inferengine.core.executor import BlockCopies, KVGroup, StepPlan
from inferengine.layers.attention import CachedAttention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.rotary import RopeConfig, cos_sin_table

CACHE_LINE = 64  # bytes; torch aligns its tensors to it too
HEADROOM = 8.0  # of an FP8 cache
LARGEST_CODE = 448.0  # of e4m3
SAMPLE_TOKENS = 256  # of the prompt that FP8 scales are measured with
GroupCache = tuple[torch.Tensor, int | None]  # the cache of a KV group's first layer, and the group's window


class KVCache:
    """One tensor per layer that has a cache, [num_blocks + 1, planes, K, block_size, D]; the last block is scratch for
    padded rows. The planes are keys and values, or latents alone. Layers of a group have one shape. A layer that reads
    an earlier one's keys and values is bound to that one's tensor."""

    def __init__(
        self,
        config: DecoderConfig,
        groups: list[KVGroup],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = groups
        windows = [config.windows[layer] for layer in config.cached_layers]
        self.layer_groups = [config.group_windows.index(window) for window in windows]
        shapes = [(config.kv_planes, kv.num_heads, block_size, kv.head_dim) for kv in map(config.kv_shape, windows)]
        self.layers = [
            zeros((groups[group].num_blocks + 1, *shape), dtype, device)
            for group, shape in zip(self.layer_groups, shapes, strict=True)
        ]
        self.host_layers = [
            torch.zeros(groups[group].num_host_blocks, *shape, dtype=dtype, pin_memory=device.type == "cuda")
            for group, shape in zip(self.layer_groups, shapes, strict=True)
        ]
        self.group_caches: list[GroupCache] = [
            (self.layers[windows.index(window)], window) for window in config.group_windows
        ]
        self._sources = sources_of(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device tensors."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def magnitudes(self) -> list[tuple[float, float]]:
        """Return the largest absolute key and value of each layer; of latents, which are both, the same twice."""
        return [(float(layer[:, 0].abs().max()), float(layer[:, -1].abs().max())) for layer in self.layers]

    def bind(self, model: nn.Module, num_positions: int) -> None:
        """Give every attention layer its cache tensor and its rotation table; equal tables are shared."""
        tables: dict[RopeConfig, torch.Tensor] = {}
        attentions = [module for module in model.modules() if isinstance(module, CachedAttention)]
        for attention, source in zip(attentions, self._sources, strict=True):
            attention.kv = kv = self.layers[source]
            if attention.rope is not None:
                if attention.rope not in tables:
                    tables[attention.rope] = cos_sin_table(attention.rope, num_positions, kv.device)
                attention.cos_sin = tables[attention.rope]

    def copy_blocks(self, plan: StepPlan) -> None:
        """Copy the plan's blocks: out to the host, back from the host, within the device, in this order."""
        if plan.swap_out:
            self._copy(plan.swap_out, self.layers, self.host_layers)
        if plan.swap_in:
            self._copy(plan.swap_in, self.host_layers, self.layers)
        if plan.copies:
            self._copy(plan.copies, self.layers, self.layers)

    def _copy(self, copies: SequenceOf[BlockCopies], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        for group, copy in enumerate(copies):
            if not copy.sources:
                continue
            runs = _runs(copy)
            for layer_group, source, target in zip(self.layer_groups, sources, targets, strict=True):
                if layer_group == group:
                    for begin, to, count in runs:
                        target[to : to + count].copy_(source[begin : begin + count], non_blocking=True)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of zeros. On a CPU its pages are allocated when they are first written: filling a cache of
    gigabytes would be most of an engine's start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[begin : begin + num_bytes]).view(dtype).view(shape)


def _runs(copy: BlockCopies) -> list[tuple[int, int, int]]:
    """Join copies of neighbouring blocks: (source, target, number of blocks)."""
    sources, targets = np.array(copy.sources), np.array(copy.targets)
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((begins, [len(sources)])))
    return [(int(sources[begin]), int(targets[begin]), int(count)) for begin, count in zip(begins, counts, strict=True)]


def sources_of(config: DecoderConfig) -> list[int]:
    """Return, for each layer with attention, the place of the cache that it reads among KVCache.layers."""
    return [config.cached_layers.index(config.kv_source(layer)) for layer in range(len(config.windows))]


def set_scales(model: nn.Module, config: DecoderConfig, magnitudes: list[tuple[float, float]]) -> None:
    """Set the scales of every attention layer from `magnitudes`, the largest key and value seen of each cache."""
    layers = [module for module in model.modules() if isinstance(module, CachedAttention)]
    for layer, source in zip(layers, sources_of(config), strict=True):
        key, value = magnitudes[source]
        layer.kv_scales = (_scale(key), _scale(value))


def sample_tokens(vocab_size: int, count: int) -> list[int]:
    """Draw random tokens, the same each time."""
    tokens: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return tokens


def _scale(magnitude: float) -> float:
    """Return a power of two, so that scaling rounds nothing."""
    exact = max(magnitude, 1e-6) * HEADROOM / LARGEST_CODE
    return float(2.0 ** torch.tensor(exact).log2().ceil().item())
