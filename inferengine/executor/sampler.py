"""What a step gives: tokens drawn from its logits, draft tokens verified, log-probabilities, and vectors of embeddings;
copied to the host without making the device wait.

Log-probabilities of drawn tokens and of prompt tokens are of the model's own logits, before any penalty, bias or
temperature. On the device they are packed columns of int32 (kernels/reference/ops.py), copied to the host at once.
Those of prompt tokens need the logits of positions that nothing is drawn from; they are computed a few positions at a
time, because the logits of a whole prompt may be larger than the free memory.

Embeddings: the final hidden states of a prompt (after the final norm) pooled into one vector of length 1. `last`
pooling takes the state of the prompt's last token, `cls` that of its first, `mean` the mean over all tokens. A mean is
gathered over the chunks of a prompt as a sum by slot. Each prompt is summed by itself in fp32, so that a vector does
not depend on what else is in the step. Some models have linear layers behind the pooling. Definitions as in
sentence-transformers' `Pooling`, `Dense` and `Normalize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from inferengine.core.executor import PooledRow, StepPlan, StepResult, TokenLogprobs
from inferengine.core.sequence import RowFailure
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.ops import Ops
from inferengine.kernels.reference.ops import BAD_WORDS, LOGPROBS, MASKED, NO_NUMBER, NO_TOKEN
from inferengine.models.decoder import DecoderModel

STATES_BYTES = 32 << 20  # of states in fp32 that are normed at once: those of a step may be larger than the free memory


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


class DenseWeights(NamedTuple):
    """A linear layer behind the pooling (config/embedding_modules.py): weight [O, I] and bias [O], fp32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str  # tanh, or empty: none


