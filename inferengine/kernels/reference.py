"""The CPU ops without state: plain torch, written for few operations. Attention is cpu_attention.py.

Knows nothing of models, slots or sampling.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm of the last dimension, in fp32 (Zhang and Sennrich 2019). x [..., E], weight [E]."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    floor = torch.full((), eps, dtype=torch.float32, device=x.device)
    scale = torch.addcmul(floor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()  # four small operations: it is the
    return torch.mul(wide, scale).to(x.dtype).mul_(weight)  # number of operations that costs at batch 1


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, then its norm. Both [T, E]. Returns (normed, residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2I], gate in the first half (Shazeer 2020)."""
    half = x.shape[-1] // 2
    return functional.silu(x[..., :half]).mul_(x[..., half:])


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return functional.gelu(x[..., :half], approximate="tanh").mul_(x[..., half:])


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a weight for oneDNN's small-batch kernels: up to 2x faster than the plain layout below 32 tokens."""
    if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] @ weight[out, in].T + bias."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
