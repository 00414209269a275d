"""Decode attention on the CPU over what several rows begin with: those keys are read once for all of their queries.

Rows whose block tables begin with the same blocks see the same keys there: prompts with a common system prompt, choices
of one prompt. One matrix product of all their queries with one contiguous copy of these keys takes the place of one
product for each row. The rest of each row is computed as without, and the two results are combined by their log-sum-exp
(Juravsky et al., "Hydragen", 2024; the same as cascade attention in Ye et al., "FlashInfer", 2025).

A row keeps its prefix as long as it decodes, so that what is kept of its other keys (DecodeKvCache in kernels/cpu.py)
stays in place when other rows come and go.

Invariant: the blocks of a prefix hold what its copy holds. A row holds its blocks from step to step, and full blocks
are not written again; so a prefix is discarded unless one of its rows took part in the last step and in this one, and a
row joins by the blocks that such a row has now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from inferengine.kernels.batch import StepColumns

LEAST_TOKENS = 128  # of a prefix
LEAST_SAVED = 1 << 20  # bytes of keys and values that a layer need not read again in a step; below, it costs as much
MOST_BYTES = 64 << 20  # of all prefixes of a KV group, all layers together


class Prefix:
    """The keys and values of the first blocks of some rows."""

    def __init__(self, blocks: np.ndarray, block_size: int) -> None:
        self.blocks = blocks
        self.num_tokens = len(blocks) * block_size
        self._layers: dict[int, torch.Tensor] = {}  # by the address of the layer's cache: [2, K, tokens, D]

    def keys_and_values(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the copy [2, K, tokens, D] of a layer's cache [num_blocks, 2, K, block_size, D]."""
        found = self._layers.get(kv.data_ptr())
        if found is None:
            blocks = kv.index_select(0, torch.from_numpy(self.blocks.astype(np.int64)))
            found = blocks.permute(1, 2, 0, 3, 4).reshape(2, kv.shape[2], -1, kv.shape[4])
            self._layers[kv.data_ptr()] = found
        return found


class SharedPart(NamedTuple):
    """The tokens of a step that see a prefix: [N] of those computed as decodes are; None: all of them."""

    prefix: Prefix
    tokens: torch.Tensor | None


