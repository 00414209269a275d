"""Matrix products of 17 to some hundred rows: x [M, K] @ weight [N, K]^T, tiles by the tensor memory accelerator.

Where rows are few, a product costs reading its weight; with more rows, bringing x to every multiprocessor costs as
much. Tiles are therefore as large as the accumulator allows, and the accelerator moves them without a register for an
address. The inner dimension may be cut in chunks that different programs sum; the last of a tile to arrive adds them
up in order. Gate and up rows of a weight are read side by side: silu(x G^T) * (x U^T) leaves the kernel finished.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from inferengine.kernels.cuda.activation import gate
from inferengine.kernels.cuda.dispatch import TmaTileConfig
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch, store_part, sum_parts


def tma_fits(x: torch.Tensor, weight: torch.Tensor, tuned: TmaTileConfig, *, gated: bool) -> bool:
    """Return whether the kernel takes these tensors: tensor maps want rows that begin at multiples of 16 bytes; tiles
    of the weight must be whole."""
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    aligned = weight.is_contiguous() and x.stride(1) == 1 and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return aligned and x.stride(0) * x.element_size() % 16 == 0 and x.shape[1] % 8 == 0 and width % tuned.block_n == 0


def tma_tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: TmaTileConfig,
    scratch: Scratch,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] by weight [N, K] -> [M, N], or [M, N / 2] when gated by an activation of activation.py.
    `residual` [M, N] is added in place and returned. The operands satisfy `tma_fits`."""
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    out = x.new_empty(x.shape[0], width) if residual is None else residual
    tiles = triton.cdiv(x.shape[0], tuned.block_m) * (width // tuned.block_n)
    splits = 1 if gated is not None else tuned.splits
    too_much = splits * tiles * tuned.block_m * tuned.block_n > scratch.partial.numel()
    if too_much or tiles > scratch.arrived.numel():
        splits = 1
    _launch(x, weight, tuned, scratch, splits, out, bias=bias, residual=residual, gated=gated)
    return out


def tma_parts(x: torch.Tensor, weight: torch.Tensor, tuned: TmaTileConfig, scratch: Scratch) -> torch.Tensor:
    """Multiply x [M, K] by weight [N, K] -> [splits, M, N] fp32, whose sum is the product. It lies in the scratch
    memory: the next kernel must be the one that reads it."""
    shape = (tuned.splits, x.shape[0], weight.shape[0])
    parts = scratch.partial[: tuned.splits * x.shape[0] * weight.shape[0]].view(shape)
    _launch(x, weight, tuned, scratch, tuned.splits, parts, parts=True)
    return parts


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: TmaTileConfig,
    scratch: Scratch,
    splits: int,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
    parts: bool = False,
) -> None:
    num_rows, columns = x.shape
    width = weight.shape[0] if gated is None else weight.shape[0] // 2
    if num_rows == 0:
        return
    _wide_kernel[(triton.cdiv(num_rows, tuned.block_m) * (width // tuned.block_n), splits)](
        TensorDescriptor.from_tensor(x, [tuned.block_m, tuned.block_k]),
        TensorDescriptor.from_tensor(weight, [tuned.block_n, tuned.block_k]),
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        num_rows,
        out.stride(-2),
        N=width,
        K=columns,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        BLOCK_K=tuned.block_k,
        CHUNK=triton.cdiv(triton.cdiv(columns, tuned.block_k), splits) * tuned.block_k,
        SPLITS=splits,
        PARTS=parts,
        WEIGHT_LEFT=tuned.weight_left,
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        STAGES=tuned.num_stages,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )


@triton.jit
def _product(left, right, acc, WEIGHT_LEFT: tl.constexpr):
    """x [M, K] and weight [N, K] -> acc [M, N], or its transpose when the weight is the left operand."""
    if WEIGHT_LEFT:
        return tl.dot(right, left.T, acc, input_precision="ieee")
    else:
        return tl.dot(left, right.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _wide_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x [M, K] by weight [N, K], with GATED [2 * N, K], both read by the tensor memory accelerator, -> out [M,
    N], with PARTS [SPLITS, M, N] fp32.

    Grid: (tiles of M and N, splits of K), tiles of the same weight side by side. A program sums CHUNK columns for a
    tile; without PARTS the last split to arrive adds up all and writes.
    """
    m_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    m_first = (tile % m_tiles) * BLOCK_M  # tiles of rows that read the same weight run side by side
    n_first = (tile // m_tiles) * BLOCK_N
    split = tl.program_id(1)
    allow_next(PDL)
    if WEIGHT_LEFT:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    wait_for_previous(PDL)
    k_begin = split * CHUNK
    for start in tl.range(k_begin, tl.minimum(k_begin + CHUNK, K), BLOCK_K, num_stages=STAGES):
        x = x_desc.load([m_first, start])
        acc = _product(x, weight_desc.load([n_first, start]), acc, WEIGHT_LEFT)
        if GATED:
            up = _product(x, weight_desc.load([N + n_first, start]), up, WEIGHT_LEFT)

    m = m_first + tl.arange(0, BLOCK_M)
    n = n_first + tl.arange(0, BLOCK_N)
    inner_m = tl.arange(0, BLOCK_M)
    inner_n = tl.arange(0, BLOCK_N)
    if WEIGHT_LEFT:
        m, n, inner = m[None, :], n[:, None], inner_n[:, None] * BLOCK_M + inner_m[None, :]
    else:
        m, n, inner = m[:, None], n[None, :], inner_m[:, None] * BLOCK_N + inner_n[None, :]
    place = m.to(tl.int64) * out_stride + n
    mask = m < num_rows
    if PARTS:
        tl.store(out_ptr + split.to(tl.int64) * num_rows * out_stride + place, acc, mask=mask)
        return
    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        partial = partial_ptr + (tile * SPLITS).to(tl.int64) * SIZE + inner
        if not store_part(acc, partial, arrived_ptr + tile, split, SIZE, SPLITS):
            return
        acc = sum_parts(partial, SIZE, SPLITS)
    if BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + N + n).to(tl.float32)
        acc = gate(acc, ACTIVATION) * up
    if ADD:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
