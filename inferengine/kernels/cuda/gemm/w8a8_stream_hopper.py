"""Products of FP8 codes for Hopper that load their weight before the input is there: 2 to 128 rows.

Where rows are few a product costs reading its weight, and a product that waits for its input first leaves the memory
idle between kernels. Here each program fills a ring in shared memory with its weight by the tensor memory accelerator,
waits for the kernels before it, fetches the input's tiles into the same ring and multiplies. Launched with programmatic
dependence, programs start while the kernels before them still run, so that reading goes on across launches.

Inputs are codes with a scale for each row, or for each 128 columns of each row. The inner dimension may be cut in
parts that the next kernel sums. Gate and up rows are read side by side; what is gated may leave as codes again, with a
scale for each 128 columns: what the next product reads, and no kernel in between.

Written in Gluon, Triton's lower level: plain Triton cannot start half of a loop's loads before a wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.dispatch import StreamConfig
from inferengine.kernels.cuda.gemm.hopper import is_hopper, load_piece
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch

COLUMNS = gl.constexpr(128)  # of a copy, the width of the swizzle; also what shares a scale where a row has several
LARGEST = gl.constexpr(448.0)
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


class BlockCodes(NamedTuple):
    """Codes [M, K] e4m3, and fp32 scales [ceil(K / 128), M]: one for each 128 columns of a row."""

    codes: torch.Tensor
    scales: torch.Tensor


def fits(rows: int, weight: torch.Tensor, tuned: StreamConfig, *, gated: bool = False) -> bool:
    """Return whether the kernel takes these tensors. `weight`: codes [N, K]."""
    width, columns = weight.shape
    whole = width % (tuned.block_n * (2 if gated else 1)) == 0 and columns % (tuned.block_k * tuned.splits) == 0
    on_hopper = is_hopper(weight.device)
    return on_hopper and whole and rows <= tuned.block_m and weight.is_contiguous() and weight.data_ptr() % 16 == 0


def stream_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    tuned: StreamConfig,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply codes [M, K] with `scales` [M, 1], or [K / 128, M] of BlockCodes, times codes [N, K] with
    `weight_scales` [N] -> [M, N] of `dtype`. `residual` [M, N] is added in place and returned. `tuned` has one part."""
    out = codes.new_empty(codes.shape[0], weight.shape[0], dtype=dtype) if residual is None else residual
    _launch(codes, scales, weight, weight_scales, tuned, out, bias=bias, residual=residual)
    return out


def stream_parts(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    tuned: StreamConfig,
    scratch: Scratch,
) -> torch.Tensor:
    """Multiply as `stream_product`, into parts [splits, M, N] fp32 whose sum is the product. They lie in the scratch
    memory: the next kernel must be the one that reads them."""
    shape = (tuned.splits, codes.shape[0], weight.shape[0])
    parts = scratch.partial[: shape[0] * shape[1] * shape[2]].view(shape)
    _launch(codes, scales, weight, weight_scales, tuned, parts, parts=True)
    return parts


