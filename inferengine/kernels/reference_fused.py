"""The fused ops as what they are made of: the CPU path, and what the fused kernels are tested against."""

from __future__ import annotations

import torch

from inferengine.kernels import reference


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """linear(rms_norm(x)): x [T, E], gain [E], weight [out, E] -> [T, out]."""
    return reference.linear(reference.rms_norm(x, gain, eps), weight, bias)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual [T, out] += linear(x), in place; returns it."""
    return residual.add_(reference.linear(x, weight, bias))


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += linear(x), in place, and rms_norm(residual). A table may leave it out, or give None for the norm."""
    residual = linear_add(x, weight, bias, residual)
    return residual, reference.rms_norm(residual, gain, eps)


def norm_gated_linear(
    x: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """act(gate) * up of rms_norm(x), weight [2I, E] with the gate's rows first -> [T, I]; no gain: x is normed."""
    act = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}[activation]
    return act(reference.linear(x, weight, bias) if gain is None else norm_linear(x, gain, eps, weight, bias))
