"""PrefixGroups: which decode rows of a step begin with the same KV blocks, found on the host from what plans say.

Prompts with a common system prompt, and choices of one prompt, hold the same blocks. On CUDA such rows form a group,
whose common keys are read once for all of them (kernels/cuda/attention/shared_prefix.py). Groups are found again only
when the rows of a step are others than before; a block table that is written in a prefix counts as that.

Equal entries of two block tables are equal keys, whatever wrote them: a prefix is read in place, and only blocks that
are full and were computed in earlier steps are in it. So a wrong choice costs time and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferengine.core.executor import StepPlan
from inferengine.executor.settings import ExecutorSettings
from inferengine.kernels.batch import MOST_GROUPS, StepColumns
from inferengine.layers.decoder_config import DecoderConfig

WIDEST_HEAD = 512  # of which kernels/cuda/dispatch.py's prefix_attention_config has tiles
LEAST_TOKENS = 256  # of a prefix
LEAST_SAVED = 128 << 20  # bytes of keys and values that a layer need not read again; 98 MB saved an H100 nothing


def shares_prefixes(settings: ExecutorSettings, config: DecoderConfig) -> bool:
    """Return whether decode steps of a model may attend shared prefixes once: with graphs, in layers with full
    attention."""
    return (
        settings.cuda_graphs
        and settings.prefix_caching
        and not settings.deterministic
        and config.latent is None
        and None in config.group_windows
        and config.kv_shape(None).head_dim <= WIDEST_HEAD
    )


class RowGroups(NamedTuple):
    """The groups of a step's rows as host arrays, int32: SharedPrefixColumns in kernels/batch.py, but `members` without
    what follows the last group."""

    lengths: np.ndarray  # [R]
    members: np.ndarray  # [rows in groups]
    groups: np.ndarray  # [3, MOST_GROUPS]


class PrefixGroups:
    """Follows the block tables of the KV group with full attention, and finds the groups of a step's rows."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int, *, group: int, token_bytes: int) -> None:
        """`group`: the index of the KV group. `token_bytes`: of a token's keys and values in a layer. Ranks of a
        divided model must be given the same number, so that they choose alike."""
        self._block_size, self._group, self._token_bytes = block_size, group, token_bytes
        self._table = np.full((num_slots + 1, max_blocks), -1, dtype=np.int32)
        self._num_shared = np.zeros(num_slots + 1, dtype=np.int64)  # by slot: blocks of its prefix in the groups found
        self._rows = b""  # slots of the step that `_found` is of
        self._found: RowGroups | None = None

    def begin(self, plan: StepPlan) -> None:
        """Take in the changes of a step that is about to run."""
        if plan.admitted:
            self._rows = b""
        if not plan.block_updates or not plan.block_updates[self._group].slots:
            return
        slots, indices, block_ids = (np.array(column) for column in plan.block_updates[self._group])
        self._table[slots, indices] = block_ids
        if (indices < self._num_shared[slots]).any():
            self._rows = b""

    def find(self, columns: StepColumns) -> RowGroups | None:
        """Return the groups of the rows of a step in which every row decodes; None where it does not pay."""
        rows = columns.row_slot.tobytes()
        if rows != self._rows:
            self._num_shared[:] = 0
            self._found = self._grouped(columns)
            self._rows = rows
        return self._found

    def _grouped(self, columns: StepColumns) -> RowGroups | None:
        slots, num_full = columns.row_slot, columns.row_start // self._block_size
        least = -(-LEAST_TOKENS // self._block_size)
        waiting = np.flatnonzero(num_full >= least)  # rows that are in no group yet
        found: list[tuple[np.ndarray, int]] = []
        saved = 0
        while len(waiting) > 1 and len(found) < MOST_GROUPS:
            members = self._best(slots, num_full, waiting, least)
            if members is None:
                break
            count = self._num_common(slots[members], int(num_full[members].min()))
            if count < least:  # equal blocks behind different ones
                break
            found.append((members, count))
            saved += (len(members) - 1) * count * self._block_size * self._token_bytes
            waiting = np.setdiff1d(waiting, members, assume_unique=True)
        if saved < LEAST_SAVED:
            return None
        return self._columns(slots, found)

    def _best(self, slots: np.ndarray, num_full: np.ndarray, rows: np.ndarray, least: int) -> np.ndarray | None:
        """Return those of the rows that save most when they share what they have in common: of prefixes whose length
        is `least` blocks times a power of two. None where no two rows have `least` blocks in common."""
        best, most, depth = None, 0, least
        while len(rows) > 1:
            _blocks, place, counts = np.unique(
                self._table[slots[rows], depth - 1], return_inverse=True, return_counts=True
            )
            chosen = int(counts.argmax())
            if counts[chosen] < 2:
                break
            if (counts[chosen] - 1) * depth > most:
                best, most = rows[place == chosen], int(counts[chosen] - 1) * depth
            depth *= 2
            rows = rows[(counts[place] > 1) & (num_full[rows] >= depth)]
        return best

    def _num_common(self, slots: np.ndarray, most: int) -> int:
        """Return with how many equal blocks, at most `most`, all of these slots begin."""
        table = self._table[slots, :most]
        equal = (table == table[0]).all(0)
        return most if equal.all() else int(equal.argmin())

    def _columns(self, slots: np.ndarray, found: list[tuple[np.ndarray, int]]) -> RowGroups:
        lengths = np.zeros(len(slots), dtype=np.int32)
        groups = np.zeros((3, MOST_GROUPS), dtype=np.int32)
        first = 0
        for number, (members, count) in enumerate(found):
            lengths[members] = count * self._block_size
            self._num_shared[slots[members]] = count
            groups[:, number] = first, len(members), count * self._block_size
            first += len(members)
        return RowGroups(lengths, np.concatenate([members for members, _ in found]).astype(np.int32), groups)
