"""Prefill attention for Hopper by the kernel of attention_prefill_compute. The contract is attention_prefill's."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inferengine.kernels.attention_prefill_compute import attention_kernel
from inferengine.kernels.attention_prefill_loader import COLUMNS, LINES, Shape
from inferengine.kernels.hopper import is_hopper, num_multiprocessors
from inferengine.kernels.pdl import launch_options, supports_pdl
from inferengine.kernels.scratch import Scratch

TOKEN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def fits(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """What the kernel takes: 16-bit models whose cache blocks hold whole copies, on Hopper cards."""
    group, head_dim, block_size = q.shape[1] // kv.shape[2], q.shape[2], kv.shape[3]
    return (
        q.dtype == kv.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and block_size % 64 == 0
        and group in (1, 2, 4, 8, 16)
        and kv.is_contiguous()
        and is_hopper(kv.device)
    )


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_start: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    first_row: int,
    num_tokens: int,
    out: torch.Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """attention_prefill.prefill_attention for what `fits`. `scratch`: counters, zero before and after a launch."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    shape = Shape(
        kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        block_tokens=128,
        stages=2,
        window=window is not None,
        softcap=softcap is not None,
    )
    num_tiles = num_tokens // (2 * shape.tokens) + row_slot.shape[0] - first_row
    attention_kernel[(min(num_tiles * num_kv_heads, num_multiprocessors(q.device)),)](
        *descriptors(q, kv, shape),
        row_slot,
        row_start,
        query_start,
        block_table,
        out,
        row_start.new_zeros(2) if scratch is None else scratch.arrived,
        block_table.stride(0),
        first_row,
        row_slot.shape[0] - first_row,
        num_tiles,
        scale * kv_scales[0],
        kv_scales[1],
        softcap or 0.0,
        window or 0,
        SHAPE=shape,
        num_warps=4,
        **launch_options(supports_pdl(q.device)),
    )
    return out


def descriptors(q: torch.Tensor, kv: torch.Tensor, shape: Shape) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Pieces of the queries [T, H, D], and of the cache seen as rows of one key or value each."""
    lines = kv.view(-1, shape.head_dim)
    tokens = [shape.tokens, shape.group, COLUMNS.value]
    return (
        TensorDescriptor(q, q.shape, q.stride(), tokens, TOKEN_LAYOUT),
        TensorDescriptor(lines, lines.shape, lines.stride(), [LINES.value, COLUMNS.value], LINE_LAYOUT),
    )