class Pooling:
    """Holds the sums of prompts that are partly computed, [S, E] fp32 by slot; allocated on first use."""

    def __init__(
        self,
        num_slots: int,
        size: int,
        device: torch.device,
        dense: SequenceOf[DenseWeights] = (),
        *,
        is_normed: bool = True,
    ) -> None:
        """`dense`: layers that each pooled state passes. `is_normed`: vectors get length 1; scores do not."""
        self._shape = (num_slots, size)
        self._device = device
        self._dense, self._is_normed = dense, is_normed
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
        self._gather(model, hidden, columns, means)
        if full := [item for item in means if item.ends]:
            rows = [item.row for item in full]
            counts = [1.0 if item.first else float(columns.row_len[item.row]) for item in full]
            sums = self._all_sums().index_select(0, self._upload(columns.row_slot[rows].astype(np.int64)))
            states.append(sums / self._upload(np.array(counts, dtype=np.float32)[:, None]))
            ending += rows
        if not states:
            return PooledStates([], None)
        found = torch.cat(states)
        for layer in self._dense:
            found = functional.linear(found, layer.weight, layer.bias)
            found = found.tanh_() if layer.activation else found
        return PooledStates(ending, functional.normalize(found, dim=-1) if self._is_normed else found)

    def _gather(
        self, model: DecoderModel, hidden: torch.Tensor, columns: StepColumns, items: SequenceOf[PooledRow]
    ) -> None:
        """Add the states of the rows' tokens, or of their prompts' first ones, to the slots' sums, which start at zero
        with the prompt."""
        for parts in _in_groups(_token_ranges(columns, items), max(1, STATES_BYTES // (4 * hidden.shape[1]))):
            sums, slots = self._all_sums(), self._upload(np.array([part.slot for part in parts], dtype=np.int64))
            lengths = [part.end - part.begin for part in parts]
            begin, end = parts[0].begin, parts[-1].end
            if end - begin == sum(lengths):  # rows lie in the order of the step: nothing is between them
                states = hidden[begin:end]
            else:
                tokens = np.concatenate([np.arange(part.begin, part.end, dtype=np.int64) for part in parts])
                states = hidden.index_select(0, self._upload(tokens))
            new = self._sum_parts(model.norm(states).float(), lengths)
            if not all(part.is_fresh for part in parts):
                fresh = self._upload(np.array([part.is_fresh for part in parts])[:, None])
                new += sums.index_select(0, slots).masked_fill_(fresh, 0.0)
            sums.index_copy_(0, slots, new)

    def _sum_parts(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the sums [P, E] of so many states [T, E] each."""
        if self._device.type == "cpu":  # where segment_reduce takes eight times as long
            return torch.stack([part.sum(0) for part in states.split(lengths)])
        counts = self._upload(np.array(lengths, dtype=np.int64))
        return torch.segment_reduce(states, "sum", lengths=counts, unsafe=True)  # to check them would wait for them

    def _all_sums(self) -> torch.Tensor:
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return self._sums

    def _upload(self, places: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(places)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


class _TokenRange(NamedTuple):
    """Tokens of a step whose states are added to a slot's sum. `is_fresh`: the sum starts with them."""

    slot: int
    begin: int
    end: int
    is_fresh: bool


def _token_ranges(columns: StepColumns, items: SequenceOf[PooledRow]) -> list[_TokenRange]:
    ranges: list[_TokenRange] = []
    for item in items:
        is_fresh = bool(columns.row_start[item.row] == 0)
        begin, end = int(columns.query_start[item.row]), int(columns.query_start[item.row + 1])
        if not item.first:
            ranges.append(_TokenRange(int(columns.row_slot[item.row]), begin, end, is_fresh))
        elif is_fresh:
            ranges.append(_TokenRange(int(columns.row_slot[item.row]), begin, begin + 1, is_fresh))
    return ranges


def _in_groups(ranges: SequenceOf[_TokenRange], most: int) -> Iterator[list[_TokenRange]]:
    """Yield the ranges in groups of at most so many tokens and one range of each slot. One that is longer by itself is
    cut, at places that nothing else decides: a sum in other parts is rounded otherwise."""
    group: list[_TokenRange] = []
    room = most
    for whole in ranges:
        for begin in range(whole.begin, whole.end, most):
            end = min(whole.end, begin + most)
            if end - begin > room:
                yield group
                group, room = [], most
            group.append(_TokenRange(whole.slot, begin, end, whole.is_fresh and begin == whole.begin))
            room -= end - begin
    if group:
        yield group


# -- draws -------------------------------------------------------------------------------------------------------------


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
        """Return whether `result` would not wait."""
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
        """Return the index of the first draw of each sampling row."""
        assert self._batch.columns is not None  # checked by `_draw`
        rows = self._batch.columns.sample_rows
        return np.flatnonzero(np.diff(rows, prepend=-1))

    def _verify(self, token_ids: list[int]) -> list[int] | None:
        """Return the tokens that each sampling row emits: the draft tokens accepted, and the first draw that differs
        from its own."""
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


# -- log-probabilities -------------------------------------------------------------------------------------------------


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
    """Return packed columns for token_ids [M] and logits [M, V] of rows that all want as many alternatives."""
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

    def __init__(
        self,
        ops: Ops,
        logits_of: Callable[[torch.Tensor, np.ndarray], torch.Tensor],
        hidden: torch.Tensor,
        slots: Slots,
        columns: StepColumns,
    ) -> None:
        """`hidden` [T, H] are the states of the step's tokens; `logits_of` takes some of them and their rows."""
        self._parts = list(_prompt_parts(slots, columns))
        self._copies: list[list[torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        for item in self._parts:
            slot, start = int(columns.row_slot[item.row]), int(columns.row_start[item.row])
            targets = slots.tokens[slot, start + 1 : start + 1 + item.num_positions]
            parts = []
            for begin in range(0, item.num_positions, POSITIONS_AT_ONCE):
                end = min(begin + POSITIONS_AT_ONCE, item.num_positions)
                states = hidden[item.first + begin : item.first + end]
                logits = logits_of(states, np.full(len(states), item.row))
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
    return _to_pinned(tensor) if tensor.is_cuda else tensor
