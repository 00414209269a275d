"""DraftModel: a small model of the same vocabulary that drafts tokens for the target model to verify.

It reads and writes the same slots and block tables, with a KV cache of its own: block b of its cache holds the same
tokens as block b of the target's. DraftProgress tracks what it has computed of each sequence. It computes the rest only
when draft tokens are asked for, so a step without them, or speculation that is switched off, costs nothing.

A draft token is drawn with the parameters and the random numbers of the request, at its position. The target's draw
there uses the same noise, so the two agree whenever their distributions do (Gumbel-max coupling, see Daliri, Musco and
Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2025), and what is emitted is
always the target's own draw.

CpuDraftRunner does it on the CPU for one token of one sequence at a time. As an ordinary step a draft token is a batch
to describe, attention to plan and a hundred calls of torch, each on a kilobyte: 1.0 ms of which 0.1 are arithmetic,
where a step of the target model takes 3.8. This runner does the same with a quarter of the calls, most of them numpy's,
over keys and values that are contiguous by sequence: 0.25 ms. It writes the paged cache too, so ordinary steps find its
results.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from inferengine.core.executor import KVGroup, StepPlan
from inferengine.errors import ConfigError
from inferengine.executor.cpu_step import forward_on_cpu
from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.slots import Slots, advance_by_one, columns_of, make_batch
from inferengine.executor.warm_up import CHUNKS, decode_row_classes
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu import DecodeKvCache
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import GatedMLP, Linear
from inferengine.models import registry, weights
from inferengine.models.layer_kinds import one_layer_of_each_kind
from inferengine.models.llama import Llama, LlamaLayer
from inferengine.models.parallel import pad_vocabulary

KEY = "speculation.draft_model"


def read_draft_config(folder: Path, target: DecoderConfig, max_model_len: int) -> DecoderConfig:
    """Read the draft model's configuration. Raises ConfigError where it cannot draft for this target."""
    config, _ = registry.read_model_config(folder)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(KEY, f"has {config.vocab_size} tokens in its vocabulary, the model has {target.vocab_size}")
    if config.states:
        raise ConfigError(KEY, "keeps a state of every request, which cannot be taken back: choose another draft")
    if config.max_position < max_model_len:
        raise ConfigError(KEY, f"was made for {config.max_position} tokens, model.max_model_len is {max_model_len}")
    if config.group_windows != (None,) or target.group_windows[0] is not None:
        raise ConfigError(KEY, "sliding windows without full attention cannot be followed: choose another draft")
    return config


def target_kv_bytes(budget_bytes: int, target: DecoderConfig, draft: DecoderConfig) -> int:
    """Return the target's bytes of the KV budget, when the draft's cache has as many blocks."""
    item = 2  # cancels out: both caches have the same type
    own = sum(target.kv_bytes_per_token(group, item) for group in range(len(target.group_windows)))
    return budget_bytes * own // (own + draft.kv_bytes_per_token(0, item))


class DraftProgress:
    """Tracks how many tokens of each sequence the draft model has computed, and which cached blocks it has computed.

    A block that a finished sequence leaves in the prefix cache may have been computed by the target alone, so there is
    a flag per block. Blocks are those of KV group 0, which holds every position. Host memory only.
    """

    def __init__(self, num_slots: int, num_blocks: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_slots + 1, max_blocks), dtype=np.int64)
        self._is_read = np.zeros(num_blocks + 1, dtype=np.bool_)  # by block: all of its tokens are computed
        self._num_read = np.zeros(num_slots + 1, dtype=np.int64)  # by slot: tokens computed, from the first
        self._num_marked = np.zeros(num_slots + 1, dtype=np.int64)  # by slot: leading blocks known to be flagged
        self._ahead: set[int] = set()  # slots with draft tokens computed, until it is known which were accepted

    def begin(self, plan: StepPlan) -> None:
        """Take in the changes of a step that is about to run."""
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
                    self._num_read[slot] = min(self._num_read[slot], start)  # draft tokens that were rejected
            self._ahead.difference_update(plan.slots)

    def num_read(self, slot: int) -> int:
        """Return the number of the sequence's tokens that need not be computed again."""
        return int(self._num_read[slot])

    def has_read(self, slot: int, num_known: int, num_drafts: int) -> None:
        """Record that the draft's KV holds the first tokens of the sequence, and draft tokens after them."""
        self._num_read[slot] = num_known + num_drafts
        if num_drafts:
            self._ahead.add(slot)
        first, full = int(self._num_marked[slot]), num_known // self._block_size
        if full > first:
            self._is_read[self._tables[slot, first:full]] = True
            self._num_marked[slot] = full


