"""Gated activations, act(gate) * up over [T, 2I] with the gate in the first half, and the softcap of logits.
Memory-bound, one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

SILU = 0
GELU_TANH = 1


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2I] -> silu(x[:, :I]) * x[:, I:], [T, I] in the dtype of x; computed in float32."""
    return _launch(x, out, SILU)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2I] -> gelu_tanh(x[:, :I]) * x[:, I:], the tanh approximation that Gemma uses."""
    return _launch(x, out, GELU_TANH)


def _launch(x: torch.Tensor, out: torch.Tensor | None, activation: int) -> torch.Tensor:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, width) if out is None else out
    if num_tokens:
        block = min(1024, triton.next_power_of_2(width))
        _gated_kernel[(num_tokens, triton.cdiv(width, block))](
            x,
            out,
            x.stride(0),
            out.stride(0),
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=activation,
            num_warps=4,
            **launch_options(supports_pdl(x.device)),
        )
    return out


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap) of x [N, V], in place; computed in float32 and rounded once."""
    num_rows, width = x.shape
    if num_rows:
        block = min(2048, triton.next_power_of_2(width))
        _softcap_kernel[(num_rows, triton.cdiv(width, block))](
            x,
            x.stride(0),
            cap,
            1.0 / cap,
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
            **launch_options(supports_pdl(x.device)),
        )
    return x


@triton.jit
def tanh(x):
    """tanh by exp, whose overflow to inf still gives 1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def gate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 tile."""
    if ACTIVATION == 0:
        return x / (1.0 + tl.exp(-x))
    else:
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 * y)); y is sqrt(2 / pi) * (x + 0.044715 * x ** 3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gated_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activate and multiply: x [T, 2 * WIDTH] -> out [T, WIDTH]. Grid: (T, blocks of columns). A program computes BLOCK
    columns of one token's row."""
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    wait_for_previous(PDL)
    row = x_ptr + token * x_stride + columns
    left = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(row + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = gate(left, ACTIVATION) * right
    tl.store(out_ptr + token * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softcap_kernel(x_ptr, x_stride, cap, inverse, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Limit x [N, WIDTH] to [-cap, cap] in place. Grid: (N, blocks of columns)."""
    allow_next(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    at = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + columns
    wait_for_previous(PDL)
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32) * inverse
    square = y * y
    series = y * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15)))  # tanh() takes 1 from what is nearly 1 there
    tl.store(at, (cap * tl.where(square < 0.01, series, tanh(y))).to(at.dtype.element_ty), mask=mask)