def stream_gated(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    tuned: StreamConfig,
    activation: int,
    dtype: torch.dtype | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> BlockCodes | torch.Tensor:
    """Return act(gate) * up of the product, the gate's rows first: [M, N / 2] of `dtype`; BlockCodes where there is
    none, for which `tuned.block_n` is 128."""
    rows, width = codes.shape[0], weight.shape[0] // 2
    if dtype is not None:
        out = codes.new_empty(rows, width, dtype=dtype)
        _launch(codes, scales, weight, weight_scales, tuned, out, bias=bias, gated=activation)
        return out
    out = torch.empty(rows, width, dtype=codes.dtype, device=codes.device)
    out_scales = torch.empty(width // COLUMNS.value, rows, dtype=torch.float32, device=codes.device)
    _launch(codes, scales, weight, weight_scales, tuned, out, out_scales, bias=bias, gated=activation)
    return BlockCodes(out, out_scales)


def _launch(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    tuned: StreamConfig,
    out: torch.Tensor,
    out_scales: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
    parts: bool = False,
) -> None:
    rows, columns = codes.shape
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    chunk = columns // tuned.splits
    stream_kernel[(width // tuned.block_n, tuned.splits)](
        *descriptors(codes, weight, tuned),
        scales,
        weight_scales,
        weight_scales if bias is None else bias,
        out if residual is None else residual,
        out,
        scales if out_scales is None else out_scales,
        rows,
        N=width,
        CHUNK=chunk,
        BLOCK_K=tuned.block_k,
        STAGES=min(tuned.num_stages, chunk // tuned.block_k),
        PARTS=parts,
        BLOCKS=scales.shape != (rows, 1),
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        CODES=out_scales is not None,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(codes.device)),
    )


def descriptors(
    codes: torch.Tensor, weight: torch.Tensor, tuned: StreamConfig
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the tensor maps of x and of the weight."""
    return (
        TensorDescriptor(codes, codes.shape, codes.stride(), [tuned.block_m, COLUMNS.value], LAYOUT),
        TensorDescriptor(weight, weight.shape, weight.stride(), [tuned.block_n, COLUMNS.value], LAYOUT),
    )


@gluon.jit
def _load_weight(
    weight, n_first, at, ready, slots, stage, BLOCK_K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, pred=True
):
    COPIES: gl.constexpr = BLOCK_K // COLUMNS
    PIECES: gl.constexpr = 2 if GATED else 1
    for copy in gl.static_range(COPIES):
        slot = (stage * COPIES + copy) * PIECES
        load_piece(weight, [n_first, at + copy * COLUMNS], ready, slots.index(slot), pred=pred)
        if GATED:
            load_piece(weight, [N + n_first, at + copy * COLUMNS], ready, slots.index(slot + 1), pred=pred)


@gluon.jit
def _load_input(x, at, ready, slots, stage, BLOCK_K: gl.constexpr, pred=True):
    COPIES: gl.constexpr = BLOCK_K // COLUMNS
    for copy in gl.static_range(COPIES):
        load_piece(x, [0, at + copy * COLUMNS], ready, slots.index(stage * COPIES + copy), pred=pred)


@gluon.jit(do_not_specialize=["num_rows"])
def stream_kernel(
    x,
    weight,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_scale_ptr,
    num_rows,
    N: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCKS: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CODES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply a tile of x by a tile of the weight whose loads began before x was there."""
    BLOCK_M: gl.constexpr = x.block_shape[0]
    BLOCK_N: gl.constexpr = weight.block_shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 32])
    PIECES: gl.constexpr = 2 if GATED else 1
    COPIES: gl.constexpr = BLOCK_K // COLUMNS
    STEPS: gl.constexpr = CHUNK // BLOCK_K
    STEP_BYTES: gl.constexpr = (PIECES * BLOCK_N + BLOCK_M) * BLOCK_K
    n_first = gl.program_id(0) * BLOCK_N
    split = gl.program_id(1)
    begin = split * CHUNK
    slots = gl.allocate_shared_memory(weight.dtype, [STAGES * COPIES * PIECES, BLOCK_N, COLUMNS], weight.layout)
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, BLOCK_M, COLUMNS], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        mbarrier.expect(ready.index(stage), STEP_BYTES)
        _load_weight(weight, n_first, begin + stage * BLOCK_K, ready.index(stage), slots, stage, BLOCK_K, N, GATED)
    allow_next(PDL)
    wait_for_previous(PDL)
    for stage in gl.static_range(STAGES):
        _load_input(x, begin + stage * BLOCK_K, ready.index(stage), x_slots, stage, BLOCK_K)

    M_OF: gl.constexpr = gl.SliceLayout(0, SUMS)
    N_OF: gl.constexpr = gl.SliceLayout(1, SUMS)
    m = gl.arange(0, BLOCK_M, M_OF)
    n = n_first + gl.arange(0, BLOCK_N, N_OF)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    scale_at = x_scale_ptr + m
    if BLOCKS:
        scale_at += begin // COLUMNS * num_rows
    x_scale = gl.load(scale_at, mask=m < num_rows, other=0.0)
    stage = 0
    phase = 0
    for step in range(STEPS):
        barrier = ready.index(stage)
        mbarrier.wait(barrier, phase)
        for copy in gl.static_range(COPIES):
            slot = stage * COPIES + copy
            inner = x_slots.index(slot).permute((1, 0))
            if BLOCKS:
                part = warpgroup_mma(slots.index(slot), inner, zeros, use_acc=False, is_async=True)
                scale_at += num_rows
                more = step * COPIES + copy + 1 < STEPS * COPIES
                next_scale = gl.load(scale_at, mask=(m < num_rows) & more, other=0.0)
                part = warpgroup_mma_wait(0, deps=[part])
                acc += part * x_scale[None, :]
                x_scale = next_scale
            else:
                acc = warpgroup_mma(slots.index(slot * PIECES), inner, acc, is_async=True)
                if GATED:
                    up = warpgroup_mma(slots.index(slot * PIECES + 1), inner, up, is_async=True)
        if not BLOCKS:
            if GATED:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
        more = step + STAGES < STEPS
        at = begin + (step + STAGES) * BLOCK_K
        mbarrier.expect(barrier, STEP_BYTES, pred=more)
        _load_weight(weight, n_first, at, barrier, slots, stage, BLOCK_K, N, GATED, pred=more)
        _load_input(x, at, barrier, x_slots, stage, BLOCK_K, pred=more)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    scale = gl.load(scale_ptr + n)[:, None]
    if not BLOCKS:
        acc = acc * x_scale[None, :]
        up = up * x_scale[None, :]
    acc = acc * scale
    if BIAS:
        acc += gl.load(bias_ptr + n).to(gl.float32)[:, None]
    if GATED:
        up = up * gl.load(scale_ptr + N + n)[:, None]
        if BIAS:
            up += gl.load(bias_ptr + N + n).to(gl.float32)[:, None]
        acc = gate(acc, ACTIVATION) * up
    if CODES:
        largest = gl.maximum(gl.max(gl.abs(acc), axis=0), 1e-12) / LARGEST
        gl.store(out_scale_ptr + gl.program_id(0) * num_rows + m, largest, mask=m < num_rows)
        acc = gl.minimum(gl.maximum(acc / largest[None, :], -LARGEST), LARGEST)
    LINE: gl.constexpr = BLOCK_N // 8  # threads side by side, each with eight outputs
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [LINE, 32 // LINE], [1, WARPS], [0, 1])
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORE))
    n = n_first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORE))
    place = m.to(gl.int64)[None, :] * N + n[:, None]
    mask = (m < num_rows)[None, :]
    if PARTS:
        place += split.to(gl.int64) * num_rows * N
    if ADD:
        acc = gl.convert_layout(acc, STORE) + gl.load(residual_ptr + place, mask=mask, other=0.0).to(gl.float32)
        gl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        gl.store(out_ptr + place, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), STORE), mask=mask)