class DraftModel:
    """Loaded beside the target model. Called by the executor's thread."""

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
    ) -> None:
        """`max_tokens` bounds the tokens of a batch. `group` is the target's KV group 0."""
        self._config, self._ops, self._slots, self._device = config, ops, slots, slots.device
        self._max_tokens, self._dtype = max_tokens, dtype
        self._progress = DraftProgress(slots.num_slots, group.num_blocks, slots.max_blocks, block_size)
        _, family = registry.read_model_config(folder)
        with torch.device("meta"):
            model = family.build(ops, config)
        if ops.pads_vocabulary:
            pad_vocabulary(model)
        weights.load_weights(model, family.weight_map(config), folder, dtype=dtype, device=self._device)
        weights.finish(model)
        self._model = model
        self._model.eval()
        self.kv = KVCache(config, [group], block_size, dtype, self._device)
        self.kv.bind(self._model, max_model_len)
        self._decode_kv_cache = DecodeKvCache(len(self.kv.layers)) if self._device.type == "cpu" else None
        self._cpu_runner: CpuDraftRunner | None = None
        if suits(config, dtype, self._device) and isinstance(self._model, Llama):
            self._cpu_runner = CpuDraftRunner(self._model, config, self.kv, ops, slots)

    def begin(self, plan: StepPlan) -> None:
        """Apply the block copies and admissions of a step that is about to run."""
        self.kv.copy_blocks(plan)
        self._progress.begin(plan)
        if self._decode_kv_cache is not None:
            self._decode_kv_cache.drop([item.slot for item in plan.admitted])
        if self._cpu_runner is not None and plan.admitted:
            self._cpu_runner.drop([item.slot for item in plan.admitted])

    def run_all_sizes(self) -> None:
        """Run chunks and decodes of every class of sizes through the scratch slot, to compile their kernels."""
        slot, longest = self._slots.num_slots, self._slots.tokens.shape[1] - 1
        decodes = decode_row_classes(self._config, self.kv, self._dtype, slot)
        with one_layer_of_each_kind(self._model):
            for count in (*CHUNKS, self._max_tokens):
                self._read([slot], [0], [min(count, longest)])
            for rows in decodes:
                self._read([slot] * rows, [0] * rows, [1] * rows)

    def propose(self, plan: StepPlan) -> None:
        """Write the draft tokens of every row that verifies some, after its pending token. Each is drawn after the one
        before it; before the first, the draft model computes what it has not computed yet of the sequence."""
        rows = [row for row, count in enumerate(plan.num_drafts) if count]
        slots, ends = [plan.slots[row] for row in rows], [plan.starts[row] + 1 for row in rows]
        starts = self._catch_up(slots, ends)
        counts = [plan.num_drafts[row] for row in rows]
        if self._cpu_runner is not None and self._cpu_runner.can_take(slots, max(ends) + max(counts)):
            self._propose_one_by_one(self._cpu_runner, slots, starts, ends, counts)
        else:
            self._propose_in_batch(plan, rows, starts)
        for slot, end, count in zip(slots, ends, counts, strict=True):
            self._progress.has_read(slot, end, count - 1)

    def _propose_one_by_one(
        self, runner: CpuDraftRunner, slots: list[int], starts: list[int], ends: list[int], counts: list[int]
    ) -> None:
        """Propose for one sequence after the other, on the CPU. Sequences that are far behind are computed as a batch
        first."""
        if self._decode_kv_cache is not None and self._decode_kv_cache.copies:
            self._decode_kv_cache.drop(slots)
        if any(end - start > MOST_BEHIND for start, end in zip(starts, ends, strict=True)):
            self._draw(*self._read(slots, starts, ends))
            starts, ends, counts = ends, [end + 1 for end in ends], [count - 1 for count in counts]
        for slot, start, end, count in zip(slots, starts, ends, counts, strict=True):
            if count:
                runner.propose(slot, start, end, count)

    def _propose_in_batch(self, plan: StepPlan, rows: list[int], starts: list[int]) -> None:
        """Propose one draft token of all rows at a time."""
        slots, ends = [plan.slots[row] for row in rows], [plan.starts[row] + 1 for row in rows]
        logits, columns, batch = self._read(slots, starts, ends)
        for index in range(max(plan.num_drafts)):
            if index:
                still = [row for row in rows if plan.num_drafts[row] > index]
                if index > 1 and len(still) == len(rows) and self._decode_kv_cache is not None:
                    logits = self._read_next(self._decode_kv_cache, columns, batch)
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
        """Compute tokens until one more batch holds all the rest up to `ends`. Returns where that batch starts in each
        sequence."""
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
        """Compute tokens [starts, ends) of each slot. Returns the logits after the last of each."""
        hidden, columns, batch = self._forward(slots, starts, ends)
        if batch.num_samples < batch.num_tokens:
            hidden = hidden.index_select(0, batch.sample_tokens)
        return self._model.logits(hidden), columns, batch

    def _read_next(self, decode_kv_cache: DecodeKvCache, columns: StepColumns, batch: Batch) -> torch.Tensor:
        """Compute the next token of each row, on the CPU: `columns` and `batch`, of one token each, are advanced."""
        advance_by_one(columns, batch, self._slots)
        hidden = forward_on_cpu(self._model, self._ops, batch, self.kv.group_caches, decode_kv_cache, [])
        return self._model.logits(hidden)

    def _forward(self, slots: list[int], starts: list[int], ends: list[int]) -> tuple[torch.Tensor, StepColumns, Batch]:
        if self._cpu_runner is not None:
            self._cpu_runner.rewind(slots, starts)
        step = _chunks_plan(slots, starts, ends)
        columns = columns_of(step)
        batch = make_batch(step, columns, self._slots, self._device)
        if self._decode_kv_cache is not None:
            hidden = forward_on_cpu(self._model, self._ops, batch, self.kv.group_caches, self._decode_kv_cache, [])
            return hidden, columns, batch
        batch.plans = [self._ops.prepare_attention(batch, 0, self.kv.layers[0], None)]
        return self._model(batch), columns, batch


