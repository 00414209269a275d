"""The CPU ops without state: plain torch, written for few operations. Attention is kernels/cpu/attention.py.

Knows nothing of models, slots or sampling.

The fused ops as what they are made of: the CPU path, and what the fused kernels are tested against.

Bit masks of allowed tokens in plain torch: the definition that the kernel is tested against, and the CPU path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm of the last dimension, in fp32 (Zhang and Sennrich 2019). x [..., E], weight [E]."""
    if x.numel() == x.shape[-1] and x.is_cpu and x.dtype == torch.float32 and eps > 0:
        return _rms_norm_of_one(x, weight, eps)
    wide = x if x.dtype == torch.float32 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps, wide.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    normed = torch.mul(wide, scale)  # few operations: their number is what costs at batch 1
    return (normed if x.dtype == torch.float32 else normed.to(x.dtype)).mul_(weight)


def _rms_norm_of_one(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Of a single row on the CPU: its scale as a Python number takes two operations fewer."""
    row = x.reshape(-1)
    scale = (torch.dot(row, row).item() / len(row) + eps) ** -0.5
    return torch.addcmul(_ZERO, x, weight, value=scale)


_ZERO = torch.zeros(())


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, then its norm. Both [T, E]. Returns (normed, residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return LayerNorm of x [T, E]."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2I], gate in the first half (Shazeer 2020)."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return gelu_tanh(x[:, :I]) * x[:, I:] of x [T, 2I]."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def pack_linear(weight: torch.Tensor) -> Any:
    """Put a weight into the layout that the CPU reads fastest; `linear` takes what comes back.

    At small batches a matrix product is as fast as its weight is read. A weight that half precision holds exactly (any
    checkpoint stored as bf16 or fp16) is kept so and widened in registers, products and sums staying fp32: twice as
    fast as fp32 weights. Others are reordered for oneDNN.
    """
    if weight.dtype != torch.float32:
        return weight
    if "fbgemm" in torch.backends.quantized.supported_engines and _half_is_exact(weight):
        return torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    if torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
    return weight


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] @ weight[out, in].T + bias, for a weight as `pack_linear` left it."""
    if not isinstance(weight, torch.Tensor):
        with _PLAIN_CALL():
            out = _half_linear(x, weight)
        return out if bias is None else out.add_(bias)
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return functional.linear(x, weight, bias)


# The operator without the detour through torch.ops, nor asking the packed weight, at the price of a C++ exception,
# whether it overrides torch functions: 4 us a call in place of 38, 25 times a step of the embedded model.
_half_linear: Callable[..., torch.Tensor] = torch.ops.quantized.linear_dynamic_fp16.default._op
_PLAIN_CALL = torch._C.DisableTorchFunctionSubclass


HALF_MAX = 65504.0
LOST_BITS = 0x1FFF  # of fp32's fraction: those that fp16 has not
PIECE = 1 << 15  # values looked at together: few enough for the cache, and for torch to stay in this thread


def _half_is_exact(weight: torch.Tensor) -> bool:
    """Whether fp16 holds every value; below its normal range the nearest multiple of 2^-24 will do."""
    pieces = weight.contiguous().view(-1).split(PIECE)
    return all(_is_short(piece) or _is_near_half(piece) for piece in pieces)


def _is_short(values: torch.Tensor) -> bool:
    """What holds for all that was stored as bf16 or fp16 in fp16's range, and costs two looks at the values."""
    least, most = values.aminmax()
    if not -HALF_MAX <= float(least) <= float(most) <= HALF_MAX:
        return False
    return not bool(values.view(torch.int32).bitwise_and(LOST_BITS).any())


def _is_near_half(values: torch.Tensor) -> bool:
    return float((values.half().float() - values).abs().max()) <= 2.0**-25


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """linear(rms_norm(x)): x [T, E], gain [E], weight [out, E] -> [T, out]."""
    return linear(rms_norm(x, gain, eps), weight, bias)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """residual [T, out] += linear(x), in place; returns it."""
    return residual.add_(linear(x, weight, bias))


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
    return residual, rms_norm(residual, gain, eps)


def norm_gated_linear(
    x: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """act(gate) * up of rms_norm(x), weight [2I, E] with the gate's rows first -> [T, I]; no gain: x is normed."""
    act = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}[activation]
    return act(linear(x, weight, bias) if gain is None else norm_linear(x, gain, eps, weight, bias))


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]: by byte of a mask, of each of its tokens


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits, of which bit t % 32 of word t // 32 stands for token t.

    By the smaller of each logit and its bound, looked up by the byte: torch's masked_fill takes 20 times as long as a
    minimum on a CPU, and unpacking bits twice as long as the look-up.
    """
    num_masks, vocab_size = len(masks), logits.shape[1]
    packed = np.ascontiguousarray(masks[:, 1:].numpy()).view(np.uint8)
    bounds = torch.from_numpy(_BOUNDS.take(packed, axis=0).reshape(num_masks, -1)[:, :vocab_size]).to(logits.dtype)
    rows = masks[:, 0]
    if num_masks == len(logits) and torch.equal(rows, torch.arange(num_masks, dtype=rows.dtype)):
        torch.minimum(logits, bounds, out=logits)
        return
    logits.index_copy_(0, rows.long(), torch.minimum(logits.index_select(0, rows), bounds))
