"""Matrix products with 4-bit weights in groups: x [M, K] @ ((codes - zeros) * scales)^T, made in registers.

Eight codes share an int32 word. The columns of a row are cut in slices (a group, or a part of one): in a slice of P
words, nibble i of word j is column i * P + j, so that the nibbles of a word share a scale and neighbouring words meet
neighbouring elements of x. One int32 beside each slice holds its scale and zero point, both fp16.

A nibble becomes a float without a conversion: or-ed into the mantissa of 2^7 or 2^11 it is that number plus the code,
and the sum of what was added is subtracted once for a word (Kim et al. 2022 do so with fp16).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from inferengine.kernels.activation import gate
from inferengine.kernels.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.quantized import BlockTuning, VectorTuning
from inferengine.kernels.scratch import Scratch


class NibbleWeight(NamedTuple):
    """`words` [N, S * P] int32 for S slices of P words; `points` [N, S] int32: fp16 scale below, fp16 zero above."""

    words: torch.Tensor
    points: torch.Tensor
    columns: int  # K; the last slice may be longer than what is left

    @property
    def slice_words(self) -> int:
        return self.words.shape[1] // self.points.shape[1]


def pack_nibbles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int) -> NibbleWeight:
    """codes [N, K] uint8 below 16, scales and zeros [N, ceil(K / group)]. `group` is a power of two from 16 on, a
    multiple of 128, or at least K."""
    rows, columns = codes.shape
    width = group if group < 128 else 128
    padded = torch.nn.functional.pad(codes, (0, -columns % width))
    slices = padded.shape[1] // width
    lanes = padded.view(rows, slices, 8, width // 8).to(torch.int32)
    words = torch.zeros(rows, slices, width // 8, dtype=torch.int32, device=codes.device)
    for nibble in range(8):
        words |= lanes[:, :, nibble] << (4 * nibble)
    of_group = torch.arange(slices, device=codes.device) * width // group
    low = scales.half()[:, of_group].view(torch.int16).to(torch.int32) & 0xFFFF
    high = zeros.half()[:, of_group].view(torch.int16).to(torch.int32) << 16
    return NibbleWeight(words.flatten(1), (low | high).contiguous(), columns)


def vector_product(
    x: torch.Tensor,
    weight: NibbleWeight,
    tuned: VectorTuning,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: int | None = None,
) -> torch.Tensor:
    """x [1, K] -> [1, N], or [1, N / 2] when gated. `tuned.block_k` counts words. See quantized.vector_product."""
    rows = weight.words.shape[0]
    width = rows if gated is None else rows // 2
    out = residual if residual is not None else x.new_empty(1, width)
    _vector_kernel[(triton.cdiv(width, tuned.block_n),)](
        x,
        weight.words,
        weight.points,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        N=width,
        K=weight.columns,
        WORDS=weight.words.shape[1],
        SLICE=weight.slice_words,
        BLOCK_N=tuned.block_n,
        BLOCK_W=tuned.block_k,
        ADD=residual is not None,
        BIAS=bias is not None,
        GATED=gated is not None,
        ACTIVATION=gated or 0,
        HARDWARE=x.is_cuda,
        num_warps=tuned.num_warps,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def tile_product(
    x: torch.Tensor,
    weight: NibbleWeight,
    tuned: BlockTuning,
    scratch: Scratch,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] -> [M, N]. `tuned.block_k` counts words. `residual` [M, N] is added in place and returned."""
    num_rows, width, words = x.shape[0], weight.words.shape[0], weight.words.shape[1]
    out = residual if residual is not None else x.new_empty(num_rows, width)
    if num_rows == 0:
        return out
    tiles = triton.cdiv(num_rows, tuned.block_m) * triton.cdiv(width, tuned.block_n)
    splits = tuned.chunks
    if splits * tiles * tuned.block_m * tuned.block_n > scratch.partial.numel() or tiles > scratch.arrived.numel():
        splits = 1
    _tile_kernel[(tiles, splits)](
        x,
        weight.words,
        weight.points,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        num_rows,
        x.stride(0),
        out.stride(0),
        N=width,
        K=weight.columns,
        WORDS=words,
        SLICE=weight.slice_words,
        BLOCK_M=tuned.block_m,
        BLOCK_N=tuned.block_n,
        BLOCK_W=tuned.block_k,
        CHUNK=triton.cdiv(triton.cdiv(words, tuned.block_k), splits) * tuned.block_k,
        SPLITS=splits,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


def to_numbers(weight: NibbleWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight as numbers [N, K], for products with so many rows that making them is the lesser part."""
    rows, words = weight.words.shape
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.words.device)
    _numbers_kernel[(rows, triton.cdiv(words, 256))](
        weight.words, weight.points, out, K=weight.columns, WORDS=words, SLICE=weight.slice_words, BLOCK_W=256
    )
    return out


@triton.jit
def _scale_and_zero(points):
    scale = (points & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (points >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero


@triton.jit
def _high(words, HARDWARE: tl.constexpr):
    """128 + the nibble in bits 16 to 19, as float32. And-or is one instruction, which the compiler does not find."""
    if HARDWARE:
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F0000, 0x43000000, 0xEA;", "=r,r", [words], tl.int32, is_pure=True, pack=1
        )
    else:
        number = (words & 0x000F0000) | 0x43000000
    return number.to(tl.float32, bitcast=True)


@triton.jit
def _low(words, HARDWARE: tl.constexpr):
    """2048 + the nibble in bits 12 to 15, as float32."""
    if HARDWARE:
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x0000F000, 0x45000000, 0xEA;", "=r,r", [words], tl.int32, is_pure=True, pack=1
        )
    else:
        number = (words & 0x0000F000) | 0x45000000
    return number.to(tl.float32, bitcast=True)


@triton.jit
def _row_sum(words, points, x0, x1, x2, x3, x4, x5, x6, x7, offset, total, HARDWARE: tl.constexpr):
    """Sum over the eight columns of each word: words and points [BLOCK_N, BLOCK_W], x [BLOCK_W] by nibble."""
    acc = _high(words, HARDWARE) * x4[None, :]  # one after the other: each a multiply-add
    acc = acc + _low(words, HARDWARE) * x3[None, :]
    left = words << 8
    acc = acc + _high(left, HARDWARE) * x2[None, :]
    acc = acc + _low(left, HARDWARE) * x1[None, :]
    right = words >> 8
    acc = acc + _high(right, HARDWARE) * x6[None, :]
    acc = acc + _low(right, HARDWARE) * x5[None, :]
    acc = acc + _high(words << 16, HARDWARE) * x0[None, :]
    acc = acc + _low(words >> 16, HARDWARE) * x7[None, :]
    scale, zero = _scale_and_zero(points)
    return scale * (acc - offset[None, :] - zero * total[None, :])


@triton.jit
def _vector_kernel(
    x_ptr,
    words_ptr,
    points_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.arange(0, BLOCK_W)
    row = tl.minimum(n, N - 1).to(tl.int64)
    words_at = words_ptr + row[:, None] * WORDS + w[None, :]
    points_at = points_ptr + row[:, None] * (WORDS // SLICE)
    mask = w[None, :] < WORDS
    left = tl.load(words_at, mask=mask, other=0)
    left_points = tl.load(points_at + (w // SLICE)[None, :], mask=mask, other=0)
    if GATED:
        right = tl.load(words_at + N * WORDS, mask=mask, other=0)
        right_points = tl.load(points_at + N * (WORDS // SLICE) + (w // SLICE)[None, :], mask=mask, other=0)
    allow_next(PDL)
    wait_for_previous(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_W):
        at = start + w
        column = tl.max_contiguous(at // SLICE * (SLICE * 8) + at % SLICE, 4)  # as many of x as words in a thread
        x0 = _input(x_ptr, column, K)
        x1 = _input(x_ptr, column + SLICE, K)
        x2 = _input(x_ptr, column + 2 * SLICE, K)
        x3 = _input(x_ptr, column + 3 * SLICE, K)
        x4 = _input(x_ptr, column + 4 * SLICE, K)
        x5 = _input(x_ptr, column + 5 * SLICE, K)
        x6 = _input(x_ptr, column + 6 * SLICE, K)
        x7 = _input(x_ptr, column + 7 * SLICE, K)
        even = x0 + x2 + x4 + x6
        odd = x1 + x3 + x5 + x7
        offset = 128.0 * even + 2048.0 * odd
        acc += _row_sum(left, left_points, x0, x1, x2, x3, x4, x5, x6, x7, offset, even + odd, HARDWARE)
        if GATED:
            acc_up += _row_sum(right, right_points, x0, x1, x2, x3, x4, x5, x6, x7, offset, even + odd, HARDWARE)
        if start + BLOCK_W < WORDS:
            ahead = start + BLOCK_W + w
            mask = ahead[None, :] < WORDS
            left = tl.load(words_at + start + BLOCK_W, mask=mask, other=0)
            left_points = tl.load(points_at + (ahead // SLICE)[None, :], mask=mask, other=0)
            if GATED:
                right = tl.load(words_at + N * WORDS + start + BLOCK_W, mask=mask, other=0)
                right_points = tl.load(points_at + N * (WORDS // SLICE) + (ahead // SLICE)[None, :], mask=mask, other=0)
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + N + row).to(tl.float32)
        result = gate(result, ACTIVATION) * up
    if ADD:
        result += tl.load(residual_ptr + row).to(tl.float32)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _input(x_ptr, column, K: tl.constexpr):
    return tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _tile_kernel(
    x_ptr,
    words_ptr,
    points_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_id = tl.program_id(0)
    m_tile = tile_id // N_TILES
    n_tile = tile_id % N_TILES
    split = tl.program_id(1)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tl.arange(0, BLOCK_W)
    row = tl.minimum(n, N - 1).to(tl.int64)
    row_mask = m < num_rows
    allow_next(PDL)
    wait_for_previous(PDL)
    x_row = x_ptr + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = split * CHUNK
    for start in range(begin, min(begin + CHUNK, WORDS), BLOCK_W):
        at = start + w
        mask = (at < WORDS)[None, :]
        words = tl.load(words_ptr + row[:, None] * WORDS + at[None, :], mask=mask, other=0)
        points = tl.load(points_ptr + row[:, None] * (WORDS // SLICE) + (at // SLICE)[None, :], mask=mask, other=0)
        scale, zero = _scale_and_zero(points)
        column = at // SLICE * (SLICE * 8) + at % SLICE
        for nibble in tl.static_range(8):
            inner = column + nibble * SLICE
            x = tl.load(x_row + inner[:, None], mask=row_mask[None, :] & (inner < K)[:, None], other=0.0)
            numbers = ((((words >> (4 * nibble)) & 15).to(tl.float32) - zero) * scale).to(x.dtype)
            acc = tl.dot(numbers, x, acc, input_precision="ieee")

    if SPLITS > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        inside = tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_M)[None, :] * BLOCK_N
        partial = partial_ptr + (tile_id * SPLITS).to(tl.int64) * TILE + inside
        tl.store(partial + split * TILE, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile_id, 1, sem="acq_rel", scope="gpu")
        if before != SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrived_ptr + tile_id, 0)
        acc = tl.load(partial, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(partial + other * TILE, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = row_mask[None, :] & (n < N)[:, None]
    if ADD:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _numbers_kernel(
    words_ptr,
    points_ptr,
    out_ptr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    words = tl.load(words_ptr + row * WORDS + at, mask=at < WORDS, other=0)
    points = tl.load(points_ptr + row * (WORDS // SLICE) + at // SLICE, mask=at < WORDS, other=0)
    scale, zero = _scale_and_zero(points)
    column = at // SLICE * (SLICE * 8) + at % SLICE
    for nibble in tl.static_range(8):
        number = (((words >> (4 * nibble)) & 15).to(tl.float32) - zero) * scale
        inner = column + nibble * SLICE
        tl.store(out_ptr + row * K + inner, number.to(out_ptr.dtype.element_ty), mask=(at < WORDS) & (inner < K))