def _chunks_plan(slots: list[int], starts: list[int], ends: list[int]) -> StepPlan:
    """Return a step of tokens [starts, ends) of each slot; rows of one token come first, as in every plan."""
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


# -- one token at a time on the CPU ------------------------------------------------------------------------------------


MOST_ROWS = 4  # up to so many sequences, one after the other is cheaper than a batch
MOST_BEHIND = 4  # up to so many tokens of a sequence, one after the other is cheaper than a chunk
MOST_BYTES = 16 << 20  # of the contiguous keys and values of one sequence
ROOM = 256  # tokens by which the copy of a sequence grows; a multiple of every block size


class _Layer(NamedTuple):
    attention_gain: np.ndarray
    qkv: Linear
    out: Linear
    mlp_gain: np.ndarray
    gate_up: Linear
    down: Linear
    kv: np.ndarray  # [num_blocks + 1, 2, K, block_size, D]


class _SequenceKV:
    """Contiguous keys and values of one sequence: `tensors[layer]` and `arrays[layer]` [2, K, capacity, D] share
    memory."""

    def __init__(self, num_layers: int, num_kv_heads: int, capacity: int, head_dim: int) -> None:
        self.num_known = 0  # tokens held, from the first
        self.capacity = capacity
        self.tensors = list(torch.zeros(num_layers, 2, num_kv_heads, capacity, head_dim))
        self.arrays = [tensor.numpy() for tensor in self.tensors]


