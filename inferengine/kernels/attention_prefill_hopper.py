"""Prefill attention for Hopper by the kernel of attention_prefill_roles. The contract is attention_prefill's."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inferengine.kernels.attention_prefill_roles import COLUMNS, LINES, Shape, attention_kernel
from inferengine.kernels.pdl import launch_options, supports_pdl


def fits(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Decided by the model's shapes and the device alone, never by the batch."""
    group, head_dim, block_size = q.shape[1] // kv.shape[2], q.shape[2], kv.shape[3]
    return (
        q.dtype == kv.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and block_size % 64 == 0
        and group in (1, 2, 4, 8, 16)
        and kv.is_contiguous()
        and kv.is_cuda
        and torch.cuda.get_device_capability(kv.device)[0] == 9
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
    deterministic: bool = False,
) -> torch.Tensor:
    """attention_prefill.prefill_attention for what `fits`."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    shape = Shape(
        num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, 128, 2, window is not None, softcap is not None
    )
    num_tiles = num_tokens // (2 * shape.tokens) + row_slot.shape[0] - first_row
    attention_kernel[(min(num_tiles * num_kv_heads, _num_multiprocessors(q.device)),)](
        _descriptor(q, [shape.tokens, shape.group, COLUMNS.value]),
        _descriptor(kv.view(-1, head_dim), [LINES.value, COLUMNS.value]),
        row_slot,
        row_start,
        query_start,
        block_table,
        out,
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
        **launch_options(supports_pdl(q.device), exact=deterministic),
    )
    return out


@lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
