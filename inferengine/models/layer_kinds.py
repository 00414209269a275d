"""One layer of each kind: a step through them launches every kernel that a step through the whole model does.

The kernels of a layer follow from its classes, windows, and the types, shapes, strides and alignments of its tensors.
Its first product also depends on the layer before, which may have computed this layer's norm already, rounded to the
codes that its own weights are multiplied with. So one of every different pair of neighbours is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from inferengine.kernels.ops import Ops
from inferengine.models.decoder import DecoderModel

ALIGNED_BYTES = 16  # Triton compiles one kernel for pointers that are multiples of it, another for all others
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
OF_TENSORS = ("_parameters", "_buffers", "_modules")


@contextmanager
def one_layer_of_each_kind(model: DecoderModel) -> Iterator[None]:
    """Reduce `model.layers` to one layer of each kind inside the context; each keeps its weights, its KV cache and its
    group."""
    with with_layers(model, layers_of_each_kind(model)):
        yield


def layers_of_each_kind(model: DecoderModel) -> nn.ModuleList:
    """Return one layer of each kind, in order."""
    whole = model.layers
    return nn.ModuleList(whole[index] for index in covering([kind(layer) for layer in whole]))


@contextmanager
def with_layers(model: DecoderModel, layers: nn.ModuleList) -> Iterator[None]:
    """Set `model.layers` to these inside the context."""
    whole = model.layers
    model.layers = layers
    try:
        yield
    finally:
        model.layers = whole


def covering(kinds: Sequence[Hashable]) -> list[int]:
    """Return the indices, in order, of the items to keep: every pair of neighbouring kinds occurs among the kept
    neighbours too, and so do the first and the last kind."""
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
    """Describe a layer by what decides its kernels: equal for layers that launch the same ones. An object of an unknown
    class equals only itself."""
    if value is None or isinstance(value, (bool, int, str)):
        return type(value), value
    if isinstance(value, float):
        return float  # an argument of a launch, for whose value no kernel is compiled
    if isinstance(value, torch.Tensor):
        looks = type(value), value.dtype, tuple(value.shape), value.layout
        if value.layout is not torch.strided:  # a CPU's own layout, which no kernel of ours reads
            return looks
        return *looks, value.stride(), value.data_ptr() % ALIGNED_BYTES == 0
    if isinstance(value, Ops):  # with adapters every module has a table of its own, with the same kernels
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
