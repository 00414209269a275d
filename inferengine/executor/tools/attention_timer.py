"""Times decode attention of a model's layers, as kernels/cuda/tuning/choices.py asks for it.

Keys and values are random numbers in a small cache of its own, in which blocks of different rows may be the same: calls
go through it in turn, so that they read what is not in L2. Each row's last block, to which the new token is written, is
never another row's other block, so that every launch finds what the one before found.

With few rows the output projection that follows is called too, and its own time is subtracted: what attention costs
there is largely how late the next product can start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch

from inferengine.executor.tools.call_timer import (
    COLD_BYTES,
    MOST_CALLS,
    CallTimer,
    check_result,
    compile_candidates,
    num_calls,
    with_choice,
)
from inferengine.kernels.batch import Batch, SlotMapping
from inferengine.layers.attention import Attention

MOST_BATCHES = 64  # with other blocks
LAST_WITH_PRODUCT = 64  # rows up to which the product that follows is called too
LEAST_S = 2e-6  # of attention: less of it, beside the product, is noise
CHECKED_ROWS = 3


class _AttentionInputs(NamedTuple):
    """Of one subject, number of rows and context: packed queries, keys and values of the new tokens [rows, (H+2K)*D],
    and batches whose rows have other blocks. `rotation` [positions, D] or None."""

    qkv: torch.Tensor
    batches: list[Batch]
    rotation: torch.Tensor | None
    num_calls: int


class AttentionTimer:
    """Times the attention of layers, given by subject (TunedAttention). `pool_bytes`: the most memory that the small
    cache takes."""

    def __init__(
        self,
        layers: dict[Any, list[Attention]],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        timer: CallTimer,
        pool_bytes: int,
    ) -> None:
        self._layers, self._device, self._dtype, self._kv_dtype = layers, device, dtype, kv_dtype
        self._timer, self._pool_bytes = timer, pool_bytes
        self._generator = torch.Generator(device).manual_seed(0)
        self._pools: dict[tuple[int, ...], torch.Tensor] = {}
        self._inputs: dict[tuple[Any, int, str], _AttentionInputs] = {}  # of the latest subject and rows
        self._expected: dict[tuple[Any, int, str], dict[int, torch.Tensor]] = {}
        self._product_s: dict[tuple[Any, int], float] = {}  # of the output projection alone

    @torch.inference_mode()
    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile the kernels of all choices, in parallel."""
        from inferengine.kernels.cuda.dispatch import attention_choices

        def launch(subject: Any, rows: int, choice: Any) -> None:
            inputs, layer = self._inputs_of(subject, rows, subject.cases(rows)[0]), self._layers[subject][0]
            with attention_choices.forcing(subject.key, choice):
                mixed = self._attend(subject, layer, inputs, inputs.batches[0])
                if rows <= LAST_WITH_PRODUCT:
                    layer.out(mixed)

        compile_candidates(work, launch)

    @torch.inference_mode()
    def prepare(self, subject: Any, rows: int, case: str, choice: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one layer's attention. Raises where the choice cannot be
        launched or computes something else than the reference."""
        from inferengine.kernels.cuda.dispatch import attention_choices

        inputs, layers = self._inputs_of(subject, rows, case), self._layers[subject]
        expected = self._expected_of(subject, rows, case)
        forcing = partial(attention_choices.forcing, subject.key, choice)
        with forcing():
            found = self._attend(subject, layers[0], inputs, inputs.batches[0])
            if not bool(found.isfinite().all()):
                raise ArithmeticError("the result is not finite")
            for row, numbers in expected.items():
                check_result(found[row].float(), numbers)
            calls = self._calls(subject, layers, inputs, with_product=rows <= LAST_WITH_PRODUCT)
            sample = self._timer.prepare(calls)
        product_s = self._product_seconds(subject, rows, inputs)
        return with_choice(forcing, lambda: max(LEAST_S, sample() - product_s))

    def _calls(
        self, subject: Any, layers: list[Attention], inputs: _AttentionInputs, *, with_product: bool
    ) -> list[Callable[[], object]]:
        batches, turns = cycle(inputs.batches), cycle(layers)

        def call() -> object:
            layer = next(turns)
            mixed = self._attend(subject, layer, inputs, next(batches))
            return layer.out(mixed) if with_product else mixed

        return [call] * inputs.num_calls

    def _attend(self, subject: Any, layer: Attention, inputs: _AttentionInputs, batch: Batch) -> torch.Tensor:
        """Return one layer's attention, as `Attention.mix` calls it, over the small cache."""
        mixed: torch.Tensor = layer.ops.attention_qkv(
            inputs.qkv, layer.q_gain, layer.k_gain, layer.eps, inputs.rotation, self._pool(subject), batch, layer.group,
            layer.num_heads, layer.num_kv_heads, layer.scale, layer.window, layer.softcap, (1.0, 1.0),
            layer.sink_scores, layer.new_keys,
        )  # fmt: skip
        return mixed

    def _product_seconds(self, subject: Any, rows: int, inputs: _AttentionInputs) -> float:
        """Return how long the output projection takes by itself, of layer after layer."""
        if rows > LAST_WITH_PRODUCT:
            return 0.0
        known = self._product_s.get((subject, rows))
        if known is None:
            layers = self._layers[subject]
            mixed = inputs.qkv[:, : layers[0].num_heads * layers[0].head_dim].contiguous()
            turns = cycle(layers)
            sample = self._timer.prepare([lambda: next(turns).out(mixed)] * MOST_CALLS)
            known = self._product_s[subject, rows] = sorted(sample() for _ in range(3))[1]
        return known

    # -- what is computed --------------------------------------------------------------------------------------------

    def _pool(self, subject: Any) -> torch.Tensor:
        """Return the small cache, filled with random numbers."""
        key = subject.key
        shape = (2, key.num_kv_heads, key.block_size, key.head_dim)
        pool = self._pools.get(shape)
        if pool is None:
            block = torch.Size(shape).numel()
            count = max(4, self._pool_bytes // (block * self._kv_dtype.itemsize))
            pool = torch.empty(count, *shape, dtype=self._kv_dtype, device=self._device)
            for part in pool.split(max(1, (4 << 20) // block)):  # random numbers take more memory than an FP8 cache
                part.copy_(torch.randn(part.shape, device=self._device, generator=self._generator))
            self._pools[shape] = pool
        return pool

    def _inputs_of(self, subject: Any, rows: int, case: str) -> _AttentionInputs:
        """Return the inputs of a case; those of another subject or number of rows are forgotten."""
        found = self._inputs.get((subject, rows, case))
        if found is None:
            if not any(known[:2] == (subject, rows) for known in self._inputs):
                self._inputs.clear()
                self._expected.clear()
            found = self._inputs[subject, rows, case] = self._make_inputs(subject, rows, int(case))
        return found

    def _make_inputs(self, subject: Any, rows: int, context: int) -> _AttentionInputs:
        from inferengine.kernels.cuda.tuning.tuned_attention import row_blocks

        key, size = subject.key, subject.key.block_size
        counts = row_blocks(rows, context, size, subject.longest)
        lengths = [count * size - row % size for row, count in enumerate(counts)]
        read_bytes = subject.read_bytes(rows, context)
        tables = self._block_tables(counts, size, len(self._pool(subject)), -(-COLD_BYTES // read_bytes))
        layer = self._layers[subject][0]
        rotation = None
        if layer.rope is not None:
            rotation = torch.rand(
                max(lengths), key.head_dim, dtype=torch.float32, device=self._device, generator=self._generator
            )
        width = sum(layer.qkv.parts)
        qkv = torch.randn(rows, width, dtype=self._dtype, device=self._device, generator=self._generator)
        return _AttentionInputs(
            qkv, list(self._batches(tables, lengths, size, layer.group)), rotation, num_calls(read_bytes)
        )

    def _block_tables(self, counts: Sequence[int], size: int, num_blocks: int, wanted: int) -> torch.Tensor:
        """Return block tables [batches, rows, blocks] of the small cache, in random order. The first blocks are the
        rows' last ones, each for as many rows as it has tokens, at different places. The others are handed out in
        turn."""
        rows = len(counts)
        own = min(-(-rows // size), num_blocks - 1)
        order = own + torch.randperm(num_blocks - own, generator=torch.Generator().manual_seed(0))
        total = max(1, sum(counts) - rows)
        number = max(1, min(MOST_BATCHES, wanted, max(1, len(order) // total)))
        table = torch.zeros(number, rows, max(counts) + 1, dtype=torch.int32)
        place = 0
        for batch in range(number):
            for row, count in enumerate(counts):
                table[batch, row, : count - 1] = order[torch.arange(place, place + count - 1) % len(order)]
                table[batch, row, count - 1] = row // size % own
                place += count - 1
        return table.to(self._device)

    def _batches(self, tables: torch.Tensor, lengths: Sequence[int], size: int, group: int) -> Iterator[Batch]:
        rows = len(lengths)
        flat = tables.flatten(0, 1)
        row_len = torch.tensor(lengths, dtype=torch.int32, device=self._device)
        counting = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        for number in range(len(tables)):
            batch = Batch()
            batch.columns = None
            batch.num_tokens = batch.num_rows = batch.num_decodes = batch.num_samples = rows
            batch.block_size, batch.block_tables = size, [flat] * (group + 1)
            batch.row_slot = batch.token_slot = counting[:rows] + number * rows
            batch.row_len = row_len
            batch.row_start = batch.positions = row_len - 1
            batch.query_start, batch.token_row = counting, counting[:rows]
            batch.slot_mapping = SlotMapping(batch.block_tables, batch.token_slot, batch.positions, size)
            yield batch

    # -- what must come out ------------------------------------------------------------------------------------------

    def _expected_of(self, subject: Any, rows: int, case: str) -> dict[int, torch.Tensor]:
        """Return the results [H * D] of some rows, by torch in fp32. The new keys and values of all rows are in the
        cache then: another case may have left its own there."""
        from inferengine.kernels.cuda.rope_kv_write import qkv_rope_write

        inputs, layer, pool = self._inputs_of(subject, rows, case), self._layers[subject][0], self._pool(subject)
        batch = inputs.batches[0]
        queries = qkv_rope_write(
            inputs.qkv, layer.q_gain, layer.k_gain, layer.eps, inputs.rotation, batch.positions,
            batch.slot_mapping[layer.group], pool, layer.num_heads, layer.num_kv_heads,
            new_keys=layer.new_keys,
        )  # fmt: skip
        known = self._expected.get((subject, rows, case))
        if known is None:
            chosen = sorted({0, rows - 1, int(batch.row_len.argmax())})[:CHECKED_ROWS]
            known = {row: _reference(layer, queries[row], pool, batch, row) for row in chosen}
            self._expected[subject, rows, case] = known
        return known


def _reference(layer: Attention, query: torch.Tensor, pool: torch.Tensor, batch: Batch, row: int) -> torch.Tensor:
    """Return one row's attention [H * D] in fp32, one KV head after the other: query [H, D]."""
    length = int(batch.row_len[row])
    first = 0 if layer.window is None else max(0, length - layer.window)
    positions = torch.arange(first, length, device=pool.device)
    blocks = batch.block_tables[layer.group][batch.row_slot[row].long(), positions // batch.block_size].long()
    group = layer.num_heads // layer.num_kv_heads
    results = []
    for head in range(layer.num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        keys, values = (pool[blocks, kind, head, positions % batch.block_size].float() for kind in range(2))
        scores = query[heads].float() @ keys.t() * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.sink_scores is not None:
            scores = torch.cat((scores, layer.sink_scores[heads].float().unsqueeze(1)), 1)
        results.append(scores.softmax(-1)[:, : len(positions)] @ values)
    return torch.cat(results).flatten()
