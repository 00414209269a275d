"""A mixture of experts in plain torch: the CPU path, and what the kernels are compared with.

Tokens are sorted by expert, and each expert that any token chose multiplies its tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.kernels.block_codes import multiply, rows_between
from inferengine.kernels.experts import ExpertBlocks, ExpertCodes, Gating, Routing, expert_numbers
from inferengine.kernels.reference.ops import gelu_tanh_and_mul, linear, pack_linear, rms_norm, silu_and_mul

SMALLEST_SUM = 1e-20  # added to a sum of scores before it divides them


class PackedExperts(NamedTuple):
    """By expert: the weight of gate and up, gates' rows first, and that of the way back, with their biases. A weight
    is as `pack_linear` left it, or ExpertCodes or ExpertBlocks, which become numbers in each product."""

    gate_up: list[Any]
    down: list[Any]
    gate_up_bias: torch.Tensor | None  # [experts, 2I]
    down_bias: torch.Tensor | None  # [experts, E]
    gating: Gating


def pack_experts(
    gate_up: torch.Tensor | ExpertCodes | ExpertBlocks,
    down: torch.Tensor | ExpertCodes | ExpertBlocks,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    num_experts: int,
    gating: Gating,
    *,
    interleaved: bool,
) -> PackedExperts:
    """Put the experts' weights into the CPU's layout. `gate_up` [experts * 2I, E]: of each expert the gates' rows, then
    those of up; one of each in turn where `interleaved`. `down` [experts * E, I]. Biases have a number for each row."""
    if interleaved:
        gate_up = regrouped(gate_up, num_experts, interleaved=False)
        gate_up_bias = regrouped(gate_up_bias, num_experts, interleaved=False)
    return PackedExperts(
        _by_expert(gate_up, num_experts),
        _by_expert(down, num_experts),
        None if gate_up_bias is None else gate_up_bias.view(num_experts, -1),
        None if down_bias is None else down_bias.view(num_experts, -1),
        gating,
    )


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts [T, k] and their weights [T, k] fp32 by logits [T, experts], the largest score first."""
    experts, weights = _route(logits.float(), routing)
    return experts, weights if routing.gains is None else weights * routing.gains[experts]


def _route(wide: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    if routing.sigmoid:
        return _route_by_sigmoid(wide, routing)
    allowed = wide if routing.groups is None else _of_best_groups(wide, routing.groups, 1)
    chosen, experts = allowed.topk(routing.num_chosen, -1)
    if routing.renormalized:
        weights = chosen.softmax(-1)
    else:
        weights = (chosen - wide.logsumexp(-1, keepdim=True)).exp_()
    return experts, weights if routing.factor == 1.0 else weights.mul_(routing.factor)


def _route_by_sigmoid(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    compared = scores if routing.correction is None else scores + routing.correction
    if routing.groups is not None:
        compared = _of_best_groups(compared, routing.groups, 2)
    experts = compared.topk(routing.num_chosen, -1).indices
    weights: torch.Tensor = scores.gather(-1, experts)
    if routing.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return experts, weights * routing.factor


def _of_best_groups(scores: torch.Tensor, groups: tuple[int, int], counted: int) -> torch.Tensor:
    """Return scores [T, experts], -inf outside each token's best groups, which are judged by their `counted` best
    scores."""
    number, kept = groups
    by_group: torch.Tensor = scores.unflatten(-1, (number, -1))
    best = by_group.topk(counted, -1).values.sum(-1).topk(kept, -1).indices
    hidden = torch.ones(by_group.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, value=False)
    return by_group.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(-2)


def add_experts(
    x: torch.Tensor, logits: torch.Tensor, routing: Routing, experts: Any, residual: torch.Tensor
) -> torch.Tensor:
    """Add to residual [T, E] the weighted sum of what each token's experts make of x [T, E]."""
    chosen, weights = route(logits, routing)
    if routing.held is not None:
        first, count = routing.held
        chosen = chosen - first
        chosen = chosen.masked_fill_((chosen < 0) | (chosen >= count), count)  # behind all that are there
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.down))[: len(experts.down)].tolist()
    order = order[: sum(counts)]
    tokens = order // routing.num_chosen
    rows = x.index_select(0, tokens)
    outputs = torch.empty_like(rows)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            last = first + count
            bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
            hidden = gated(_product(rows[first:last], experts.gate_up[expert], bias), experts.gating)
            bias = None if experts.down_bias is None else experts.down_bias[expert]
            outputs[first:last] = _product(hidden, experts.down[expert], bias)
            first = last
    outputs.mul_(weights.flatten()[order].unsqueeze(1).to(outputs.dtype))
    return residual.index_add_(0, tokens, outputs)


def add_experts_norm(
    x: torch.Tensor,
    logits: torch.Tensor,
    routing: Routing,
    experts: Any,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `add_experts`, and return with the sum its rms_norm. A table may leave it out."""
    residual = add_experts(x, logits, routing, experts, residual)
    return residual, rms_norm(residual, gain, eps)


def gated(both: torch.Tensor, gating: Gating) -> torch.Tensor:
    """Apply the gated activation: x [T, 2I], gates first -> [T, I]."""
    return _GATED[gating.activation](both, gating)


def regrouped(rows: Any, num_experts: int, *, interleaved: bool) -> Any:
    """Reorder rows of gate and up in turn to each expert's gates and then its ups; to `interleaved`, the other way
    around. A tensor [experts * 2I, ...] or ExpertCodes; None stays None."""
    if rows is None:
        return None
    if isinstance(rows, ExpertCodes):
        codes, scales, zeros = (
            regrouped(part, num_experts, interleaved=interleaved) for part in (rows.codes, rows.scales, rows.zeros)
        )
        return rows._replace(codes=codes, scales=scales, zeros=zeros)
    size = len(rows) // num_experts
    shape = (num_experts, 2, size // 2) if interleaved else (num_experts, size // 2, 2)
    as_bytes = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
    moved = as_bytes.view(*shape, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
    return moved.view(rows.dtype)


def _by_expert(weight: torch.Tensor | ExpertCodes | ExpertBlocks, num_experts: int) -> list[Any]:
    if isinstance(weight, ExpertBlocks):
        rows = weight.parts[0].shape[0] // num_experts
        places = [(first, first + rows) for first in range(0, num_experts * rows, rows)]
        return [ExpertBlocks(tuple(rows_between(part, *place) for part in weight.parts)) for place in places]
    if isinstance(weight, ExpertCodes):
        nothing = [None] * num_experts
        zeros = nothing if weight.zeros is None else weight.zeros.chunk(num_experts)
        parts = zip(weight.codes.chunk(num_experts), weight.scales.chunk(num_experts), zeros, strict=True)
        return [weight._replace(codes=codes, scales=scales, zeros=points) for codes, scales, points in parts]
    return [pack_linear(part) for part in weight.chunk(num_experts)]


def _product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, ExpertCodes):
        return functional.linear(x, expert_numbers(weight).to(x.dtype), bias)
    if isinstance(weight, ExpertBlocks):
        both = torch.cat([multiply(x, part) for part in weight.parts], 1)
        return both if bias is None else both.add_(bias)
    return linear(x, weight, bias)


def _swiglu_clamped(both: torch.Tensor, gating: Gating) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * gating.alpha))


_GATED: dict[str, Callable[[torch.Tensor, Gating], torch.Tensor]] = {
    "silu": lambda both, gating: silu_and_mul(both),
    "gelu_tanh": lambda both, gating: gelu_tanh_and_mul(both),
    "swiglu_clamped": _swiglu_clamped,
}
