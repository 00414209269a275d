"""Products of many experts whose weights are in the block formats of GGUF files.

Pairs of token and expert are divided into blocks as in grouped.py, and codes are converted to numbers in registers as
in gemm/block_tiles.py. Gate and up are separate weights, which may have different formats. A program takes rows of
both, so that it has the gate and the up value of each output for the activation. A block of one pair uses the vector
units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from inferengine.kernels.block_codes import SUPERBLOCK, BlockWeight
from inferengine.kernels.cuda.gemm.block_tiles import GROUP, arrange, constants_of, multiply_step, planes_of
from inferengine.kernels.cuda.moe.configurations import GroupedConfig, PairConfig
from inferengine.kernels.cuda.moe.gating import ACTIVATIONS, gated
from inferengine.kernels.cuda.moe.grouped import Pairs, expert_of, most_blocks, pairs_of
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.experts import ExpertBlocks, Gating


class BlockMatrix(NamedTuple):
    """One projection of all experts, in the kernel's layout.

    Its parts are weights [experts * rows, columns] as `arrange` returned them: one for gates and one for ups, or the
    single one of the down projection. `bias` [experts * parts * rows]: for each expert the gates' before the ups'.
    """

    parts: tuple[BlockWeight, ...]
    bias: torch.Tensor | None
    num_experts: int

    @property
    def rows(self) -> int:
        """Return the rows of one expert in one part."""
        return self.parts[0].shape[0] // self.num_experts


def block_matrix(weight: ExpertBlocks, bias: torch.Tensor | None, num_experts: int) -> BlockMatrix:
    """Put a projection into the kernel's layout."""
    return BlockMatrix(tuple(arrange(part) for part in weight.parts), bias, num_experts)


def multiply_blocks(
    x: torch.Tensor,
    weight: BlockMatrix,
    pairs: Pairs,
    tuned: GroupedConfig | PairConfig,
    *,
    gating: Gating | None = None,
) -> torch.Tensor:
    """Multiply x by the weights of the chosen experts.

    With `gating`: x [T, K], one row for each token -> [T * k, rows], in the sorted order of the pairs. Without: x
    [T * k, K], in that order -> [T * k, rows], by pair number. A PairConfig is for pairs that are blocks of their own.
    """
    num_pairs, chosen = pairs.ids.numel(), pairs.ids.shape[1]
    out = x.new_empty(num_pairs, weight.rows)
    if num_pairs == 0:
        return out
    first, second = weight.parts[0], weight.parts[-1]
    columns = first.shape[1]
    by_pair = pairs.order is None or pairs.starts is None
    block_m, stages = (1, 2) if isinstance(tuned, PairConfig) else (tuned.block_m, tuned.num_stages)
    block_n = tuned.block_n if gating is None or block_m == 1 else tuned.block_n // 2  # of each part
    blocks = num_pairs if by_pair else most_blocks(num_pairs, weight.num_experts, block_m)
    constants: dict[str, Any] = constants_of(first)
    constants |= {f"{name}_2": value for name, value in constants_of(second).items()}
    _block_kernel[(blocks * triton.cdiv(weight.rows, block_n),)](
        x,
        *planes_of(first),
        *planes_of(second),
        x if weight.bias is None else weight.bias,
        pairs.ids,
        pairs.ids if pairs.order is None else pairs.order,
        pairs.ids if pairs.starts is None else pairs.starts,
        out,
        num_pairs,
        x.stride(0),
        0.0 if gating is None else gating.alpha,
        0.0 if gating is None else gating.limit,
        EXPERTS=weight.num_experts,
        BLOCK_E=triton.next_power_of_2(weight.num_experts),
        N=weight.rows,
        K=columns,
        STEP=SUPERBLOCK if columns % SUPERBLOCK == 0 else GROUP,
        CHOSEN=chosen,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **constants,
        BY_PAIR=by_pair,
        BIAS=weight.bias is not None,
        GATED=gating is not None,
        PART=pairs.is_part,
        ACTIVATION=0 if gating is None else ACTIVATIONS[gating.activation],
        num_warps=tuned.num_warps,
        num_stages=stages,
        **launch_options(supports_pdl(x.device)),
    )
    return out