def suits(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether CpuDraftRunner can compute this model: a Llama in fp32, with biases or without."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and config.group_windows == (None,)
        and config.latent is None
        and config.moe is None
        and config.rope is not None
        and config.activation == "silu"
        and not config.qk_norm
        and config.attention_softcap is None
        and config.is_plain
        and not config.wide_qk_norm
        and not config.no_rope_layers
        and config.embedding_scale is None
        and config.logits_scale is None
        and config.logits_softcap is None
        and config.query_scaling is None
        and config.learned_positions is None
        and config.layer_inputs is None
        and not config.sinks
    )


class CpuDraftRunner:
    """Runs one draft model over its own copy of the sequences' keys and values, and over the paged cache `kv`."""

    def __init__(self, model: Llama, config: DecoderConfig, kv: KVCache, ops: Ops, slots: Slots) -> None:
        self._model, self._ops, self._slots = model, ops, slots
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._scale = config.norm_eps, np.float32(config.attention_scale)
        assert model.embed.weight is not None  # drafts are never packed
        self._embedding = model.embed.weight.detach().numpy()
        decoders = [layer for layer in model.layers if isinstance(layer, LlamaLayer)]
        self._layers = [_layer(decoder, cache) for decoder, cache in zip(decoders, kv.layers, strict=True)]
        angles = decoders[0].attention.cos_sin
        if angles is None:
            raise RuntimeError("the model is not bound to its cache")
        self._cos, self._sin = (
            angles.numpy()[:, None, : self._head_dim // 2],
            angles.numpy()[:, None, self._head_dim // 2 :],
        )
        self._copies: dict[int, _SequenceKV] = {}  # by slot

    def drop(self, slots: list[int]) -> None:
        """Drop the copies of slots that new sequences take over."""
        for slot in slots:
            self._copies.pop(slot, None)

    def rewind(self, slots: list[int], starts: list[int]) -> None:
        """Cut the copies of slots whose tokens an ordinary step computes from `starts` on."""
        for slot, start in zip(slots, starts, strict=True):
            copy = self._copies.get(slot)
            if copy is not None:
                copy.num_known = min(copy.num_known, start)

    def can_take(self, slots: list[int], longest: int) -> bool:
        """Return whether these sequences, of up to `longest` tokens, are few and short enough."""
        num_bytes = len(self._layers) * 2 * self._num_kv_heads * self._head_dim * 4 * (longest + ROOM)
        return len(slots) <= MOST_ROWS and num_bytes <= MOST_BYTES

    def propose(self, slot: int, start: int, end: int, count: int) -> None:
        """Compute tokens [start, end) of the sequence, then draw `count` draft tokens, each after the one before."""
        copy = self._copy_of(slot, end + count)
        block_size = self._slots.block_size
        tokens, blocks = self._slots.tokens.numpy()[slot], self._slots.block_tables[0].numpy()[slot]
        if copy.num_known < start:
            self._gather(copy, blocks, start)
        slots, position_drawn = np.array([slot], dtype=np.int32), np.empty(1, dtype=np.int32)
        rows, positions = torch.from_numpy(slots), torch.from_numpy(position_drawn)
        num_threads = torch.get_num_threads()
        if num_threads > 1:
            torch.set_num_threads(1)
        with np.errstate(all="ignore"):  # `sample` handles scores that are no numbers
            for position in range(start, end + count - 1):
                hidden = self._compute(copy, int(tokens[position]), position, int(blocks[position // block_size]))
                if position >= end - 1:
                    position_drawn[0] = position + 1
                    needs = self._slots.needs(slots, position_drawn)
                    logits = self._model.logits(torch.from_numpy(hidden))
                    self._ops.sample(logits, self._slots, rows, positions, needs)
        if num_threads > 1:
            torch.set_num_threads(num_threads)
        copy.num_known = end + count - 1

    # -- inside ------------------------------------------------------------------------------------------------------

    def _compute(self, copy: _SequenceKV, token: int, position: int, block: int) -> np.ndarray:
        """Return the residual stream [1, E] after all layers; keys and values go to the copy and to the paged cache."""
        num_heads, num_kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        linear, length, offset = self._ops.linear, position + 1, position % self._slots.block_size
        cos, sin = self._cos[position], self._sin[position]
        x = self._embedding[token : token + 1].copy()
        for layer, both, array in zip(self._layers, copy.tensors, copy.arrays, strict=True):
            qkv = linear(self._norm(x, layer.attention_gain), layer.qkv.packed, layer.qkv.offset)
            heads = qkv.numpy().reshape(-1, head_dim)
            rotated = heads[: num_heads + num_kv_heads].reshape(-1, 2, head_dim // 2)
            left, right = rotated[:, 0], rotated[:, 1]
            rotated_left = left * cos - right * sin
            rotated[:, 1] = right * cos + left * sin
            rotated[:, 0] = rotated_left
            new = heads[num_heads:].reshape(2, num_kv_heads, head_dim)
            array[:, :, position] = new
            layer.kv[block, :, :, offset] = new
            heads[:num_heads] *= self._scale
            queries = qkv[0, : num_heads * head_dim].view(num_kv_heads, -1, head_dim)
            scores = torch.bmm(queries, both[0].narrow(1, 0, length).transpose(1, 2))
            mixed = torch.bmm(torch.softmax(scores, -1), both[1].narrow(1, 0, length)).view(1, -1)
            x += linear(mixed, layer.out.packed, layer.out.offset).numpy()
            gated = linear(self._norm(x, layer.mlp_gain), layer.gate_up.packed, layer.gate_up.offset)
            x += linear(self._ops.silu_and_mul(gated), layer.down.packed, layer.down.offset).numpy()
        return x

    def _norm(self, x: np.ndarray, gain: np.ndarray) -> torch.Tensor:
        """Return the root mean square norm of x [1, E]."""
        row = x[0]
        normed = x * np.float32((float(row.dot(row)) / len(row) + self._eps) ** -0.5)
        normed *= gain
        return torch.from_numpy(normed)

    def _copy_of(self, slot: int, longest: int) -> _SequenceKV:
        """Return the copy of a sequence, with room for `longest` tokens."""
        copy = self._copies.get(slot)
        if copy is not None and longest <= copy.capacity:
            return copy
        if copy is None and len(self._copies) >= MOST_ROWS:
            self._copies.pop(next(iter(self._copies)))  # the oldest; it is gathered again if its sequence goes on
        capacity = (longest // ROOM + 2) * ROOM
        copy = self._copies[slot] = _SequenceKV(len(self._layers), self._num_kv_heads, capacity, self._head_dim)
        return copy

    def _gather(self, copy: _SequenceKV, blocks: np.ndarray, end: int) -> None:
        """Copy the tokens up to `end` from the paged cache."""
        block_size = self._slots.block_size
        first, last = copy.num_known // block_size, -(-end // block_size)
        for layer, array in zip(self._layers, copy.arrays, strict=True):
            found = layer.kv[blocks[first:last]]  # [blocks, 2, K, block_size, D]
            contiguous = found.transpose(1, 2, 0, 3, 4).reshape(2, self._num_kv_heads, -1, self._head_dim)
            array[:, :, first * block_size : last * block_size] = contiguous
        copy.num_known = end


def _layer(decoder: LlamaLayer, kv: torch.Tensor) -> _Layer:
    assert decoder.attention_norm is not None  # `suits` has looked
    assert decoder.mlp_norm is not None
    assert isinstance(decoder.mlp, GatedMLP)
    return _Layer(
        decoder.attention_norm.weight.detach().numpy(),
        decoder.attention.qkv,
        decoder.attention.out,
        decoder.mlp_norm.weight.detach().numpy(),
        decoder.mlp.gate_up,
        decoder.mlp.down,
        kv.numpy(),
    )
