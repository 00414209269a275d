"""Log-probabilities of drawn tokens, from the model's own logits before any penalty, bias or temperature.

On the device they are packed columns of int32 (kernels/reference_logprobs.py), which travel to the host in one copy.
"""

from __future__ import annotations

import numpy as np
import torch

from inferengine.core.plan import TokenLogprobs
from inferengine.kernels.ops import Ops
from inferengine.runtime.slots import Slots


class DrawnLogprobs:
    """Those of one step: made before anything changes the logits, `launch`ed behind the draws, read on the host."""

    def __init__(self, ops: Ops, slots: Slots, draw_slots: np.ndarray, logits: torch.Tensor, *, kept: bool) -> None:
        """logits [N, V] of the draws whose slots are `draw_slots` [N]. `kept`: nothing will change them until the
        launch; else the rows that are needed are copied."""
        counts = slots.host_logprobs[draw_slots]
        self.draws = np.flatnonzero(counts >= 0)  # of the step, those that asked
        self._counts: list[int] = counts[self.draws].tolist()
        self._ops, self._slots, self._most = ops, slots, max(self._counts)
        self._index = None if kept else slots.upload(self.draws)
        self._logits = logits if self._index is None else logits.index_select(0, self._index)

    def launch(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`rows` [N] are the draws' slots on the device, `ids` [N] what was drawn. Returns the columns to be read."""
        if self._index is not None:
            rows, ids = rows[self._index], ids[self._index]
        return self._ops.token_logprobs(self._logits, self._slots.num_logprobs, rows, ids, self._most)

    def read(self, packed: torch.Tensor) -> list[TokenLogprobs]:
        """One for each of `draws`, from the columns' copy on the host."""
        columns = packed.numpy()
        return to_host(columns[self.draws] if self._index is None else columns, self._counts)


def compute(ops: Ops, logits: torch.Tensor, token_ids: torch.Tensor, num_alternatives: int) -> torch.Tensor:
    """Packed columns of rows [M, V] that all want as many alternatives; token_ids [M]."""
    most = min(num_alternatives, logits.shape[1])
    counts = torch.full((1,), most, dtype=torch.int32, device=logits.device)
    rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    return ops.token_logprobs(logits, counts, rows, token_ids, most)


def to_host(columns: np.ndarray, counts: list[int]) -> list[TokenLogprobs]:
    """Packed columns [M, 2 + 2 * most], each row with as many alternatives as it asked for."""
    most = columns.shape[1] // 2 - 1
    values = columns.view(np.float32)
    chosen, ranks = values[:, 0].tolist(), columns[:, 1].tolist()
    ids, alternatives = columns[:, 2 : 2 + most].tolist(), values[:, 2 + most :].tolist()
    if any(count != most for count in counts):
        ids = [row[:count] for row, count in zip(ids, counts, strict=True)]
        alternatives = [row[:count] for row, count in zip(alternatives, counts, strict=True)]
    return list(map(TokenLogprobs, chosen, ranks, ids, alternatives))
