"""Decode steps as CUDA graphs: one launch per step for every batch size, captured at start.

A graph holds the model, the head and the draw for a padded batch; all sizes share one memory pool. The inputs of a step
are copied from pinned memory into one int32 buffer: slot, position, length and place of the input token of every row.
Padded rows belong to the scratch slot. Draws that need more than temperature and filters run after the graph, on its
logits. Source: CUDA programming guide, "CUDA Graphs".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from inferengine.executor.memory.kv_cache import GroupCache
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import Batch, SlotMapping, StepColumns
from inferengine.kernels.ops import Ops
from inferengine.kernels.reference.sampling import FILTER, RANDOM
from inferengine.models.decoder import DecoderModel

MemoryPool = Any  # torch's handle of a pool that graphs allocate from: a private type

COLUMNS = 4  # row_slot, row_start, row_len, place of the input token in slots.tokens
RING = 4  # pinned buffers used in turn: more than the steps that can be under way
DRAWS = (0, RANDOM, RANDOM | FILTER)  # sampler features that a graph can hold: their inputs have fixed addresses
SLOW_TOKENS = 448  # tokens of a step that is slower than one of 512: 15.9 ms and 13.4 for the 8B on an H200 (cuBLAS)
LARGEST_WITH_DRAWS = 8  # rows: above, launching the draw hides behind the step, and a fourth of the graphs is enough


class CapturedStep(NamedTuple):
    """A graph and the tensors that hold its results. `ids` is None for a graph that ends with the logits."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, V]
    ids: torch.Tensor | None  # [size] int32


def padded_sizes(most: int) -> list[int]:
    """Batch sizes to capture up to `most`: closer together where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    return [size for size in sizes if size < most and size != SLOW_TOKENS] + [most]


def captured_draws(size: int) -> tuple[int | None, ...]:
    """The sampler features that graphs of `size` rows are captured with; None: up to the logits."""
    return (*DRAWS, None) if size <= LARGEST_WITH_DRAWS else (None,)


def graphs_to_capture(max_rows: int, slow_rows: Collection[int] = ()) -> list[tuple[int, int | None]]:
    """Batch size and sampler features of each graph, largest first: the pool then has its full size from the start.
    Sizes of `slow_rows` are left out: a larger step takes less time."""
    sizes = [size for size in padded_sizes(max_rows) if size == max_rows or size not in slow_rows]
    return [(size, needs) for size in reversed(sizes) for needs in captured_draws(size)]


class DecodeGraphs:
    """All captured decode steps of a model. `needs` are the sampler features that a graph draws with; None: it ends
    with the logits."""

    def __init__(
        self,
        model: DecoderModel,
        ops: Ops,
        slots: Slots,
        group_caches: list[GroupCache],
        max_rows: int,
        slow_rows: Collection[int] = (),
    ) -> None:
        self.model, self.ops, self.slots, self.group_caches = model, ops, slots, group_caches
        self._graphs = graphs_to_capture(max_rows, slow_rows)
        self.sizes = sorted({size for size, _ in self._graphs})
        device = slots.device
        self._columns = torch.zeros(COLUMNS, max_rows, dtype=torch.int32, device=device)
        self._columns[0].fill_(slots.num_slots)
        self._columns[2].fill_(1)
        self._columns[3].fill_(slots.num_slots * slots.tokens.shape[1])
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._pinned = [torch.empty(COLUMNS, max_rows, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._next = 0
        self._captured: dict[tuple[int, int | None], CapturedStep] = {}
        self.pool: MemoryPool = None  # shared with other graphs that never run at the same time

    def capture_all(self, progress: Callable[[float], None]) -> None:
        """Capture every size, with each of its draws."""
        for index, (size, needs) in enumerate(self._graphs):
            self._capture(size, needs)
            progress((index + 1) / len(self._graphs))

    def run_all_eagerly(self) -> None:
        """Run every step to capture once without a graph, to compile its kernels. The draw's kernels are the same for
        any number of rows."""
        for size in self.sizes:
            self._compute(size, None)
        for needs in DRAWS:
            self._compute(self.sizes[0], needs)

    def draws_for(self, num_rows: int, needs: int) -> int | None:
        """The `needs` of the graph for a step of `num_rows` rows whose draws need these features."""
        return needs if needs in captured_draws(self._padded(num_rows)) else None

    def _padded(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def run(self, columns: StepColumns, needs: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch the step. Returns (logits [N, V], ids [N] or None), views that the next launch overwrites."""
        count = len(columns.row_slot)
        size = self._padded(count)
        self._upload(columns, count, size)
        captured = self._captured[size, needs]
        captured.graph.replay()
        return captured.logits[:count], None if captured.ids is None else captured.ids[:count]

    def batch(self, size: int) -> Batch:
        """The static batch of `size` rows, without its input tokens."""
        slots, columns = self.slots, self._columns
        batch = Batch()
        batch.columns = None
        batch.num_tokens = batch.num_rows = batch.num_decodes = batch.num_samples = size
        batch.block_size, batch.block_tables = slots.block_size, slots.block_tables
        batch.row_slot = batch.token_slot = batch.sample_slots = columns[0, :size]
        batch.row_start = batch.positions = columns[1, :size]
        batch.row_len = batch.sample_positions = columns[2, :size]
        batch.query_start = self._counting[: size + 1]
        batch.token_row = batch.sample_rows = batch.sample_tokens = self._counting[:size]
        batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
        batch.plans = []
        return batch

    def input_ids(self, size: int) -> torch.Tensor:
        """Look the rows' input tokens up on the device: [size] int32."""
        return self.slots.tokens.view(-1).index_select(0, self._columns[3, :size])

    def _compute(self, size: int, needs: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch = self.batch(size)
        batch.input_ids = self.input_ids(size)
        batch.plans = [
            self.ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(self.group_caches)
        ]
        logits = self.model.logits(self.model(batch))
        if needs is None:
            return logits, None
        return logits, self.ops.sample(logits, self.slots, batch.sample_slots, batch.sample_positions, needs)

    def _capture(self, size: int, needs: int | None) -> None:
        side = torch.cuda.Stream(self.slots.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(size, needs)  # compiles kernels and allocates workspaces outside the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):
            logits, ids = self._compute(size, needs)
        self.pool = self.pool or graph.pool()
        self._captured[size, needs] = CapturedStep(graph, logits, ids)

    def _upload(self, columns: StepColumns, count: int, size: int) -> None:
        """Copy the plan's columns through pinned memory; rows [count, size) become the scratch slot's."""
        pinned = self._pinned[self._next]
        self._next = (self._next + 1) % RING
        host: np.ndarray = pinned.numpy()
        width = self.slots.tokens.shape[1]
        host[0, :count], host[1, :count], host[2, :count] = columns.row_slot, columns.row_start, columns.row_len
        host[3, :count] = columns.row_slot * width + columns.row_start
        scratch = self.slots.num_slots
        host[0, count:size], host[1, count:size], host[2, count:size] = scratch, 0, 1
        host[3, count:size] = scratch * width
        self._columns.copy_(pinned, non_blocking=True)
