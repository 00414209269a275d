"""Log-probabilities of drawn tokens, from the model's own logits before any penalty, bias or temperature.

On the device they are packed columns of int32 (kernels/reference/sampling.py), which travel to the host in one copy.

Log-probabilities of prompt tokens, for requests that ask: the logits of positions that nothing is drawn from.

Computed a few positions at a time, because the logits of a whole prompt may be larger than what is left of the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from inferengine.core.step_plan import TokenLogprobs
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import StepColumns
from inferengine.kernels.ops import Ops


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


POSITIONS_AT_ONCE = 64


class _Asked(NamedTuple):
    """Row `row` computes `count` positions from token `first` of the step, whose next tokens are the prompt's."""

    row: int
    first: int
    count: int
    num_alternatives: int


class PromptLogprobs:
    """Of one step; on its way to the host until `result`."""

    def __init__(self, ops: Ops, model: Any, hidden: torch.Tensor, slots: Slots, columns: StepColumns) -> None:
        """hidden [T, H] are those of the step's tokens."""
        self._asked = list(_asked(slots, columns))
        self._parts: list[list[torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        for item in self._asked:
            slot, start = int(columns.row_slot[item.row]), int(columns.row_start[item.row])
            targets = slots.tokens[slot, start + 1 : start + 1 + item.count]
            parts = []
            for begin in range(0, item.count, POSITIONS_AT_ONCE):
                end = min(begin + POSITIONS_AT_ONCE, item.count)
                logits = model.logits(hidden[item.first + begin : item.first + end])
                parts.append(_to_host(compute(ops, logits, targets[begin:end], item.num_alternatives)))
            self._parts.append(parts)
        if self._asked and hidden.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> dict[int, list[TokenLogprobs]] | None:
        """By plan row: of the tokens after each of its positions that lie in the prompt."""
        if not self._asked:
            return None
        if self._event is not None:
            self._event.synchronize()
        return {
            item.row: [one for part in parts for one in to_host(part.numpy(), [part.shape[1] // 2 - 1] * len(part))]
            for item, parts in zip(self._asked, self._parts, strict=True)
        }


def are_asked(slots: Slots, columns: StepColumns) -> bool:
    """Whether any row of the step computes prompt positions of a request that wants to know."""
    return slots.has_prompt_logprobs and bool((slots.host_prompt_end[columns.row_slot] > columns.row_start).any())


def _asked(slots: Slots, columns: StepColumns) -> Any:
    ends = np.minimum(slots.host_prompt_end[columns.row_slot], columns.row_len)
    for row in np.flatnonzero(ends > columns.row_start).tolist():
        count = int(ends[row] - columns.row_start[row])
        yield _Asked(row, int(columns.query_start[row]), count, int(slots.host_prompt_logprobs[columns.row_slot[row]]))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
