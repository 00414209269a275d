"""Weights whose inputs were sorted before they were cut into groups (GPTQ's desc_act, actorder "group").

Such a checkpoint stores, for each input, the group that it belongs to. Here the columns of the codes are sorted by
group once, at load, so that groups are runs again and every kernel for groups fits; each product then takes its input
in the same order: one gather more. The norm before a product is a step of its own, since the gather comes in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from inferengine.kernels.ops import Ops


class Reordered(NamedTuple):
    """A weight packed by the table below, and the order [K] in which it reads its input."""

    packed: Any
    order: torch.Tensor


def order_of(groups: torch.Tensor, columns: int, group: int) -> torch.Tensor | None:
    """Return the order that sorts inputs by their groups [K]; None where they are sorted. Raises ValueError where
    groups have other sizes."""
    groups = groups.long().cpu()
    order = torch.argsort(groups, stable=True)
    if groups.shape != (columns,) or not torch.equal(groups[order], torch.arange(columns) // group):
        raise ValueError(f"the groups of its inputs are not {columns // group} of {group}")
    return None if torch.equal(order, torch.arange(columns)) else order


def table(inner: Ops) -> Ops:
    """Return `inner`, the products of quantized weights, with reordered ones beside the others. Inputs that a layer in
    low precision handed on as codes come as numbers."""

    def pack_linear(source: Any) -> Any:
        packed = inner.pack_linear(source)
        order = source.order
        return packed if order is None else Reordered(packed, order.to(source.device))

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, Reordered):
            return inner.linear(x.index_select(-1, weight.order), weight.packed, bias)
        return inner.linear(x, weight, bias)

    def norm_linear(
        x: torch.Tensor, gain: torch.Tensor, eps: float, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, Reordered):
            return linear(inner.rms_norm(x, gain, eps), weight, bias)
        return inner.norm_linear(x, gain, eps, weight, bias)

    def linear_add(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, Reordered):
            return inner.linear_add(x.index_select(-1, weight.order), weight.packed, bias, residual)
        return inner.linear_add(x, weight, bias, residual)

    def norm_gated_linear(
        x: torch.Tensor,
        gain: torch.Tensor | None,
        eps: float,
        weight: Any,
        bias: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        if not isinstance(weight, Reordered):
            return inner.norm_gated_linear(x, gain, eps, weight, bias, activation)
        both = linear(x, weight, bias) if gain is None else norm_linear(x, gain, eps, weight, bias)
        return inner.silu_and_mul(both) if activation == "silu" else inner.gelu_tanh_and_mul(both)

    return dataclasses.replace(
        inner,
        linear=linear,
        pack_linear=pack_linear,
        norm_linear=norm_linear,
        linear_add=linear_add,
        linear_add_norm=None,
        norm_gated_linear=norm_gated_linear,
        reads_codes=False,
    )
