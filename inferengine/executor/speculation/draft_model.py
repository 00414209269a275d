"""DraftModel: a small model of the same vocabulary that guesses ahead for the large one.

It reads and writes the same slots and block tables, with a KV cache of its own beside the large model's: block b of one
stands for block b of the other. What it has read of each sequence is DraftProgress: it catches up when it is to guess,
so a step without guesses does not wait for it.

A guess is drawn with the parameters and the random numbers of the request, at its position: the draw that the large
model makes there uses the very same noise, so the two agree whenever their distributions do (Gumbel-max coupling, see
Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2025), and what
is emitted is always the large model's own draw.

DraftProgress: how far a draft model has read each sequence, and which cached blocks it has read.

A draft model need not compute a step in which it does not guess: it catches up when its guesses are next asked for. So
guessing that is switched off costs nothing. What a finished sequence leaves in the prefix cache was perhaps read by the
large model only: a flag per block says which the small one has read, too. Host memory alone, numpy over rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from inferengine.core.executor import KVGroup
from inferengine.core.step_plan import StepPlan
from inferengine.errors import ConfigError
from inferengine.executor import cpu_forward
from inferengine.executor.batch import columns_of, make_batch, step_on
from inferengine.executor.cuda_graphs import warm_up as rehearsal
from inferengine.executor.cuda_graphs.layer_kinds import one_layer_of_each_kind
from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.slots import Slots
from inferengine.executor.speculation import cpu_draft
from inferengine.executor.speculation.cpu_draft import MOST_BEHIND, LoneRows
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu.decode_kv_cache import DecodeKvCache
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import registry, weights
from inferengine.models.llama import Llama


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


KEY = "speculation.draft_model"


def read_draft_config(folder: Path, target: DecoderConfig, max_model_len: int) -> DecoderConfig:
    """The draft's configuration. Raises ConfigError where it cannot guess for this model."""
    config, _ = registry.read_model_config(folder)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(KEY, f"has {config.vocab_size} tokens in its vocabulary, the model has {target.vocab_size}")
    if config.max_position < max_model_len:
        raise ConfigError(KEY, f"was made for {config.max_position} tokens, model.max_model_len is {max_model_len}")
    if config.group_windows != (None,) or target.group_windows[0] is not None:
        raise ConfigError(KEY, "sliding windows without full attention cannot be followed: choose another draft")
    return config


def share_of_target(budget_bytes: int, target: DecoderConfig, draft: DecoderConfig) -> int:
    """What of the KV budget is left to the target when every block has a twin in the draft's cache."""
    item = 2  # cancels out: both caches have the same type
    own = sum(target.kv_bytes_per_token(group, item) for group in range(len(target.group_windows)))
    return budget_bytes * own // (own + draft.kv_bytes_per_token(0, item))


