"""Steady decodes on the CPU: while the same rows decode step after step, their keys and values lie side by side.

Gathering paged keys copies all of them in every layer of every step. A batch whose rows stay the same needs that once:
from then on a step adds its own tokens' keys and values to the copy. They go to the paged cache as always, which stays
the truth: a copy is forgotten as soon as anything but "the same rows, one token further" happens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from inferengine.kernels.batch import StepColumns
from inferengine.kernels.cpu_attention import FP8, block_places

KEPT_BYTES = 64 << 20  # most that is kept, all layers together
STEADY_STEPS = 2  # unchanged steps after which a copy is made: before, it might not pay for itself
ROOM = 64  # a copy has room for this many to twice as many tokens more than its longest row
RAGGED = 1.25  # padding to the longest row, over all keys, beyond which rows are too unequal to lie side by side


class LayerCopy(NamedTuple):
    """One layer's keys and values of R rows, with room for `capacity` tokens each."""

    flat: torch.Tensor  # [2 * R * K * capacity, D]: what the other two look at
    keys: torch.Tensor  # [R * K, capacity, D]
    values: torch.Tensor


class SteadyBatch:
    """Follows the steps of one executor. `copies` is filled by `keep`, by KV group."""

    def __init__(self, num_layers: int) -> None:
        self.copies: dict[int, KeptKeys] = {}
        self._num_layers = num_layers
        self._num_unchanged = 0
        self._slots: np.ndarray | None = None  # rows of the last step that succeeded, and where they stood
        self._starts: np.ndarray | None = None
        self.storage: dict[int, torch.Tensor] = {}  # by layer, used again by the next copy

    def begin(self, columns: StepColumns, num_decodes: int, *, changed: bool) -> None:
        """Before a step. `changed`: slots or blocks have new contents that no step computed."""
        continues = (
            not changed
            and self._slots is not None
            and num_decodes == len(columns.row_slot)
            and np.array_equal(columns.row_slot, self._slots)
            and np.array_equal(columns.row_start, self._starts)
        )
        self._num_unchanged = self._num_unchanged + 1 if continues else 0
        if not continues:
            self.copies.clear()
        self._slots = None

    def end(self, columns: StepColumns) -> None:
        """The step has gone through all layers."""
        self._slots, self._starts = columns.row_slot, columns.row_len

    def keep(self, columns: StepColumns, group: int, table: np.ndarray, kv: torch.Tensor) -> KeptKeys | None:
        """The copies of a group without window, ready for this step; None where there are none and none are to be."""
        kept = self.copies.get(group)
        longest = int(columns.row_len.max())
        if kept is None or longest > kept.capacity:
            self.copies.pop(group, None)
            if self._num_unchanged < STEADY_STEPS or kv.dtype == FP8:
                return None
            capacity = (longest // ROOM + 2) * ROOM
            num_numbers = 2 * len(columns.row_slot) * kv.shape[2] * capacity * kv.shape[4]
            if num_numbers * kv.element_size() * self._num_layers > KEPT_BYTES:
                return None
            if len(columns.row_slot) * longest > RAGGED * columns.row_len.sum():
                return None
            kept = self.copies[group] = KeptKeys(columns, table, kv, capacity, self.storage)
        kept.advance(columns)
        return kept


class KeptKeys:
    """Copies of the layers of one KV group."""

    def __init__(
        self, columns: StepColumns, table: np.ndarray, kv: torch.Tensor, capacity: int, storage: dict[int, torch.Tensor]
    ) -> None:
        self.capacity = capacity
        self._num_rows, self._num_kv_heads = len(columns.row_slot), kv.shape[2]
        num_blocks = -(-columns.row_len // kv.shape[3])
        index = np.minimum(np.arange(int(num_blocks.max())), num_blocks[:, None] - 1)
        self._sources = torch.from_numpy(block_places(table[columns.row_slot[:, None], index], self._num_kv_heads))
        halves_and_heads = np.arange(2 * self._num_kv_heads)
        half, head = halves_and_heads // self._num_kv_heads, halves_and_heads % self._num_kv_heads
        rows = np.arange(self._num_rows)[:, None]
        self._first_place = ((half * self._num_rows + rows) * self._num_kv_heads + head) * capacity  # [R, 2K]
        self._storage, self._layers = storage, dict[int, LayerCopy]()
        self._zero = torch.zeros((), dtype=kv.dtype)
        self._longest = self._mask_weight = 0
        self._places = self._mask = self._zero

    def advance(self, columns: StepColumns) -> None:
        """To the tokens of the next step."""
        lengths = columns.row_len
        self._longest = int(lengths.max())
        self._places = torch.from_numpy(self._first_place + columns.row_start[:, None])
        self._mask, self._mask_weight = self._zero, 0
        if int(lengths.min()) < self._longest:
            self._mask_weight = 1
            hidden = np.arange(self._longest) >= lengths[:, None]
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
            mask = np.repeat(mask, self._num_kv_heads, axis=0)[:, None]
            self._mask = torch.from_numpy(mask).to(self._zero.dtype)

    def attention(
        self, q: torch.Tensor, new: torch.Tensor, kv: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """q [R, H, D] over the keys of each row -> [R, H * D]. `new` [R, 2K, D] are the step's own keys and values,
        which are in `kv` already."""
        copy = self._layers.get(kv.data_ptr())
        if copy is None:
            copy = self._layers[kv.data_ptr()] = self._gather(kv)
        else:
            copy.flat.index_put_((self._places,), new)
        queries = q.reshape(copy.keys.shape[0], -1, q.shape[2])
        keys = copy.keys[:, : self._longest].transpose(1, 2)
        if softcap is None:
            scores = torch.baddbmm(self._mask, queries, keys, beta=self._mask_weight, alpha=scale)
        else:
            scores = torch.bmm(queries, keys).mul_(scale / softcap).tanh_().mul_(softcap).add_(self._mask)
        mixed = torch.bmm(torch.softmax(scores, -1), copy.values[:, : self._longest])
        return mixed.view(q.shape[0], -1)

    def _gather(self, kv: torch.Tensor) -> LayerCopy:
        block_size, head_dim = kv.shape[3:]
        found = kv.view(-1, block_size * head_dim).index_select(0, self._sources)
        shape = 2, self._num_rows * self._num_kv_heads, self.capacity, head_dim
        size = int(np.prod(shape))
        storage = self._storage.get(kv.data_ptr())
        if storage is None or len(storage) < size:
            storage = self._storage[kv.data_ptr()] = torch.empty(size, dtype=kv.dtype)
        both = storage[:size].view(shape)
        found = found.view(2, shape[1], -1, head_dim)
        filled = min(self.capacity, found.shape[2])
        both[:, :, :filled] = found[:, :, :filled]
        both[:, :, filled:] = 0.0  # masked, but what lies in fresh memory may be no number
        return LayerCopy(both.view(-1, head_dim), both[0], both[1])
