"""Scales of an FP8 cache: what each layer's keys and values are divided by before they are stored as e4m3.

Measured once, by running a prompt of random tokens through the model with a cache of its own number format. e4m3 is as
fine relative to a value over 15 octaves, so the scale need only put all magnitudes well inside them: the largest one
seen comes to rest HEADROOM below the largest code.
"""

from __future__ import annotations

import torch
from torch import nn

from inferengine.layers.attention import Attention

HEADROOM = 8.0
LARGEST = 448.0
SAMPLE_TOKENS = 256


def set_scales(model: nn.Module, magnitudes: list[tuple[float, float]]) -> None:
    """Give every attention layer its scales. `magnitudes` are the largest key and value seen, layer by layer."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer, (key, value) in zip(layers, magnitudes, strict=True):
        layer.kv_scales = (_scale(key), _scale(value))


def sample_tokens(vocab_size: int, count: int) -> list[int]:
    """The same random tokens each time."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _scale(magnitude: float) -> float:
    """A power of two, so that scaling rounds nothing."""
    exact = max(magnitude, 1e-6) * HEADROOM / LARGEST
    return float(2.0 ** torch.tensor(exact).log2().ceil().item())
