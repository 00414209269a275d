"""Which layers of a model launch different kernels: a step through one of each compiles all that the model launches.

What a layer launches follows from what it is made of: classes, windows, and the types, shapes, strides and alignments
of its tensors. What its first product reads follows from the layer before it too, which may have computed its norm
already, rounded to the codes that the earlier layer's own weights are multiplied with. So every pair of neighbours that
differs from the others is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inferengine.kernels.ops import Ops

ALIGNED_BYTES = 16  # Triton compiles a kernel for pointers that are multiples of it, and another for all others
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
OF_TENSORS = ("_parameters", "_buffers", "_modules")


@contextmanager
def one_layer_of_each_kind(model: Any) -> Iterator[None]:
    """Inside, `model.layers` are those that `covering` keeps. Each keeps its weights, its KV cache and its group."""
    whole = model.layers
    model.layers = nn.ModuleList(whole[index] for index in covering([kind(layer) for layer in whole]))
    try:
        yield
    finally:
        model.layers = whole


def covering(kinds: Sequence[Hashable]) -> list[int]:
    """Indices, in order, of a few items: every pair of neighbours among all has its like among the neighbours of
    these, the first and the last item included."""
    kept: list[int] = []
    pairs: set[tuple[Hashable, Hashable]] = set()
    for index in range(1, len(kinds)):
        pair = kinds[index - 1], kinds[index]
        if pair in pairs:
            continue
        pairs.add(pair)
        if not kept or kinds[kept[-1]] != pair[0]:
            kept.append(index - 1)
        kept.append(index)
    if not kept or kinds[kept[-1]] != kinds[-1]:
        kept += range(max(0, len(kinds) - 1), len(kinds))
    return kept


def kind(value: Any) -> Hashable:
    """What decides which kernels a layer launches; equal for layers that launch the same. An object of which nothing is
    known equals only itself."""
    if value is None or isinstance(value, (bool, int, str)):
        return type(value), value
    if isinstance(value, float):
        return float  # an argument of a launch: no kernel is compiled for its value
    if isinstance(value, torch.Tensor):
        looks = type(value), value.dtype, tuple(value.shape), value.layout
        if value.layout is not torch.strided:  # a CPU's own layout: no kernel of ours reads it
            return looks
        return *looks, value.stride(), value.data_ptr() % ALIGNED_BYTES == 0
    if isinstance(value, Ops):  # adapters give every module a table of its own with the same kernels
        return Ops, value.name, value.reads_codes, value.linear_add_norm is None
    if isinstance(value, nn.Module):
        own = vars(value)
        names = sorted((own.keys() - OF_EVERY_MODULE).union(OF_TENSORS))
        return type(value), tuple((name, kind(own[name])) for name in names)
    if isinstance(value, dict):
        return dict, tuple((key, kind(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(kind(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value), tuple((field.name, kind(getattr(value, field.name))) for field in fields)
    return type(value), id(value)
