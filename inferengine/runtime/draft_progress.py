"""DraftProgress: how far a draft model has read each sequence, and which cached blocks it has read.

A draft model need not compute a step in which it does not guess: it catches up when its guesses are next asked for. So
guessing that is switched off costs nothing. What a finished sequence leaves in the prefix cache was perhaps read by the
large model only: a flag per block says which the small one has read, too. Host memory alone, numpy over rows.
"""

from __future__ import annotations

import numpy as np

from inferengine.core.plan import StepPlan


class DraftProgress:
    """Follows the plans of the large model. Blocks are those of KV group 0, which holds every position."""

    def __init__(self, num_slots: int, num_blocks: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_slots + 1, max_blocks), dtype=np.int64)
        self._is_read = np.zeros(num_blocks + 1, dtype=np.bool_)  # by block: all of its tokens
        self._num_read = np.zeros(num_slots + 1, dtype=np.int64)  # by slot: its first tokens
        self._num_marked = np.zeros(num_slots + 1, dtype=np.int64)  # by slot: leading blocks known to be flagged
        self._ahead: set[int] = set()  # slots of which guesses were read, until it is known which were right

    def begin(self, plan: StepPlan) -> None:
        """A step is about to run: take in what it changes."""
        starts = dict(zip(plan.slots, plan.starts, strict=True)) if plan.admitted else {}
        adopted = {item.slot: starts[item.slot] // self._block_size for item in plan.admitted}
        for copies in (plan.swap_in, plan.copies):
            if copies:
                self._is_read[copies[0].targets] = False
        if plan.block_updates and plan.block_updates[0].slots:
            slots, indices, block_ids = (np.array(column) for column in plan.block_updates[0])
            self._tables[slots, indices] = block_ids
            if adopted:
                first_own = np.array([adopted.get(slot, 0) for slot in plan.block_updates[0].slots])
                block_ids = block_ids[indices >= first_own]
            self._is_read[block_ids] = False
        for slot, count in adopted.items():
            shared = self._is_read[self._tables[slot, :count]]
            num_blocks = count if shared.all() else int(shared.argmin())
            self._num_read[slot] = num_blocks * self._block_size
            self._num_marked[slot] = num_blocks
        if self._ahead:
            for slot, start in zip(plan.slots, plan.starts, strict=True):
                if slot in self._ahead:
                    self._num_read[slot] = min(self._num_read[slot], start)  # what lies behind were guesses
            self._ahead.difference_update(plan.slots)

    def num_read(self, slot: int) -> int:
        """Tokens of the sequence that need not be read again."""
        return int(self._num_read[slot])

    def has_read(self, slot: int, num_known: int, num_guessed: int) -> None:
        """The draft's KV holds these first tokens of the sequence, and guesses after them."""
        self._num_read[slot] = num_known + num_guessed
        if num_guessed:
            self._ahead.add(slot)
        first, full = int(self._num_marked[slot]), num_known // self._block_size
        if full > first:
            self._is_read[self._tables[slot, first:full]] = True
            self._num_marked[slot] = full
