"""Log-probabilities of drawn tokens and of prompt tokens, from the model's own logits before any penalty, bias or
temperature.

On the device they are packed columns of int32 (kernels/reference/sampling.py), copied to the host at once. Those of
prompt tokens need the logits of positions that nothing is drawn from; they are computed a few positions at a time,
because the logits of a whole prompt may be larger than the free memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from inferengine.core.step_plan import TokenLogprobs
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import StepColumns
from inferengine.kernels.ops import Ops
from inferengine.models.decoder import DecoderModel

POSITIONS_AT_ONCE = 64  # of a prompt


class DrawnLogprobs:
    """Log-probabilities of one step's draws. Made before anything changes the logits, launched behind the draws, read
    on the host."""

    def __init__(self, ops: Ops, slots: Slots, draw_slots: np.ndarray, logits: torch.Tensor, *, kept: bool) -> None:
        """`logits` [N, V] are those of the draws whose slots are `draw_slots` [N]. `kept`: they do not change until
        `launch`; otherwise the rows that are needed are copied."""
        counts = slots.host_logprobs[draw_slots]
        self.draws = np.flatnonzero(counts >= 0)  # indices of the draws whose requests want log-probabilities
        self._counts: list[int] = counts[self.draws].tolist()
        self._ops, self._slots, self._most = ops, slots, max(self._counts)
        self._index = None if kept else slots.upload(self.draws)
        self._logits = logits if self._index is None else logits.index_select(0, self._index)

    def launch(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute them on the device. `rows` [N] are the draws' slots, `ids` [N] the drawn tokens. Returns packed
        columns."""
        if self._index is not None:
            rows, ids = rows[self._index], ids[self._index]
        return self._ops.token_logprobs(self._logits, self._slots.num_logprobs, rows, ids, self._most)

    def read(self, packed: torch.Tensor) -> list[TokenLogprobs]:
        """Unpack the columns' copy on the host: one item for each of `draws`."""
        columns = packed.numpy()
        return _unpack(columns[self.draws] if self._index is None else columns, self._counts)


def _columns(ops: Ops, logits: torch.Tensor, token_ids: torch.Tensor, num_alternatives: int) -> torch.Tensor:
    """Packed columns for token_ids [M] and logits [M, V] of rows that all want as many alternatives."""
    most = min(num_alternatives, logits.shape[1])
    counts = torch.full((1,), most, dtype=torch.int32, device=logits.device)
    rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    return ops.token_logprobs(logits, counts, rows, token_ids, most)


def _unpack(columns: np.ndarray, counts: list[int]) -> list[TokenLogprobs]:
    """Unpack columns [M, 2 + 2 * most]; row i gets its first counts[i] alternatives."""
    most = columns.shape[1] // 2 - 1
    values = columns.view(np.float32)
    chosen, ranks = values[:, 0].tolist(), columns[:, 1].tolist()
    ids, alternatives = columns[:, 2 : 2 + most].tolist(), values[:, 2 + most :].tolist()
    if any(count != most for count in counts):
        ids = [row[:count] for row, count in zip(ids, counts, strict=True)]
        alternatives = [row[:count] for row, count in zip(alternatives, counts, strict=True)]
    return list(map(TokenLogprobs, chosen, ranks, ids, alternatives))


class _PromptPart(NamedTuple):
    """`num_positions` positions of row `row`, from token `first` of the step on, whose next tokens are the prompt's."""

    row: int
    first: int
    num_positions: int
    num_alternatives: int


class StepPromptLogprobs:
    """Log-probabilities of the prompt tokens of one step, copied to the host in the background until `result`."""

    def __init__(self, ops: Ops, model: DecoderModel, hidden: torch.Tensor, slots: Slots, columns: StepColumns) -> None:
        """`hidden` [T, H] are the states of the step's tokens."""
        self._parts = list(_prompt_parts(slots, columns))
        self._copies: list[list[torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        for item in self._parts:
            slot, start = int(columns.row_slot[item.row]), int(columns.row_start[item.row])
            targets = slots.tokens[slot, start + 1 : start + 1 + item.num_positions]
            parts = []
            for begin in range(0, item.num_positions, POSITIONS_AT_ONCE):
                end = min(begin + POSITIONS_AT_ONCE, item.num_positions)
                logits = model.logits(hidden[item.first + begin : item.first + end])
                parts.append(_to_host(_columns(ops, logits, targets[begin:end], item.num_alternatives)))
            self._copies.append(parts)
        if self._parts and hidden.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> dict[int, list[TokenLogprobs]] | None:
        """Wait for the copies. By plan row: one item for the prompt token after each of the row's positions."""
        if not self._parts:
            return None
        if self._event is not None:
            self._event.synchronize()
        return {
            item.row: [one for part in parts for one in _unpack(part.numpy(), [part.shape[1] // 2 - 1] * len(part))]
            for item, parts in zip(self._parts, self._copies, strict=True)
        }


def _prompt_parts(slots: Slots, columns: StepColumns) -> Iterator[_PromptPart]:
    ends = np.minimum(slots.host_prompt_end[columns.row_slot], columns.row_len)
    for row in np.flatnonzero(ends > columns.row_start).tolist():
        count = int(ends[row] - columns.row_start[row])
        num_alternatives = int(slots.host_prompt_logprobs[columns.row_slot[row]])
        yield _PromptPart(row, int(columns.query_start[row]), count, num_alternatives)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