@triton.jit(do_not_specialize=["num_pairs", "alpha", "limit"])
def _block_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    scale_ptr,
    min_ptr,
    sub_scale_ptr,
    sub_min_ptr,
    low_2_ptr,
    high_2_ptr,
    scale_2_ptr,
    min_2_ptr,
    sub_scale_2_ptr,
    sub_min_2_ptr,
    bias_ptr,
    ids_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_pairs,
    x_stride,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    SUBS: tl.constexpr,
    MINS: tl.constexpr,
    BITS_2: tl.constexpr,
    WIDE_2: tl.constexpr,
    OFFSET_2: tl.constexpr,
    SUBS_2: tl.constexpr,
    MINS_2: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PART: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of pairs of one expert by BLOCK_N of its N rows, in the one or two parts of the weight.

    x [T or T * k, K], out [T * k, N]; planes as `planes_of` gives them, those of the second part are named `_2`. Grid:
    (blocks * tiles of N), the tiles of a block side by side. A program computes a [BLOCK_N, BLOCK_M] tile of `out`:
    with GATED the activation of gate and up, else the product.
    """
    ROWS: tl.constexpr = EXPERTS * N
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    block = tile // N_TILES
    n = (tile % N_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 32)
    allow_next(PDL)
    wait_for_previous(PDL)
    expert, before = expert_of(block, ids_ptr, starts_ptr, num_pairs, EXPERTS, BLOCK_E, BLOCK_M, BY_PAIR)
    if PART or not BY_PAIR:
        if expert >= EXPERTS:
            return
    place, pair, valid = pairs_of(block, expert, before, order_ptr, starts_ptr, BLOCK_M, BY_PAIR)
    if GATED:
        x_row = (pair // CHOSEN).to(tl.int64)
        out_row = place.to(tl.int64)
    else:
        x_row = place.to(tl.int64)
        out_row = pair.to(tl.int64)
    row = expert.to(tl.int64) * N + tl.minimum(n, N - 1)
    if BLOCK_M == 1:
        x_at = x_ptr + x_row[:, None] * x_stride + k[None, :]
        acc = tl.zeros([BLOCK_N, 32], tl.float32)
    else:
        x_at = x_ptr + x_row[None, :] * x_stride + k[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_2 = acc
    mask = valid[None, :]
    for start in range(0, K, STEP):
        acc = multiply_step(
            acc, x_at, mask, low_ptr, high_ptr, scale_ptr, min_ptr, sub_scale_ptr, sub_min_ptr, row, start,
            ROWS, K, STEP, BITS, WIDE, OFFSET, SUBS, MINS, BLOCK_M,
        )  # fmt: skip
        if GATED:
            acc_2 = multiply_step(
                acc_2, x_at, mask, low_2_ptr, high_2_ptr, scale_2_ptr, min_2_ptr, sub_scale_2_ptr, sub_min_2_ptr, row,
                start, ROWS, K, STEP, BITS_2, WIDE_2, OFFSET_2, SUBS_2, MINS_2, BLOCK_M,
            )  # fmt: skip
    if BLOCK_M == 1:
        acc = tl.sum(acc, axis=1)[:, None]
        acc_2 = tl.sum(acc_2, axis=1)[:, None]
    if BIAS:
        if GATED:
            bias_at = bias_ptr + row + expert.to(tl.int64) * N
            acc_2 += tl.load(bias_at + N).to(tl.float32)[:, None]
        else:
            bias_at = bias_ptr + row
        acc += tl.load(bias_at).to(tl.float32)[:, None]
    if GATED:
        acc = gated(acc, acc_2, ACTIVATION, alpha, limit)
    at = out_row[None, :] * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])
