"""Attention on the CPU against the definition: decodes, rows with drafts to verify, and prompt chunks in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferengine.kernels import cpu
from inferengine.kernels.batch import Batch, StepColumns
from tests.kernels.builders import PagedCase, make_paged_case, reference_attention, relative_error, tolerance

SHAPES = [(6, 2, 16, 16, None, None), (4, 4, 8, 4, 9, None), (4, 1, 8, 8, 70, 20.0)]
ROWS = {  # tokens of each row's KV after the step, and how many of them are new
    "decodes": ([1, 300, 64], [1, 1, 1]),
    "equal drafts": ([40, 41, 39], [5, 5, 5]),
    "unequal drafts": ([7, 600, 33, 90], [2, 9, 1, 16]),
    "one row of drafts": ([50], [6]),
    "decodes, drafts and prompts": ([12, 90, 33, 400, 40, 40], [1, 1, 4, 3, 40, 5]),
}


def batch_of(case: PagedCase, num_decodes: int) -> Batch:
    row_slot, row_start, row_len, query_start = (
        column.numpy() for column in (case.row_slot, case.row_start, case.row_len, case.query_start)
    )
    counts = row_len - row_start
    token_row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(row_start, row_len, strict=True)])
    nothing = np.empty(0, dtype=np.int32)
    batch = Batch()
    batch.columns = StepColumns(
        row_slot, row_start, row_len, query_start, token_row, positions, nothing, nothing, nothing
    )
    batch.num_rows, batch.num_decodes, batch.num_tokens = len(counts), num_decodes, len(token_row)
    batch.block_tables = [case.block_table]
    return batch


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "softcap"), SHAPES)
def test_every_kind_of_row_equals_the_definition(rows, heads, kv_heads, head_dim, block_size, window, softcap):
    row_lens, counts = ROWS[rows]
    case = make_paged_case(row_lens, counts, kv_heads, head_dim, block_size, torch.float32, torch.device("cpu"))
    num_decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
    batch = batch_of(case, num_decodes)
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, window)]
    q = torch.randn(sum(counts), heads, head_dim)
    out = cpu.attention(q, case.kv, batch, 0, 0.2, window, softcap)
    expected = reference_attention(q, case, 0.2, window, softcap)
    assert relative_error(out, expected) < tolerance(torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "softcap"), SHAPES)
@pytest.mark.parametrize("sharing", [[0, 1, 2, 3], [0, 1], [1, 3]])
def test_prompts_that_begin_alike_equal_the_definition(sharing, heads, kv_heads, head_dim, block_size, window, softcap):
    counts = [30, 20, 40, 25]
    case = make_paged_case(
        [75, 60, 100, 90], counts, kv_heads, head_dim, block_size, torch.float32, torch.device("cpu")
    )
    slots = case.row_slot[sharing].long()
    case.block_table[slots, : 40 // block_size] = case.block_table[slots[0], : 40 // block_size]
    batch = batch_of(case, 0)
    batch.plans = [cpu.prepare_attention(batch, 0, case.kv, window)]
    q = torch.randn(sum(counts), heads, head_dim)
    out = cpu.attention(q, case.kv, batch, 0, 0.2, window, softcap)
    assert relative_error(out, reference_attention(q, case, 0.2, window, softcap)) < tolerance(torch.float32)


def test_a_tile_reads_what_its_prompts_begin_with_once():
    case = make_paged_case([100, 100, 100], [20, 20, 20], 2, 8, 4, torch.float32, torch.device("cpu"))
    apart = cpu.prepare_attention(batch_of(case, 0), 0, case.kv, None).tiles
    case.block_table[:, :18] = case.block_table[int(case.row_slot[0]), :18]
    (tile,) = cpu.prepare_attention(batch_of(case, 0), 0, case.kv, None).tiles
    assert [part.mask.shape[1] for part in apart] == [300]
    assert tile.mask.shape[1] == 300 - 2 * 72
    assert len(tile.places) == 2 * 2 * tile.mask.shape[1] // 4  # keys and values of two heads, by block
