"""From logits to drawn tokens, and the way of both to the host without making the device wait."""

from __future__ import annotations

import numpy as np
import torch

from inferengine.core.plan import StepResult
from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.runtime import logprobs
from inferengine.runtime.slots import LOGPROBS, Slots

NOT_FINITE = "The model's output for this request was not a number."


class StepDraws:
    """What a step drew, on its way to the host. Implements core.executor.StepFuture."""

    def __init__(self, ids: torch.Tensor | None, rows: np.ndarray) -> None:
        self._rows = rows  # plan row of each draw
        self._asked: tuple[list[int], list[int]] = ([], [])
        self._logprobs: logprobs.DeviceLogprobs | None = None
        self._event: torch.cuda.Event | None = None
        self._ids = ids

    def add_logprobs(self, values: logprobs.DeviceLogprobs, rows: list[int], counts: list[int]) -> None:
        self._logprobs, self._asked = values, (rows, counts)

    def send(self) -> StepDraws:
        """Start the copies to the host; on a CPU there is nothing to copy."""
        if self._ids is not None and self._ids.is_cuda:
            self._ids = _to_pinned(self._ids)
            if self._logprobs is not None:
                self._logprobs = logprobs.DeviceLogprobs(*map(_to_pinned, self._logprobs))
            self._event = torch.cuda.Event()
            self._event.record()
        return self

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        if self._ids is None:
            return StepResult([])
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._ids.tolist()
        failed = None
        if token_ids and min(token_ids) < 0:
            failed = {int(row): NOT_FINITE for row, token in zip(self._rows, token_ids, strict=True) if token < 0}
            token_ids = [max(0, token) for token in token_ids]
        chosen = None
        if self._logprobs is not None:
            chosen = logprobs.to_rows(self._logprobs, *self._asked)
        return StepResult(token_ids, chosen, failed)


def draw(ops: Ops, logits: torch.Tensor, batch: Batch, slots: Slots) -> StepDraws:
    """Draw a token for every sampling row of the step. logits [N, V] in the order of `batch.sample_rows`."""
    if batch.columns is None:
        raise RuntimeError("sampling decides on the host which features a step needs: it wants the step's columns")
    rows = batch.columns.sample_rows
    slot_numbers = batch.columns.row_slot[rows]
    needs = slots.needs(slot_numbers, batch.columns.row_len[rows])
    wanted = np.flatnonzero(slots.host_logprobs[slot_numbers] >= 0) if needs & LOGPROBS else ()
    kept = None
    if len(wanted):  # before the sampler changes the logits
        kept = logits.index_select(0, torch.from_numpy(wanted).to(logits.device))
    ids = ops.sample(logits, slots, batch.sample_slots, batch.sample_positions, needs)
    draws = StepDraws(ids, rows)
    if kept is not None:
        counts = slots.host_logprobs[slot_numbers][wanted].tolist()
        chosen = ids.index_select(0, torch.from_numpy(wanted).to(ids.device))
        draws.add_logprobs(logprobs.compute(kept, chosen, max(counts)), rows[wanted].tolist(), counts)
    return draws


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
