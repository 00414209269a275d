"""Turns a StepPlan into the tensors of one step: all columns of the plan in one int32 buffer, uploaded at once.

The host computes only what depends on the plan's integers (numpy, no loop over tokens). What depends on device state,
the input tokens and the block tables, is looked up on the device. Shapes are those of docs/executor.md.
"""

from __future__ import annotations

import numpy as np
import torch

from inferengine.core.step_plan import StepPlan
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import Batch, SlotMapping, StepColumns


def columns_of(plan: StepPlan) -> StepColumns:
    """Expand the plan's columns to tokens: a few numpy calls whatever the batch."""
    row_slot = np.array(plan.slots, dtype=np.int32)
    row_start = np.array(plan.starts, dtype=np.int32)
    num_rows = len(row_slot)
    query_start = np.zeros(num_rows + 1, dtype=np.int32)
    if plan.num_tokens == num_rows:  # one token each: nothing to expand
        row_len = row_start + 1
        query_start[1:] = _arange(num_rows + 1)[1:]
        token_row = _arange(num_rows)
        positions = row_start
    else:
        counts = np.array(plan.counts, dtype=np.int32)
        row_len = row_start + counts
        np.cumsum(counts, out=query_start[1:])
        token_row = np.repeat(_arange(num_rows), counts)
        positions = _arange(plan.num_tokens) + np.repeat(row_start - query_start[:-1], counts)
    if plan.num_decodes == num_rows:
        draws = (token_row, token_row, row_len)
    else:
        draws = _draws(plan, query_start, row_len)
    return StepColumns(row_slot, row_start, row_len, query_start, token_row, positions, *draws)


def _draws(plan: StepPlan, query_start: np.ndarray, row_len: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, token, position drawn) of every draw. A row with k draft tokens draws after each of its last 1 + k
    tokens."""
    rows = np.flatnonzero(np.array(plan.samples, dtype=np.bool_)).astype(np.int32)
    if not plan.num_drafts or not any(plan.num_drafts):
        return rows, query_start[1:][rows] - 1, row_len[rows]
    draws = np.array(plan.num_drafts, dtype=np.int32)[rows] + 1
    before_last = np.repeat(np.cumsum(draws), draws) - _arange(int(draws.sum())) - 1  # draft tokens still to come
    rows = np.repeat(rows, draws)
    return (
        rows,
        (query_start[1:][rows] - 1 - before_last).astype(np.int32),
        (row_len[rows] - before_last).astype(np.int32),
    )


def make_batch(plan: StepPlan, columns: StepColumns, slots: Slots, device: torch.device) -> Batch:
    """Upload the columns (one copy) and look the rest up on the device, for a step that no CUDA graph holds."""
    batch = Batch()
    batch.columns = columns
    batch.num_tokens, batch.num_rows, batch.num_decodes = plan.num_tokens, len(columns.row_slot), plan.num_decodes
    batch.num_samples = len(columns.sample_rows)
    parts = _upload(columns, device)
    batch.row_slot, batch.row_start, batch.row_len, batch.query_start = parts[0], parts[1], parts[2], parts[3]
    batch.token_row, batch.positions = parts[4], parts[5]
    batch.sample_rows, batch.sample_tokens, batch.sample_positions = parts[6], parts[7], parts[8]
    if device.type == "cpu":
        _look_up_on_host(batch, columns, slots)
    else:
        _look_up_on_device(batch, slots)
    return batch


def _look_up_on_host(batch: Batch, columns: StepColumns, slots: Slots) -> None:
    """Do what `_look_up_on_device` does by numpy, whose calls on a few numbers cost a fifth of torch's."""
    batch.block_size = slots.block_size
    batch.block_tables = slots.block_tables
    token_slot = columns.row_slot[columns.token_row]
    batch.token_slot = torch.from_numpy(token_slot)
    batch.input_ids = torch.from_numpy(slots.tokens.numpy()[token_slot, columns.positions])
    batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
    batch.sample_slots = torch.from_numpy(columns.row_slot[columns.sample_rows])
    batch.plans = []


def advance_by_one(columns: StepColumns, batch: Batch, slots: Slots) -> None:
    """On the CPU: change both, of rows of one token each, into the step that computes the next token. The tensors of
    the batch share memory with the columns; `positions` is `row_start`, and `sample_positions` is `row_len`."""
    if columns.positions is not columns.row_start or columns.sample_positions is not columns.row_len:
        raise RuntimeError("only rows of one token each can be advanced")
    np.add(columns.row_start, 1, out=columns.row_start)
    np.add(columns.row_len, 1, out=columns.row_len)
    batch.isolated = False
    _look_up_on_host(batch, columns, slots)


def _look_up_on_device(batch: Batch, slots: Slots) -> None:
    """Fill in what device state decides: input tokens and KV places. Device operations only."""
    batch.block_size = slots.block_size
    batch.block_tables = slots.block_tables
    one_each = batch.num_tokens == batch.num_rows
    batch.token_slot = batch.row_slot if one_each else batch.row_slot.index_select(0, batch.token_row)
    batch.input_ids = slots.tokens[batch.token_slot.long(), batch.positions.long()]
    batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
    all_sample = batch.num_decodes == batch.num_rows
    batch.sample_slots = batch.row_slot if all_sample else batch.row_slot.index_select(0, batch.sample_rows)
    batch.plans = []


def _upload(columns: StepColumns, device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    # Each column begins at a multiple of 16 bytes: the kernels are compiled for that, and would be compiled anew where
    # it happened not to hold.
    begins = np.cumsum([0, *(-(-len(column) // 4) * 4 for column in columns)])
    host = np.zeros(int(begins[-1]), dtype=np.int32)
    for begin, column in zip(begins, columns, strict=False):
        host[begin : begin + len(column)] = column
    packed = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    return [packed[begin : begin + len(column)] for begin, column in zip(begins.tolist(), columns, strict=False)]


_ARANGE = np.arange(1 << 16, dtype=np.int32)


def _arange(count: int) -> np.ndarray:
    return _ARANGE[:count] if count <= len(_ARANGE) else np.arange(count, dtype=np.int32)
