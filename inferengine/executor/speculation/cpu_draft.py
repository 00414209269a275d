"""CpuDraftRunner: runs a small draft model on the CPU for one token of one sequence at a time.

A draft token is a pass through a model of a few layers for one token. As an ordinary step that is a batch to describe,
attention to plan and a hundred calls of torch, each on a kilobyte: 1.0 ms of which 0.1 are arithmetic, where a step of
the target model takes 3.8. This runner does the same with a quarter of the calls, most of them numpy's, over keys and
values that are contiguous by sequence: 0.25 ms. It writes the paged cache too, so ordinary steps find its results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.slots import Slots
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.layers.mlp import GatedMLP
from inferengine.models.llama import Llama, LlamaLayer

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
    """Whether CpuDraftRunner can compute this model: a Llama in fp32, with biases or without."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and config.group_windows == (None,)
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
    )


class CpuDraftRunner:
    """Runs one draft model over its own copy of the sequences' keys and values, and over the paged cache `kv`."""

    def __init__(self, model: Llama, config: DecoderConfig, kv: KVCache, ops: Ops, slots: Slots) -> None:
        self._model, self._ops, self._slots = model, ops, slots
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._scale = config.norm_eps, np.float32(config.attention_scale)
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
        """Whether these sequences, of up to `longest` tokens, are few and short enough."""
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
        """The residual stream [1, E] after all layers; keys and values go to the copy and to the paged cache."""
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
        """Root mean square norm of x [1, E]."""
        row = x[0]
        normed = x * np.float32((float(row.dot(row)) / len(row) + self._eps) ** -0.5)
        normed *= gain
        return torch.from_numpy(normed)

    def _copy_of(self, slot: int, longest: int) -> _SequenceKV:
        """The copy of a sequence, with room for `longest` tokens."""
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
