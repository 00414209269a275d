"""Log-probabilities of prompt tokens, for requests that ask: the logits of positions that nothing is drawn from.

Computed a few positions at a time, because the logits of a whole prompt may be larger than what is left of the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from inferengine.core.plan import TokenLogprobs
from inferengine.kernels.batch import StepColumns
from inferengine.kernels.ops import Ops
from inferengine.runtime import logprobs
from inferengine.runtime.slots import Slots

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
                parts.append(_to_host(logprobs.compute(ops, logits, targets[begin:end], item.num_alternatives)))
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
            item.row: [
                one for part in parts for one in logprobs.to_host(part.numpy(), [part.shape[1] // 2 - 1] * len(part))
            ]
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
