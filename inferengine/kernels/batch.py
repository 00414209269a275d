"""Batch: the tensors of one step, as model and ops read them. Shapes: docs/executor.md. Filled by executor/slots.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class StepColumns(NamedTuple):
    """The step as host arrays, int32: by row [R], by token [T], by draw [N]."""

    row_slot: np.ndarray
    row_start: np.ndarray
    row_len: np.ndarray
    query_start: np.ndarray
    token_row: np.ndarray
    positions: np.ndarray
    sample_rows: np.ndarray
    sample_tokens: np.ndarray
    sample_positions: np.ndarray


class NewKeys(NamedTuple):
    """What a packed qkv holds behind its queries, and what becomes of it. Usual: keys, then values, as they are."""

    has_keys: bool = True  # False: the step's keys and values are in the cache already, written by an earlier layer
    has_values: bool = True  # False: the keys are values too, as they are before their norm and their rotation
    value_norm: bool = False  # values are RMS-normed head by head, without a gain


USUAL_KEYS = NewKeys()
MOST_GROUPS = 8  # of rows that share a prefix, in a step


class SharedPrefixColumns(NamedTuple):
    """Groups of a step's decode rows whose block tables begin with the same blocks, int32 on the device.

    `lengths` [R]: tokens in the prefix of each row, fewer than it has; 0 outside of any group. `members` [R]: the rows
    of all groups, group by group. `groups` [3, MOST_GROUPS]: of each group the index of its first row in `members`, the
    number of its rows, and the tokens of its prefix; zeros for groups that there are not.
    """

    lengths: torch.Tensor
    members: torch.Tensor
    groups: torch.Tensor


class SlotMapping:
    """Where each token's K and V are written, by KV group. Computed when a group is first indexed: fused decode kernels
    work out the place themselves and never index it."""

    def __init__(self, block_tables: list[torch.Tensor], token_slot: torch.Tensor, positions: torch.Tensor, size: int):
        self._tables, self._token_slot, self._positions, self._size = block_tables, token_slot, positions, size
        self._made: dict[int, torch.Tensor] = {}

    def __getitem__(self, group: int) -> torch.Tensor:
        """Return the place block * block_size + offset of each token, [T] int64."""
        made = self._made.get(group)
        if made is None:
            positions = self._positions.long()
            block = self._tables[group][self._token_slot.long(), positions // self._size].long()
            made = self._made[group] = block * self._size + positions % self._size
        return made


class Batch:
    """The tensors of one step, as model and ops read them. `plans[group]` is what the ops prepared for attention."""

    __slots__ = (
        "block_size",
        "block_tables",
        "checksum",
        "columns",
        "decode_kv_cache",
        "input_ids",
        "isolated",
        "kept_tokens",
        "num_decodes",
        "num_rows",
        "num_samples",
        "num_tokens",
        "plans",
        "positions",
        "query_start",
        "row_len",
        "row_slot",
        "row_start",
        "sample_positions",
        "sample_rows",
        "sample_slots",
        "sample_tokens",
        "shared_prefixes",
        "slot_mapping",
        "snapshots",
        "token_row",
        "token_slot",
    )

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_samples: int
    block_size: int
    columns: StepColumns | None  # host copies; None where only the device knows
    row_slot: torch.Tensor  # [R] int32
    row_start: torch.Tensor  # [R] int32, first position computed
    row_len: torch.Tensor  # [R] int32, tokens of KV visible after this step
    query_start: torch.Tensor  # [R + 1] int32
    token_row: torch.Tensor  # [T] int32
    token_slot: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    input_ids: torch.Tensor  # [T] int32
    slot_mapping: SlotMapping  # per group [T] int64: block * block_size + offset
    block_tables: list[torch.Tensor]  # per group [S + 1, max_blocks] int32
    sample_rows: torch.Tensor  # [N] int32, row of each draw: a row that verifies k draft tokens draws 1 + k times
    sample_tokens: torch.Tensor  # [N] int32, index in [0, T) of the token it is drawn after
    sample_slots: torch.Tensor  # [N] int32
    sample_positions: torch.Tensor  # [N] int32, index of the token to be drawn
    plans: list[Any]
    decode_kv_cache: Any  # a cpu.decode_kv_cache.DecodeKvCache on the CPU; None elsewhere
    shared_prefixes: SharedPrefixColumns | None  # of layers with full attention, on CUDA; None: nothing is shared
    isolated: bool  # on the CPU: compute each row apart, because some hold NaN
    kept_tokens: torch.Tensor | None  # [N] those whose final states are wanted; None: all
    snapshots: Sequence[tuple[int, int, int]]  # of the model's states: row, tokens of its sequence, snapshot
    checksum: torch.Tensor | None  # sum of all tokens' states where the others were left: not finite if one is not

    def __init__(self) -> None:
        self.decode_kv_cache = None
        self.shared_prefixes = None
        self.isolated = False
        self.snapshots = ()
        self.kept_tokens = self.checksum = None
