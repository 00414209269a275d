"""Embeddings: pools the final hidden states of a prompt (after the final norm) into one vector of length 1.

`last` pooling takes the state of the prompt's last token, `mean` the mean over all tokens. A mean is gathered over the
chunks of a prompt as a sum by slot; normalizing the vector removes the factor. Each prompt is summed by itself in fp32,
so that a vector does not depend on what else is in the step. Definitions as in sentence-transformers' `Pooling` and
`Normalize`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch

from inferengine.core.sequence import RowFailure
from inferengine.core.step_plan import PooledRow
from inferengine.kernels.batch import StepColumns
from inferengine.models.decoder import DecoderModel

POSITIONS_AT_ONCE = 1024  # the normed states of a long prompt may be larger than the free memory


class PooledVectors(NamedTuple):
    """The embeddings of a step by plan row, f32 little-endian, and the rows that have none."""

    embeddings: dict[int, bytes] | None = None
    failed: dict[int, RowFailure] | None = None


class PooledStates:
    """The embeddings of one step, copied to the host in the background until `result`."""

    def __init__(self, rows: list[int], vectors: torch.Tensor | None) -> None:
        """`vectors` [N, E] fp32 belong to plan rows `rows`; None: no prompt of the step ends."""
        self._rows = rows
        self._vectors = vectors
        self._event: torch.cuda.Event | None = None
        if vectors is not None and vectors.is_cuda:
            host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self._vectors = host.copy_(vectors, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> PooledVectors:
        """Wait for the copy."""
        if self._vectors is None:
            return PooledVectors()
        if self._event is not None:
            self._event.synchronize()
        values = self._vectors.numpy().astype("<f4", copy=False)
        finite = np.isfinite(values).all(axis=1).tolist()
        good = {row: values[i].tobytes() for i, row in enumerate(self._rows) if finite[i]}
        failed = {row: RowFailure.NOT_A_NUMBER for i, row in enumerate(self._rows) if not finite[i]}
        return PooledVectors(good or None, failed or None)


class Pooling:
    """Holds the sums of prompts that are partly computed, [S, E] fp32 by slot; allocated on first use."""

    def __init__(self, num_slots: int, size: int, device: torch.device) -> None:
        self._shape = (num_slots, size)
        self._device = device
        self._sums: torch.Tensor | None = None

    def compute(
        self, model: DecoderModel, hidden: torch.Tensor, pooled: SequenceOf[PooledRow], columns: StepColumns
    ) -> PooledStates:
        """Pool the rows of `pooled` from `hidden` [T, E], the residual stream of the step's tokens. Device operations
        only."""
        ending = [item.row for item in pooled if item.ends and not item.mean]
        states: list[torch.Tensor] = []
        if ending:
            places = columns.query_start[1:][ending].astype(np.int64) - 1
            states.append(model.norm(hidden.index_select(0, self._upload(places))).float())
        means = [item for item in pooled if item.mean]
        for item in means:
            self._gather(model, hidden, columns, item.row)
        if full := [item.row for item in means if item.ends]:
            slots = columns.row_slot[full].astype(np.int64)
            states.append(self._all_sums().index_select(0, self._upload(slots)))
            ending += full
        if not states:
            return PooledStates([], None)
        return PooledStates(ending, torch.nn.functional.normalize(torch.cat(states), dim=-1))

    def _gather(self, model: DecoderModel, hidden: torch.Tensor, columns: StepColumns, row: int) -> None:
        """Add the states of a row's tokens to its slot's sum, which starts at zero with the prompt."""
        sums = self._all_sums()[int(columns.row_slot[row])]
        begin, end = int(columns.query_start[row]), int(columns.query_start[row + 1])
        if columns.row_start[row] == 0:
            sums.zero_()
        for first in range(begin, end, POSITIONS_AT_ONCE):
            normed = model.norm(hidden[first : min(first + POSITIONS_AT_ONCE, end)])
            sums += normed.sum(0, dtype=torch.float32)

    def _all_sums(self) -> torch.Tensor:
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return self._sums

    def _upload(self, places: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(places)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)
