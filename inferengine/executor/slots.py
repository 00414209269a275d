"""Slots and batches: the state of every running sequence, resident on the device, and the tensors of one step made of
it.

A slot is filled with one upload when its sequence is admitted (`SlotInit`); from then on the sampler writes each drawn
token to `tokens[slot, position]`, so no step needs anything from the host. The host mirrors, in numpy, the few facts
that decide which work a step needs (sampling, penalties, log-probabilities), so that a batch pays only for the features
that its requests use. Row S, one past the last slot, is the scratch slot: padded rows of CUDA graphs read and write
there. All its KV goes to the scratch block, one past the last block of each pool.

`make_batch` turns a StepPlan into the tensors of one step: all columns of the plan in one int32 buffer, uploaded at
once. The host computes only what depends on the plan's integers (numpy, no loop over tokens). What depends on device
state, the input tokens and the block tables, is looked up on the device. Shapes are those of docs/executor.md.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from inferengine.core.executor import BlockUpdates, SlotInit, StepPlan, TokenWrites
from inferengine.kernels.batch import Batch, SlotMapping, StepColumns
from inferengine.kernels.reference.ops import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    FILTER,
    LOGPROBS,
    MIN_TOKENS,
    PENALTY,
    RANDOM,
)

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LEAST_TOP_P = 2.0**-24  # like anything smaller it keeps the likeliest token alone, and it is not 0 in 32 bits
_INTS = ("num_prompt", "top_k", "min_tokens", "num_logprobs")


class Slots:
    """Device tensors by slot (docs/executor.md) and their mirror on the host. One instance per executor."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        group_blocks: list[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        rows = num_slots + 1
        self.num_slots, self.block_size, self.vocab_size, self.device = num_slots, block_size, vocab_size, device
        self.max_blocks = -(-(max_model_len + 1) // block_size)
        self.tokens = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = [
            torch.full((rows, self.max_blocks), blocks, dtype=torch.int32, device=device) for blocks in group_blocks
        ]
        self.floats = torch.zeros(len(_FLOATS), rows, dtype=torch.float32, device=device)
        self.ints = torch.zeros(len(_INTS), rows, dtype=torch.int32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self.floats[0], self.floats[1], self.floats[2]
        self.repetition_penalty, self.presence_penalty = self.floats[3], self.floats[4]
        self.frequency_penalty = self.floats[5]
        self.num_prompt, self.top_k, self.min_tokens, self.num_logprobs = self.ints
        self.bias_ids, self.bias_values = self._table(0), self._table(0, torch.float32)
        self.stop_ids = self._table(0)
        self.bad_words = BadWordsTable(rows, device)
        # token t is bit t % 32 of word t // 32; allocated on first use
        self.allowed = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self.features = np.zeros(rows, dtype=np.int32)  # host mirror
        self.host_min_end = np.zeros(rows, dtype=np.int64)  # position from which stop ids may be drawn
        self.host_logprobs = np.full(rows, -1, dtype=np.int64)  # alternatives asked for
        self.host_prompt_logprobs = np.full(rows, -1, dtype=np.int64)  # alternatives asked for
        self.host_prompt_end = np.zeros(rows, dtype=np.int64)  # prompt positions whose next token is the prompt's too
        self.has_prompt_logprobs = False  # whether any slot's request wants them
        self.host_top_k = np.zeros(rows, dtype=np.int64)  # 0: not bounded by top_k

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory held by the fixed tensors."""
        tensors = [self.tokens, *self.block_tables, self.floats, self.ints, self.seed]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def needs(self, slots: np.ndarray, drawn_positions: np.ndarray) -> int:
        """Return the feature bits that sampling for these slots needs now; MIN_TOKENS only while a row is below its
        minimum."""
        bits = int(np.bitwise_or.reduce(self.features[slots])) if len(slots) else 0
        if bits & MIN_TOKENS and not (drawn_positions < self.host_min_end[slots]).any():
            bits &= ~MIN_TOKENS
        return bits

    def apply_blocks(self, updates: SequenceOf[BlockUpdates]) -> None:
        """Write block-table entries."""
        for table, update in zip(self.block_tables, updates, strict=True):
            if update.slots:
                packed = self.upload(np.array([update.slots, update.indices, update.block_ids], dtype=np.int32))
                places = packed[:2].long()
                table[places[0], places[1]] = packed[2]

    def write_tokens(self, writes: TokenWrites | None) -> None:
        """Write tokens that only the host knows: draft tokens, and those that a grammar forces."""
        if writes is not None and writes.slots:
            packed = self.upload(np.array([writes.slots, writes.positions, writes.token_ids], dtype=np.int32))
            places = packed[:2].long()
            self.tokens[places[0], places[1]] = packed[2]

    def admit(self, admitted: list[SlotInit]) -> None:
        """Fill the slots of newly admitted (or resumed) sequences, with a few copies for all of them together."""
        if not admitted:
            return
        slots = np.array([item.slot for item in admitted], dtype=np.int64)
        floats = np.empty((len(_FLOATS), len(admitted)), dtype=np.float32)
        ints = np.empty((len(_INTS), len(admitted)), dtype=np.int32)
        seeds = np.empty(len(admitted), dtype=np.int64)
        for column, item in enumerate(admitted):
            params = item.params
            temperature = 0.0 if params.is_greedy else params.temperature
            floats[:, column] = (
                temperature,
                max(params.top_p, LEAST_TOP_P),
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            logprobs = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
            ints[:, column] = item.num_prompt, self._top_k(item), self._min_tokens(item), logprobs
            seeds[column] = _signed64(item.seed)
            self._mirror(item)
        self.has_prompt_logprobs = bool(self.host_prompt_end.any())
        lengths = np.array([len(item.token_ids) for item in admitted], dtype=np.int64)
        flat = np.concatenate([np.asarray(item.token_ids, dtype=np.int32) for item in admitted])
        begins = slots * self.tokens.shape[1] - (np.cumsum(lengths) - lengths)
        places = np.repeat(begins, lengths) + np.arange(len(flat))
        rows, cells, seeded, some_floats, some_ints, ids = self.upload_all(slots, places, seeds, floats, ints, flat)
        self.tokens.view(-1).index_copy_(0, cells, ids)
        self.floats.index_copy_(1, rows, some_floats)
        self.ints.index_copy_(1, rows, some_ints)
        self.seed.index_copy_(0, rows, seeded)
        self._admit_lists(admitted, rows)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _mirror(self, item: SlotInit) -> None:
        params = item.params
        bits = 0 if params.is_greedy else RANDOM
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
            bits |= FILTER
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            bits |= PENALTY
        if params.logit_bias:
            bits |= BIAS
        if params.allowed_token_ids:
            bits |= ALLOWED
        if params.min_tokens > 0 and item.stop_token_ids:
            bits |= MIN_TOKENS
        if params.logprobs is not None:
            bits |= LOGPROBS
        if params.bad_words_ids:
            bits |= BAD_WORDS
        self.features[item.slot] = bits
        self.host_min_end[item.slot] = item.num_prompt + self._min_tokens(item)
        self.host_logprobs[item.slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self.host_prompt_logprobs[item.slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.host_prompt_end[item.slot] = 0 if params.prompt_logprobs is None else item.num_prompt - 1
        self.host_top_k[item.slot] = self._top_k(item)

    def _top_k(self, item: SlotInit) -> int:
        """Return top_k as 32 bits: any whole number is valid, and one above the vocabulary filters nothing."""
        return min(max(0, item.params.top_k), self.vocab_size)

    def _min_tokens(self, item: SlotInit) -> int:
        """Return min_tokens as 32 bits: no sequence is longer than a row of tokens."""
        return min(item.params.min_tokens, self.tokens.shape[1])

    def _admit_lists(self, admitted: list[SlotInit], rows: torch.Tensor) -> None:
        """Write the sparse per-slot lists, padded with -1 to the widest seen so far (a power of two)."""
        biases = [item.params.logit_bias for item in admitted]
        if any(biases):
            ids = _padded([[pair[0] for pair in bias] for bias in biases], -1, np.int32)
            values = _padded([[pair[1] for pair in bias] for bias in biases], 0.0, np.float32)
            self.bias_ids = self._widened(self.bias_ids, ids.shape[1], -1)
            self.bias_values = self._widened(self.bias_values, ids.shape[1], 0.0)
            self.bias_ids[rows] = self.upload(_fill_to(ids, self.bias_ids.shape[1], -1))
            self.bias_values[rows] = self.upload(_fill_to(values, self.bias_values.shape[1], 0.0))
        elif self.bias_ids.shape[1]:
            self.bias_ids[rows] = -1
        stops = [list(item.stop_token_ids) if item.params.min_tokens else [] for item in admitted]
        if any(stops):
            ids = _padded(stops, -1, np.int32)
            self.stop_ids = self._widened(self.stop_ids, ids.shape[1], -1)
            self.stop_ids[rows] = self.upload(_fill_to(ids, self.stop_ids.shape[1], -1))
        elif self.stop_ids.shape[1]:
            self.stop_ids[rows] = -1
        if any(item.params.allowed_token_ids for item in admitted):
            if not self.allowed.shape[1]:
                words = -(-self.vocab_size // 32)
                self.allowed = torch.full((self.num_slots + 1, words), -1, dtype=torch.int32, device=self.device)
            lists = {id(item.params.allowed_token_ids): item for item in admitted}  # choices of a request share theirs
            masks = {key: self._bitmask(item) for key, item in lists.items()}
            self.allowed[rows] = self.upload(np.stack([masks[id(item.params.allowed_token_ids)] for item in admitted]))
        elif self.allowed.shape[1]:
            self.allowed[rows] = -1
        self.bad_words.admit(rows, [item.params.bad_words_ids for item in admitted], self.upload)

    def _bitmask(self, item: SlotInit) -> np.ndarray:
        words = self.allowed.shape[1]
        if not item.params.allowed_token_ids:
            return np.full(words, -1, dtype=np.int32)
        bits = np.zeros(words * 32, dtype=np.uint8)
        bits[np.array(item.params.allowed_token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _table(self, width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((self.num_slots + 1, width), -1, dtype=dtype, device=self.device)

    def _widened(self, table: torch.Tensor, width: int, padding: float) -> torch.Tensor:
        if width <= table.shape[1]:
            return table
        wider = torch.full((table.shape[0], _power(width)), padding, dtype=table.dtype, device=self.device)
        wider[:, : table.shape[1]] = table
        return wider

    def wants_prompt_logprobs(self, columns: StepColumns) -> bool:
        """Return whether any row of the step computes prompt positions of a request that wants log-probabilities of its
        prompt."""
        return self.has_prompt_logprobs and bool((self.host_prompt_end[columns.row_slot] > columns.row_start).any())

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def upload_all(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy several arrays to the device in one transfer, without waiting for it. Those of wider numbers come
        first, so that all are aligned."""
        packed = self.upload(
            np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
        )
        tensors, begin = [], 0
        for array in arrays:
            part = packed[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype)
            tensors.append(part.view(array.shape))
            begin += array.nbytes
        return tensors


class BadWordsTable:
    """Bad words by slot: [S + 1, W, L] token ids, right-aligned and padded with -1.

    A bad word is a sequence of token ids whose last token is forbidden wherever the output ends in the others. The
    definition is vLLM's and Hugging Face's (NoBadWordsLogitsProcessor), over the output alone. The output is read from
    the slots' tokens on the device, so it is exact with steps under way and with draft tokens to verify.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.table = torch.full((num_rows, 0, 0), -1, dtype=torch.int32, device=device)

    def admit(
        self,
        slots: torch.Tensor,
        words: list[tuple[tuple[int, ...], ...]],
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        """Write the words of newly admitted slots [M]. The table grows to the most and longest words seen so far."""
        if any(words):
            self._grow(max(map(len, words)), max(len(word) for each in words for word in each))
        _, most, longest = self.table.shape
        if not most:
            return
        rows = np.full((len(words), most, longest), -1, dtype=np.int32)
        for row, each in enumerate(words):
            for place, word in enumerate(each):
                rows[row, place, longest - len(word) :] = word
        self.table[slots] = upload(rows)

    def forbid(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_prompt: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Set the logits [N, V] of what must not be drawn at `positions` [N] of the slots `rows` [N] to -inf, in place.
        `tokens` [S + 1, max_len] and `num_prompt` [S + 1] are those of all slots."""
        rows, positions = rows.long(), positions.long()
        words = self.table[rows]  # [N, W, L]
        longest = words.shape[2]
        places = positions.unsqueeze(1) + torch.arange(1 - longest, 0, device=logits.device)  # [N, L - 1]
        known = tokens[rows.unsqueeze(1), places.clamp_min(0)]
        known = known.masked_fill(places < num_prompt[rows].unsqueeze(1), -2)  # the prompt does not count
        before, last = words[:, :, :-1], words[:, :, -1]
        matches = ((before < 0) | (before == known.unsqueeze(1))).all(-1) & (last >= 0)  # [N, W]
        limit = torch.where(matches, float("-inf"), float("inf")).to(logits.dtype)
        logits.scatter_reduce_(1, last.long().clamp_min(0), limit, "amin")

    def _grow(self, most: int, longest: int) -> None:
        _, old_most, old_longest = self.table.shape
        most, longest = (max(old, _power(new)) for old, new in ((old_most, most), (old_longest, longest)))
        if (most, longest) != (old_most, old_longest):
            wider = torch.full((self.table.shape[0], most, longest), -1, dtype=torch.int32, device=self.table.device)
            wider[:, :old_most, longest - old_longest :] = self.table
            self.table = wider


def _signed64(seed: int) -> int:
    """Return the int64 of the same 64 bits as a seed: torch has no unsigned type."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed


def _padded(rows: SequenceOf[SequenceOf[float]], padding: float, dtype: type) -> np.ndarray:
    table: np.ndarray = np.full((len(rows), max(map(len, rows))), padding, dtype=dtype)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _fill_to(table: np.ndarray, width: int, padding: float) -> np.ndarray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=padding)


def _power(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


# -- batches -----------------------------------------------------------------------------------------------------------


def columns_of(plan: StepPlan) -> StepColumns:
    """Expand the plan's columns to tokens: a few numpy calls whatever the batch."""
    row_slot = np.array(plan.slots, dtype=np.int32)
    row_start = np.array(plan.starts, dtype=np.int32)
    num_rows = len(row_slot)
    query_start = np.zeros(num_rows + 1, dtype=np.int32)
    if plan.num_tokens == num_rows:  # one token each: nothing to expand
        row_len = row_start + 1
        query_start[1:] = _arange(num_rows + 1)[1:]
        token_row = _arange(num_rows)
        positions = row_start
    else:
        counts = np.array(plan.counts, dtype=np.int32)
        row_len = row_start + counts
        np.cumsum(counts, out=query_start[1:])
        token_row = np.repeat(_arange(num_rows), counts)
        positions = _arange(plan.num_tokens) + np.repeat(row_start - query_start[:-1], counts)
    if plan.num_decodes == num_rows:
        draws = (token_row, token_row, row_len)
    else:
        draws = _draws(plan, query_start, row_len)
    return StepColumns(row_slot, row_start, row_len, query_start, token_row, positions, *draws)


def _draws(plan: StepPlan, query_start: np.ndarray, row_len: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (row, token, position drawn) of every draw. A row with k draft tokens draws after each of its last 1 + k
    tokens."""
    rows = np.flatnonzero(np.array(plan.samples, dtype=np.bool_)).astype(np.int32)
    if not plan.num_drafts or not any(plan.num_drafts):
        return rows, query_start[1:][rows] - 1, row_len[rows]
    draws = np.array(plan.num_drafts, dtype=np.int32)[rows] + 1
    before_last = np.repeat(np.cumsum(draws), draws) - _arange(int(draws.sum())) - 1  # draft tokens still to come
    rows = np.repeat(rows, draws)
    return (
        rows,
        (query_start[1:][rows] - 1 - before_last).astype(np.int32),
        (row_len[rows] - before_last).astype(np.int32),
    )


def make_batch(plan: StepPlan, columns: StepColumns, slots: Slots, device: torch.device) -> Batch:
    """Upload the columns (one copy) and look the rest up on the device, for a step that no CUDA graph holds."""
    batch = Batch()
    batch.columns = columns
    batch.num_tokens, batch.num_rows, batch.num_decodes = plan.num_tokens, len(columns.row_slot), plan.num_decodes
    batch.num_samples = len(columns.sample_rows)
    batch.snapshots = plan.snapshots
    parts = _upload(columns, device)
    batch.row_slot, batch.row_start, batch.row_len, batch.query_start = parts[0], parts[1], parts[2], parts[3]
    batch.token_row, batch.positions = parts[4], parts[5]
    batch.sample_rows, batch.sample_tokens, batch.sample_positions = parts[6], parts[7], parts[8]
    if device.type == "cpu":
        _look_up_on_host(batch, columns, slots)
    else:
        _look_up_on_device(batch, slots)
    return batch


def _look_up_on_host(batch: Batch, columns: StepColumns, slots: Slots) -> None:
    """Do what `_look_up_on_device` does by numpy, whose calls on a few numbers cost a fifth of torch's."""
    batch.block_size = slots.block_size
    batch.block_tables = slots.block_tables
    token_slot = columns.row_slot[columns.token_row]
    batch.token_slot = torch.from_numpy(token_slot)
    batch.input_ids = torch.from_numpy(slots.tokens.numpy()[token_slot, columns.positions])
    batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
    batch.sample_slots = torch.from_numpy(columns.row_slot[columns.sample_rows])
    batch.plans = []


def advance_by_one(columns: StepColumns, batch: Batch, slots: Slots) -> None:
    """Change plan and batch, of rows of one token each, into the step that computes the next token (on the CPU). The
    tensors of the batch share memory with the columns; `positions` is `row_start`, and `sample_positions` is
    `row_len`."""
    if columns.positions is not columns.row_start or columns.sample_positions is not columns.row_len:
        raise RuntimeError("only rows of one token each can be advanced")
    np.add(columns.row_start, 1, out=columns.row_start)
    np.add(columns.row_len, 1, out=columns.row_len)
    batch.isolated = False
    _look_up_on_host(batch, columns, slots)


def _look_up_on_device(batch: Batch, slots: Slots) -> None:
    """Fill in what device state decides: input tokens and KV places. Device operations only."""
    batch.block_size = slots.block_size
    batch.block_tables = slots.block_tables
    one_each = batch.num_tokens == batch.num_rows
    batch.token_slot = batch.row_slot if one_each else batch.row_slot.index_select(0, batch.token_row)
    batch.input_ids = slots.tokens[batch.token_slot.long(), batch.positions.long()]
    batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
    all_sample = batch.num_decodes == batch.num_rows
    batch.sample_slots = batch.row_slot if all_sample else batch.row_slot.index_select(0, batch.sample_rows)
    batch.plans = []


def _upload(columns: StepColumns, device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    # Each column begins at a multiple of 16 bytes: the kernels are compiled for that, and would be compiled anew where
    # it happened not to hold.
    begins = np.cumsum([0, *(-(-len(column) // 4) * 4 for column in columns)])
    host = np.zeros(int(begins[-1]), dtype=np.int32)
    for begin, column in zip(begins, columns, strict=False):
        host[begin : begin + len(column)] = column
    packed = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    return [packed[begin : begin + len(column)] for begin, column in zip(begins.tolist(), columns, strict=False)]


_ARANGE = np.arange(1 << 16, dtype=np.int32)


def _arange(count: int) -> np.ndarray:
    return _ARANGE[:count] if count <= len(_ARANGE) else np.arange(count, dtype=np.int32)
