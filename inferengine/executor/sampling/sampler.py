"""Draws a step's tokens from its logits, verifies draft tokens, and copies the results to the host without making the
device wait."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from inferengine.core.sequence import RowFailure
from inferengine.core.step_plan import StepPlan, StepResult, TokenLogprobs
from inferengine.executor.pooling import PooledStates, PooledVectors
from inferengine.executor.sampling.logprobs import DrawnLogprobs, StepPromptLogprobs
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.kernels.reference.sampling import BAD_WORDS, LOGPROBS, MASKED, NO_NUMBER, NO_TOKEN


def apply_masks(ops: Ops, logits: torch.Tensor, draws: SequenceOf[int], words: bytes | bytearray) -> None:
    """Set the logits [N, V] that grammars forbid to -inf, in place, by one copy and one kernel. Mask i, of ceil(V / 32)
    int32 words, belongs to row draws[i]; bit t % 32 of its word t // 32 stands for token t."""
    num_words = -(-logits.shape[1] // 32)
    packed = torch.empty(len(draws), 1 + num_words, dtype=torch.int32, pin_memory=logits.is_cuda)
    host = packed.numpy()
    host[:, 0] = draws
    host[:, 1:] = np.frombuffer(words, dtype=np.int32).reshape(len(draws), num_words)
    ops.apply_masks(logits, packed.to(logits.device, non_blocking=True))


_FAILURES = {NO_NUMBER: RowFailure.NOT_A_NUMBER, NO_TOKEN: RowFailure.NO_TOKEN_ALLOWED}  # by the id drawn instead


class StepDraws:
    """The draws of one step. Implements core.executor.StepFuture.

    A step whose plan has masked draws is drawn by `provide_masks`; every other step at once. Copies to the host run
    behind the step, and `result` waits for them alone, so a later step may be under way already.
    """

    def __init__(
        self,
        ops: Ops,
        slots: Slots,
        plan: StepPlan,
        batch: Batch,
        logits: torch.Tensor | None,
        ids: torch.Tensor | None = None,
        prompt: StepPromptLogprobs | None = None,
        embeddings: PooledStates | None = None,
    ) -> None:
        """`logits` [N, V]: None where nothing is to be drawn. `ids` [N]: None where they are not drawn yet."""
        self._ops, self._slots, self._plan, self._batch, self._logits = ops, slots, plan, batch, logits
        self._prompt = prompt
        self._embeddings = embeddings
        self._sent: list[torch.Tensor] = []  # ids, draft tokens, log-probabilities last: on the host after the event
        self._logprobs: DrawnLogprobs | None = None
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None
        if ids is not None:
            self._send([ids])
        elif logits is not None and not plan.masked:
            self._draw()
        elif batch.num_samples == 0:
            self._mark_end()

    def provide_masks(self, words: bytearray) -> None:
        """Draw under the masks of the plan's masked draws, in order. An error shows in `result`."""
        try:
            self._draw(words)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        """Wait for the copies to the host and verify the draft tokens. Raises what drawing raised."""
        if self._error is not None:
            raise self._error
        prompt = None if self._prompt is None else self._prompt.result()
        vectors, failed_vectors = PooledVectors() if self._embeddings is None else self._embeddings.result()
        if self._batch.num_samples == 0:
            if self._event is not None:
                self._event.synchronize()
            return StepResult([], None, failed_vectors, None, prompt, vectors)
        if not self._sent:
            raise RuntimeError("the step waits for masks that nobody provided")
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._sent[0].tolist()
        emitted = self._verify(token_ids)
        failed = self._failed(token_ids, emitted)
        chosen = None if self._logprobs is None else self._emitted_logprobs(self._logprobs, emitted)
        if emitted is not None:
            first = self._first_draws()
            pairs = zip(first, emitted, strict=True)
            token_ids = [token for begin, count in pairs for token in token_ids[begin : begin + count]]
        if failed:
            token_ids = [max(0, token) for token in token_ids]
        if failed_vectors:
            failed = {**(failed or {}), **failed_vectors}
        return StepResult(token_ids, chosen, failed, emitted, prompt, vectors)

    # -- on the device -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _draw(self, words: bytearray | None = None) -> None:
        slots, batch, logits = self._slots, self._batch, self._logits
        if logits is None or batch.columns is None:
            raise RuntimeError("a step without logits or columns draws nothing")
        self._logits = None
        rows = batch.columns.row_slot[batch.columns.sample_rows]
        needs = slots.needs(rows, batch.columns.sample_positions)
        if needs & LOGPROBS:
            kept = logits.is_cuda and words is None and not needs & BAD_WORDS  # a CPU's sampler works in place
            self._logprobs = DrawnLogprobs(self._ops, slots, rows, logits, kept=kept)
        if words is not None:
            apply_masks(self._ops, logits, self._plan.masked, words)
            needs |= MASKED
        if needs & BAD_WORDS:
            slots.bad_words.forbid(logits, slots.tokens, slots.num_prompt, batch.sample_slots, batch.sample_positions)
        sent: list[torch.Tensor] = []
        if self._has_drafts:  # before the draws overwrite them
            sent.append(slots.tokens[batch.sample_slots.long(), batch.sample_positions.long()])
        ids = self._ops.sample(logits, slots, batch.sample_slots, batch.sample_positions, needs)
        sent.insert(0, ids)
        if self._logprobs is not None:
            sent.append(self._logprobs.launch(batch.sample_slots, ids))
        self._send(sent)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Start the copies to the host; on a CPU there is nothing to copy."""
        self._sent = tensors
        if tensors[0].is_cuda:
            self._sent = [_to_pinned(tensor) for tensor in tensors]
            self._mark_end()

    def _mark_end(self) -> None:
        """Make `result` wait for what has been launched so far. Also where nothing is drawn, as in the middle of a
        prompt: the pinned input buffers are used in turn, so a step must not count as done before the device is."""
        if self._slots.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    # -- on the host -------------------------------------------------------------------------------------------------

    @property
    def _has_drafts(self) -> bool:
        return bool(self._plan.num_drafts) and any(self._plan.num_drafts)

    def _first_draws(self) -> np.ndarray:
        """Index of the first draw of each sampling row."""
        assert self._batch.columns is not None  # checked by `_draw`
        rows = self._batch.columns.sample_rows
        return np.flatnonzero(np.diff(rows, prepend=-1))

    def _verify(self, token_ids: list[int]) -> list[int] | None:
        """Tokens that each sampling row emits: the draft tokens accepted, and the first draw that differs from its
        own."""
        if not self._has_drafts:
            return None
        drafts = self._sent[1].tolist()
        first = self._first_draws().tolist()
        emitted = []
        for begin, end in zip(first, [*first[1:], len(token_ids)], strict=True):
            count = 1
            while begin + count < end and token_ids[begin + count - 1] == drafts[begin + count - 1]:
                count += 1
            emitted.append(count)
        return emitted

    def _failed(self, token_ids: list[int], emitted: list[int] | None) -> dict[int, RowFailure] | None:
        if not token_ids or min(token_ids) >= 0:
            return None
        assert self._batch.columns is not None  # checked by `_draw`
        rows = self._batch.columns.sample_rows.tolist()
        counted = range(len(rows)) if emitted is None else self._emitted_draws(emitted)
        return {rows[draw]: _FAILURES[token_ids[draw]] for draw in counted if token_ids[draw] < 0} or None

    def _emitted_draws(self, emitted: list[int]) -> list[int]:
        pairs = zip(self._first_draws().tolist(), emitted, strict=True)
        return [begin + index for begin, count in pairs for index in range(count)]

    def _emitted_logprobs(self, logprobs: DrawnLogprobs, emitted: list[int] | None) -> dict[int, list[TokenLogprobs]]:
        items = logprobs.read(self._sent[-1])
        assert self._batch.columns is not None  # checked by `_draw`
        rows = self._batch.columns.sample_rows[logprobs.draws].tolist()
        if emitted is None:  # one draw a row
            return {row: [item] for row, item in zip(rows, items, strict=True)}
        live = set(self._emitted_draws(emitted))
        found: dict[int, list[TokenLogprobs]] = {}
        for draw, row, item in zip(logprobs.draws.tolist(), rows, items, strict=True):
            if draw in live:
                found.setdefault(row, []).append(item)
        return found


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
