"""Paged decode attention of rows that begin with the same blocks: these keys are read once for the rows of a group.

By itself each row of a decode step reads its whole context, in products of one KV head's few queries with it. Rows of a
group see the same keys where their block tables are equal, so the queries of all of them, and of all heads of a KV
head, are one matrix: a tile of it is multiplied with the prefix as a prompt's queries are. The rest of each row is left
to decode.py, whose first program of a row begins with what was found here; the two parts are joined by their
log-sum-exp (Juravsky et al., "Hydragen", 2024; the same as cascade attention in Ye et al., "FlashInfer", 2025).

Which rows form groups, and how long their prefixes are, is known on the device alone (`SharedPrefixColumns` in
kernels/batch.py), so that one CUDA graph serves every grouping: a fixed number of programs share whatever work there
is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferengine.kernels.batch import MOST_GROUPS, SharedPrefixColumns
from inferengine.kernels.cuda.attention.decode import (
    PrefixParts,
    attend_tile,
    decode_attention,
    load_tile,
    share_of_tiles,
)
from inferengine.kernels.cuda.dispatch import PROGRAMS, PrefixConfig, prefix_attention_config
from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.cuda.split_k import Scratch

ALIGNED = 32  # floats: parts begin at multiples of 128 bytes


def shared_decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    row_len: torch.Tensor,
    block_table: torch.Tensor,
    shared: SharedPrefixColumns,
    scale: float,
    softcap: float | None,
    scratch: Scratch,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    sinks: torch.Tensor | None = None,
    config: PrefixConfig | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Do `decode_attention` with q [B, H, D] -> [B, H*D], the rows' shared prefixes once for all rows of a group.

    Arguments as of `decode_attention`, without a window. Where the results of the prefixes do not fit into the scratch
    memory, every row is attended by itself.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    if config is None:
        is_fp32 = q.dtype == torch.float32
        config = prefix_attention_config(num_rows, num_heads, num_kv_heads, head_dim, is_fp32=is_fp32)
    prefixes = None
    floats = num_rows * num_heads * (head_dim + 1)  # of one part
    if config is not None and floats + ALIGNED <= scratch.partial.numel():
        splits = config.num_splits
        while splits * floats + ALIGNED > scratch.partial.numel():
            splits //= 2
        prefixes = _attend_prefixes(q, kv, row_slot, block_table, shared, scale * kv_scales[0], softcap, scratch,
                                    config._replace(num_splits=splits))  # fmt: skip
        scratch = scratch.behind(-(-splits * floats // ALIGNED) * ALIGNED)
    return decode_attention(
        q, kv, row_slot, row_len, block_table, scale, None, softcap, scratch, kv_scales=kv_scales, sinks=sinks,
        num_splits=num_splits, prefixes=prefixes,
    )  # fmt: skip


def _attend_prefixes(
    q: torch.Tensor,
    kv: torch.Tensor,
    row_slot: torch.Tensor,
    block_table: torch.Tensor,
    shared: SharedPrefixColumns,
    scale: float,
    softcap: float | None,
    scratch: Scratch,
    config: PrefixConfig,
) -> PrefixParts:
    """Attend with the rows of all groups over their prefixes. The results lie at the beginning of the scratch memory;
    those of rows outside of any group are not written."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    block_group = triton.next_power_of_2(group)
    rows_of_tile = config.block_m // block_group
    results = num_rows * config.num_splits * num_heads * head_dim
    parts = PrefixParts(
        shared.lengths, scratch.partial, scratch.partial[results:], config.num_splits, config.block_tokens,
        config.min_tiles,
    )  # fmt: skip
    options: dict[str, Any] = launch_options(supports_pdl(q.device))
    most_tiles = num_rows // rows_of_tile + MOST_GROUPS  # of any grouping
    num_programs = min(PROGRAMS, most_tiles * config.num_splits * num_kv_heads)
    _prefix_kernel[(num_programs,)](
        q,
        kv,
        row_slot,
        block_table,
        shared.members,
        shared.groups,
        parts.results,
        parts.logsumexp,
        q.stride(0),
        block_table.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        shared.groups.stride(0),
        scale,
        softcap or 0.0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_GROUP=block_group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=kv.shape[3],
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_tokens,
        SPLITS=config.num_splits,
        MIN_TILES=config.min_tiles,
        MOST_GROUPS=MOST_GROUPS,
        NUM_PROGRAMS=num_programs,
        SOFTCAP=softcap is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    return parts


@triton.jit
def _prefix_kernel(
    q_ptr,
    kv_ptr,
    row_slot_ptr,
    table_ptr,
    members_ptr,
    groups_ptr,
    partial_ptr,
    logsumexp_ptr,
    q_stride,
    table_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    groups_stride,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with queries q [B, H, D] of rows in groups over the keys that a group's rows share -> results [B, K,
    SPLITS, GROUP, D] and log-sum-exp [B, K, SPLITS, GROUP], as PrefixParts has them.

    Grid: (NUM_PROGRAMS). Groups have their tiles of BLOCK_M queries one after the other, each as many as its rows need,
    with BLOCK_GROUP places for each row. A unit of work is one tile's queries of a KV head over one split of the
    prefix; programs take units in turn.
    """
    ROWS: tl.constexpr = BLOCK_M // BLOCK_GROUP
    allow_next(PDL)
    groups = tl.arange(0, MOST_GROUPS)
    num_tiles = tl.cdiv(tl.load(groups_ptr + groups_stride + groups), ROWS)
    ends = tl.cumsum(num_tiles, 0)
    num_units = tl.sum(num_tiles, 0) * SPLITS * NUM_KV_HEADS
    m = tl.arange(0, BLOCK_M)
    g = m % BLOCK_GROUP
    d = tl.arange(0, BLOCK_DIM)[None, :]
    wait_for_previous(PDL)
    for turn in range(0, tl.cdiv(num_units - tl.program_id(0), NUM_PROGRAMS)):
        unit = tl.program_id(0) + turn * NUM_PROGRAMS
        kv_head = unit % NUM_KV_HEADS
        split = unit // NUM_KV_HEADS % SPLITS
        tile = unit // (NUM_KV_HEADS * SPLITS)
        group = tl.sum((ends <= tile).to(tl.int32), 0)
        first = tl.load(groups_ptr + group)
        num_members = tl.load(groups_ptr + groups_stride + group)
        length = tl.load(groups_ptr + 2 * groups_stride + group)
        tiles_per_split, active = share_of_tiles(tl.cdiv(length, BLOCK_T), SPLITS, MIN_TILES)
        begin = split * tiles_per_split * BLOCK_T
        end = tl.minimum(begin + tiles_per_split * BLOCK_T, length)

        first_row = (tile - tl.sum(tl.where(groups < group, num_tiles, 0), 0)) * ROWS
        place = first_row + m // BLOCK_GROUP
        is_member = (place < num_members) & (split + m * 0 < active)
        row = tl.load(members_ptr + first + place, mask=is_member, other=0).to(tl.int64)
        slot = tl.load(row_slot_ptr + tl.load(members_ptr + first)).to(tl.int64)
        is_query = is_member & (g < GROUP)
        mask = is_query[:, None] & (d < HEAD_DIM)
        table_row = table_ptr + slot * table_stride
        head_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride

        q = tl.load(q_ptr + (row * q_stride + (kv_head * GROUP + g) * HEAD_DIM)[:, None] + d, mask=mask, other=0.0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        for start in range(begin, end, BLOCK_T):
            k, v = load_tile(
                head_ptr, table_row, start, end, kv_block_stride, kv_value_stride, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE,
                BLOCK_T,
            )  # fmt: skip
            acc, total, peak = attend_tile(
                acc, total, peak, q, k, v, start, end, 0, scale, softcap, BLOCK_T, False, SOFTCAP
            )
        part = ((row * NUM_KV_HEADS + kv_head) * SPLITS + split) * GROUP + g
        total = tl.maximum(total, 1.0e-30)  # a split without tiles has nothing
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + d, acc / total[:, None], mask=mask)
        tl.store(logsumexp_ptr + part, peak + tl.log2(total), mask=is_query)