class SharedPlan(NamedTuple):
    """What the rows of a step share. `offsets` [R]: how many first tokens of each row are in its prefix."""

    offsets: np.ndarray
    parts: list[SharedPart]

    def add(
        self,
        mixed: torch.Tensor,
        logsumexp: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return `mixed` [T, H * D], of the keys behind the prefixes, with the prefixes' share.

        `logsumexp` [T, H] is that of the scores of `mixed`, `q` [T, H, D] has been scaled. `sinks` [H]: of each head a
        score that stands for no key.
        """
        num_tokens, num_heads, head_dim = q.shape
        mixed = mixed.view(num_tokens, num_heads, head_dim)
        for prefix, tokens in self.parts:
            queries = q if tokens is None else q.index_select(0, tokens)
            shared, total = _attend(queries, prefix.keys_and_values(kv), softcap)
            own, own_total = (mixed, logsumexp) if tokens is None else (mixed[tokens], logsumexp[tokens])
            share = torch.sigmoid(total - own_total).unsqueeze(-1).to(mixed.dtype)
            both, both_total = torch.lerp(own, shared, share), torch.logaddexp(total, own_total)
            if tokens is None:
                mixed, logsumexp = both, both_total
            else:
                mixed[tokens], logsumexp[tokens] = both, both_total
        if sinks is not None:
            mixed = mixed * torch.sigmoid(logsumexp - sinks).unsqueeze(-1).to(mixed.dtype)
        return mixed.view(num_tokens, num_heads * head_dim)


def _attend(q: torch.Tensor, keys_and_values: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with scaled q [N, H, D] over keys and values [2, K, P, D] -> [N, H, D], log-sum-exp [N, H] in fp32."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, keys_and_values.shape[1]
    keys, values = keys_and_values
    queries = q.view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = torch.softmax(scores, -1)
    total = logsumexp_of(scores, weights).view(num_kv_heads, num_tokens, -1).transpose(0, 1)
    mixed = torch.bmm(weights, values).view(num_kv_heads, num_tokens, -1).transpose(0, 1)
    return mixed.reshape(num_tokens, num_heads, head_dim), total.reshape(num_tokens, num_heads)


def logsumexp_of(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of scores [.., keys] in fp32, by their softmax: its largest is exp(0) / sum."""
    return scores.amax(-1).float() - weights.amax(-1).float().log_()


class SharedPrefixes:
    """The prefixes of one KV group, and which row has which."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._prefix_of: dict[int, Prefix] = {}  # by slot
        self._last: set[int] = set()  # slots of the last step that were not given to another request since
        self._staying: set[int] = set()  # those of them that are in this step
        self._rows = b""  # slots of the step that `_plan` is of
        self._plan: SharedPlan | None = None

    def begin(self, columns: StepColumns) -> None:
        """Prepare for a step: discard what cannot be relied on any more."""
        slots = columns.row_slot.tolist()
        if self._prefix_of:
            starts = dict(zip(slots, columns.row_start.tolist(), strict=True))
            self.drop(
                slot
                for slot, prefix in self._prefix_of.items()
                if starts.get(slot, prefix.num_tokens) < prefix.num_tokens
            )
        self._staying = self._last.intersection(slots)
        self._last = set(slots)
        if self._prefix_of:
            alive = {id(prefix) for slot, prefix in self._prefix_of.items() if slot in self._staying}
            self.drop(slot for slot, prefix in self._prefix_of.items() if id(prefix) not in alive)

    def drop(self, slots: Iterable[int]) -> None:
        """Forget what these slots had: they are another request's now, or start again."""
        for slot in list(slots):
            self._last.discard(slot)
            if self._prefix_of.pop(slot, None) is not None:
                self._rows = b""

    def forget(self) -> None:
        """Discard everything."""
        self._prefix_of.clear()
        self._last.clear()
        self._rows = b""

    def plan(self, columns: StepColumns, num_rows: int, table: np.ndarray, kv: torch.Tensor) -> SharedPlan | None:
        """Return what the first `num_rows` rows share; None where that is nothing."""
        num_tokens = int(columns.query_start[num_rows])
        rows = columns.row_slot[:num_rows].tobytes()
        if rows == self._rows and num_tokens == num_rows:
            return self._plan
        self._join(columns, num_rows, table, kv)
        self._rows = rows if num_tokens == num_rows else b""
        self._plan = self._planned(columns, num_rows, num_tokens)
        return self._plan

    def _planned(self, columns: StepColumns, num_rows: int, num_tokens: int) -> SharedPlan | None:
        offsets, rows_of = np.zeros(num_rows, dtype=np.int64), dict[int, tuple[Prefix, list[int]]]()
        for row, slot in enumerate(columns.row_slot[:num_rows].tolist()):
            prefix = self._prefix_of.get(slot)
            if prefix is not None:
                offsets[row] = prefix.num_tokens
                rows_of.setdefault(id(prefix), (prefix, []))[1].append(row)
        if not rows_of:
            return None
        parts = []
        for prefix, rows in rows_of.values():
            seeing = np.isin(columns.token_row[:num_tokens], rows)
            parts.append(SharedPart(prefix, None if seeing.all() else torch.from_numpy(np.flatnonzero(seeing))))
        return SharedPlan(offsets, parts)

    def _join(self, columns: StepColumns, num_rows: int, table: np.ndarray, kv: torch.Tensor) -> None:
        """Give rows without a prefix one that there is, or one that they share with each other."""
        block_size = kv.shape[3]
        num_full = dict(
            zip(
                columns.row_slot[:num_rows].tolist(), (columns.row_start[:num_rows] // block_size).tolist(), strict=True
            )
        )
        least = -(-LEAST_TOKENS // block_size)
        alone = {slot for slot, full in num_full.items() if full >= least and slot not in self._prefix_of}
        if len(alone) + len(self._prefix_of) < 2:
            return
        for member, prefix in {id(prefix): (slot, prefix) for slot, prefix in self._members()}.values():
            count = len(prefix.blocks)
            joining = {slot for slot in alone if num_full[slot] >= count and _same(table, member, slot, count)}
            self._prefix_of |= dict.fromkeys(joining, prefix)
            alone -= joining
        alike: dict[bytes, list[int]] = {}
        for slot in sorted(alone):
            alike.setdefault(table[slot, :least].tobytes(), []).append(slot)
        of_token = 2 * kv.shape[2] * kv.shape[4] * kv.element_size()  # bytes
        for slots in alike.values():
            most = min(num_full[slot] for slot in slots)
            common = (table[slots, :most] == table[slots[0], :most]).all(0)
            count = most if common.all() else int(common.argmin())
            saved = (len(slots) - 1) * count * block_size * of_token
            taken = sum(prefix.num_tokens for prefix in {id(each): each for each in self._prefix_of.values()}.values())
            size = (taken + count * block_size) * of_token * self._num_layers
            if saved >= LEAST_SAVED and size <= MOST_BYTES:
                self._prefix_of |= dict.fromkeys(slots, Prefix(table[slots[0], :count].copy(), block_size))

    def _members(self) -> list[tuple[int, Prefix]]:
        """Return the rows that have held their blocks since the last step, and their prefixes."""
        return [(slot, prefix) for slot, prefix in self._prefix_of.items() if slot in self._staying]


def _same(table: np.ndarray, one: int, other: int, count: int) -> bool:
    """Return whether two rows begin with the same blocks."""
    return bool((table[one, :count] == table[other, :count]).all())