class DraftModel:
    """Loaded beside the target; lives in the executor's thread."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        *,
        ops: Ops,
        slots: Slots,
        group: KVGroup,
        block_size: int,
        dtype: torch.dtype,
        max_model_len: int,
        max_tokens: int,
        random_weights: bool = False,
    ) -> None:
        """`max_tokens` bounds a batch, as it does the target's."""
        self._config, self._ops, self._slots, self._device = config, ops, slots, slots.device
        self._max_tokens = max_tokens
        self._progress = DraftProgress(slots.num_slots, group.num_blocks, slots.max_blocks, block_size)
        _, family = registry.read_model_config(folder)
        with torch.device("meta"):
            model = family.build(ops, config)
        if random_weights:
            weights.fill_random(model, dtype=dtype, device=self._device)
        else:
            weights.load_weights(model, family.weight_map(config), folder, dtype=dtype, device=self._device)
        weights.finish(model)
        self._model = model.eval()
        self.kv = KVCache(config, [group], block_size, dtype, self._device)
        self.kv.bind(self._model, max_model_len)
        self._decode_kv_cache = DecodeKvCache(len(self.kv.layers)) if self._device.type == "cpu" else None
        self._lone: LoneRows | None = None
        if cpu_draft.suits(config, dtype, self._device) and isinstance(self._model, Llama):
            self._lone = LoneRows(self._model, config, self.kv, ops, slots)

    def begin(self, plan: StepPlan) -> None:
        """A step is about to run: keep the caches alike."""
        self.kv.copy_blocks(plan)
        self._progress.begin(plan)
        if self._decode_kv_cache is not None:
            self._decode_kv_cache.drop([item.slot for item in plan.admitted])
        if self._lone is not None and plan.admitted:
            self._lone.forget([item.slot for item in plan.admitted])

    def touch_all(self) -> None:
        """Read chunks of every class of sizes, of the slot that belongs to nobody: for compiling what guesses will
        launch."""
        from inferengine.kernels.cuda.attention.decode import row_classes  # an engine on a CPU starts without triton

        slot, longest = self._slots.num_slots, self._slots.tokens.shape[1] - 1
        config = self._config
        decodes = row_classes(config.num_heads, config.num_kv_heads, config.head_dim, slot)
        with one_layer_of_each_kind(self._model):
            for count in (*rehearsal.CHUNKS, self._max_tokens):
                self._read([slot], [0], [min(count, longest)])
            for rows in decodes:
                self._read([slot] * rows, [0] * rows, [1] * rows)

    def guess(self, plan: StepPlan) -> None:
        """Write guesses after the pending token of every row that verifies some. The k-th is drawn from the guesses
        before it. Before the first, the draft reads what it has not read yet."""
        rows = [row for row, count in enumerate(plan.num_drafts) if count]
        slots, ends = [plan.slots[row] for row in rows], [plan.starts[row] + 1 for row in rows]
        starts = self._catch_up(slots, ends)
        counts = [plan.num_drafts[row] for row in rows]
        if self._lone is not None and self._lone.can_take(slots, max(ends) + max(counts)):
            self._guess_alone(self._lone, slots, starts, ends, counts)
        else:
            self._guess_together(plan, rows, starts)
        for slot, end, count in zip(slots, ends, counts, strict=True):
            self._progress.has_read(slot, end, count - 1)

    def _guess_alone(
        self, lone: LoneRows, slots: list[int], starts: list[int], ends: list[int], counts: list[int]
    ) -> None:
        """One sequence after the other, on the CPU. What is far behind is read together first."""
        if self._decode_kv_cache is not None and self._decode_kv_cache.copies:
            self._decode_kv_cache.drop(slots)
        if any(end - start > MOST_BEHIND for start, end in zip(starts, ends, strict=True)):
            self._draw(*self._read(slots, starts, ends))
            starts, ends, counts = ends, [end + 1 for end in ends], [count - 1 for count in counts]
        for slot, start, end, count in zip(slots, starts, ends, counts, strict=True):
            if count:
                lone.guess(slot, start, end, count)

    def _guess_together(self, plan: StepPlan, rows: list[int], starts: list[int]) -> None:
        """One token of all rows at a time."""
        slots, ends = [plan.slots[row] for row in rows], [plan.starts[row] + 1 for row in rows]
        logits, columns, batch = self._read(slots, starts, ends)
        for index in range(max(plan.num_drafts)):
            if index:
                still = [row for row in rows if plan.num_drafts[row] > index]
                if index > 1 and len(still) == len(rows) and self._decode_kv_cache is not None:
                    logits = self._read_on(self._decode_kv_cache, columns, batch)
                else:
                    starts = [plan.starts[row] + index for row in still]
                    ends = [start + 1 for start in starts]
                    logits, columns, batch = self._read([plan.slots[row] for row in still], starts, ends)
                rows = still
            self._draw(logits, columns, batch)

    def _draw(self, logits: torch.Tensor, columns: StepColumns, batch: Batch) -> None:
        needs = self._slots.needs(columns.row_slot[columns.sample_rows], columns.sample_positions)
        self._ops.sample(logits, self._slots, batch.sample_slots, batch.sample_positions, needs)

    def _catch_up(self, slots: list[int], ends: list[int]) -> list[int]:
        """Where each sequence is to be read from so that one more batch reads all up to `ends`. What that batch would
        not hold is read here."""
        starts = [self._progress.num_read(slot) for slot in slots]
        while sum(ends) - sum(starts) > max(self._max_tokens, len(slots)):
            room, reads = self._max_tokens, []
            for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
                count = min(room, end - 1 - start)
                if count > 0:
                    reads.append((slots[index], start, start + count))
                    starts[index] += count
                    room -= count
            self._forward(*(list(column) for column in zip(*reads, strict=True)))
        return starts

    def _read(self, slots: list[int], starts: list[int], ends: list[int]) -> tuple[torch.Tensor, StepColumns, Batch]:
        """Tokens [starts, ends) of each slot: logits after the last of each."""
        hidden, columns, batch = self._forward(slots, starts, ends)
        if batch.num_samples < batch.num_tokens:
            hidden = hidden.index_select(0, batch.sample_tokens)
        return self._model.logits(hidden), columns, batch

    def _read_on(self, decode_kv_cache: DecodeKvCache, columns: StepColumns, batch: Batch) -> torch.Tensor:
        """The next token of each row, on the CPU: `columns` and `batch`, of one token each, become this step's."""
        step_on(columns, batch, self._slots)
        groups = [(self.kv.layers[0], None)]
        return self._model.logits(cpu_forward.forward(self._model, self._ops, batch, groups, decode_kv_cache, []))

    def _forward(self, slots: list[int], starts: list[int], ends: list[int]) -> tuple[torch.Tensor, StepColumns, Batch]:
        if self._lone is not None:
            self._lone.rewind(slots, starts)
        step = _reading_step(slots, starts, ends)
        columns = columns_of(step)
        batch = make_batch(step, columns, self._slots, self._device)
        if self._decode_kv_cache is not None:
            groups = [(self.kv.layers[0], None)]
            return cpu_forward.forward(self._model, self._ops, batch, groups, self._decode_kv_cache, []), columns, batch
        batch.plans = [self._ops.prepare_attention(batch, 0, self.kv.layers[0], None)]
        return self._model(batch), columns, batch


def _reading_step(slots: list[int], starts: list[int], ends: list[int]) -> StepPlan:
    """Rows of one token first, as every plan has them."""
    order = sorted(range(len(slots)), key=lambda row: ends[row] - starts[row])
    counts = [ends[row] - starts[row] for row in order]
    return StepPlan(
        step=0,
        slots=[slots[row] for row in order],
        starts=[starts[row] for row in order],
        counts=counts,
        samples=[True] * len(slots),
        num_decodes=counts.count(1),
        num_tokens=sum(counts),
        admitted=[],
        block_updates=[],
    )
