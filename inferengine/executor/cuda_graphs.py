"""Steps as CUDA graphs: decode steps, and small steps with prompt chunks. Source: CUDA programming guide, "CUDA
Graphs".

DecodeGraphs: one launch per step for every batch size. A graph holds the model, the head and the draw for a padded
batch; all sizes share one memory pool. The inputs of a step are copied from pinned memory into one int32 buffer: slot,
position, length and place of the input token of every row. Padded rows belong to the scratch slot. Draws that need more
than temperature and filters run after the graph, on its logits. Steps whose rows share prefixes have graphs of their
own, for fewer sizes and up to the logits; further columns say who shares what (memory/prefix_groups.py). Other steps
run the graphs that know nothing of it, and cost what they did.

MixedGraphs: steps of some decodes and some prompt tokens, for sizes that the host launches more slowly than the device
runs them. A step is padded to the next captured shape: decode rows to `decodes`, prompt tokens to `prompt_tokens`,
prompts to PROMPT_ROWS. Padded decode rows belong to the scratch slot, padded prompt tokens to no row: their keys go to
the scratch block and their results are never read. The kernels find rows by `query_start` on the device, so one graph
serves every split of the tokens into prompts. It ends with the logits of the drawing rows; draws follow outside. All
columns of a step are copied from pinned memory into one int32 buffer, as for decodes.

GraphCapture: captures them one after the other, for both. `first` gives the graphs that a start waits for: a step of
any number of rows has one to be padded to. `later` gives the others, which may be captured between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from inferengine.core.executor import StepPlan
from inferengine.executor.memory.kv_cache import GroupCache
from inferengine.executor.memory.prefix_groups import PrefixGroups, RowGroups
from inferengine.executor.slots import Slots
from inferengine.kernels.batch import MOST_GROUPS, Batch, SharedPrefixColumns, SlotMapping, StepColumns
from inferengine.kernels.ops import Ops
from inferengine.kernels.reference.ops import FILTER, RANDOM
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models.decoder import DecoderModel
from inferengine.models.layer_kinds import layers_of_each_kind, with_layers

T = TypeVar("T")

COLUMNS = 4  # row_slot, row_start, row_len, place of the input token in slots.tokens
SHARED_COLUMNS = 5  # where rows share prefixes: lengths, members, and three of groups
SHARED_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows of graphs of steps that share prefixes
RING = 4  # pinned buffers used in turn: as many as steps are under way where nothing lags, so that none is waited for
DRAWS = (0, RANDOM, RANDOM | FILTER)  # sampler features that a graph can hold: their inputs have fixed addresses
SLOW_TOKENS = 448  # tokens of a step that is slower than one of 512: 15.9 ms and 13.4 for the 8B on an H200 (cuBLAS)
LARGEST_WITH_DRAWS = 8  # rows: above, launching the draw hides behind the step, and a fourth of the graphs is enough
FIRST_SIZES = (1, 8, 16, 32, 64, 128, 256)  # rows of the decode steps captured first, beside the largest


# -- uploads -----------------------------------------------------------------------------------------------------------


class PinnedRing:
    """Pinned int32 buffers, used in turn to copy a step's columns to the device.

    A buffer is not given out again before its copy is over, however far the host is ahead: a rank that waits for
    another one in a sum has launched no end of steps meanwhile."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_cuda) for _ in range(RING)]
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in range(RING)]
        self._next = 0

    def take(self) -> torch.Tensor:
        """Return the next buffer, once its latest copy is over."""
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()  # at once where it was never recorded
        return self._buffers[self._next]

    def send(self, to: torch.Tensor, part: slice) -> None:
        """Copy this part of the buffer that was taken to the same part of `to`, and go on to the next one."""
        to[part].copy_(self._buffers[self._next][part], non_blocking=True)
        event = self._copied[self._next]
        if event is not None:
            event.record()
        self._next = (self._next + 1) % RING


# -- capturing ---------------------------------------------------------------------------------------------------------


class GraphCapture:
    """Captures steps of a model on one stream, into one memory pool: they never run at the same time.

    A step first runs outside its graph, which loads kernels and allocates workspaces. One layer of each kind is enough
    for that: through all layers it would take as long as the capture itself. `torch.cuda.graph` would give all unused
    memory back before each capture, and the next step would allocate it again."""

    def __init__(self, model: DecoderModel, device: torch.device) -> None:
        self._model, self._kept = model, layers_of_each_kind(model)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return the graph of what `compute` launches, and its results, which each replay overwrites. Called twice."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            with with_layers(self._model, self._kept):
                compute()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads wait for events
            try:
                results = compute()
            finally:
                graph.capture_end()
        return graph, results


Capture = Callable[[GraphCapture], None]  # captures one graph


# -- decodes -----------------------------------------------------------------------------------------------------------


class CapturedStep(NamedTuple):
    """A graph and the tensors that hold its results. `ids` is None for a graph that ends with the logits."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, V]
    ids: torch.Tensor | None  # [size] int32


def padded_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture up to `most`: closer together where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    return [size for size in sizes if size < most and size != SLOW_TOKENS] + [most]


def captured_draws(size: int) -> tuple[int | None, ...]:
    """Return the sampler features that graphs of `size` rows are captured with; None: up to the logits."""
    return (*DRAWS, None) if size <= LARGEST_WITH_DRAWS else (None,)


def graphs_to_capture(max_rows: int, slow_rows: Collection[int] = ()) -> list[tuple[int, int | None]]:
    """Return the batch size and sampler features of each graph, largest first: the pool then has its full size from the
    start. Sizes of `slow_rows` are left out: a larger step takes less time."""
    sizes = [size for size in padded_sizes(max_rows) if size == max_rows or size not in slow_rows]
    return [(size, needs) for size in reversed(sizes) for needs in captured_draws(size)]


def shared_sizes(max_rows: int, slow_rows: Collection[int] = ()) -> list[int]:
    """Return the batch sizes to capture for steps whose rows share prefixes: some of those that are captured anyway."""
    sizes = {size for size, _ in graphs_to_capture(max_rows, slow_rows)}
    return sorted(sizes.intersection((*SHARED_SIZES, max_rows)) - {1})


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
        prefix_groups: PrefixGroups | None = None,
    ) -> None:
        """`prefix_groups` finds which rows share prefixes; None: every row is attended by itself."""
        self.model, self.ops, self.slots, self.group_caches = model, ops, slots, group_caches
        self._graphs = graphs_to_capture(max_rows, slow_rows)
        self.sizes = sorted({size for size, _ in self._graphs})
        self.prefix_groups = prefix_groups
        self.shared_sizes = [] if prefix_groups is None else shared_sizes(max_rows, slow_rows)
        device = slots.device
        columns, width = COLUMNS + SHARED_COLUMNS, max(max_rows, MOST_GROUPS)
        self._columns = torch.zeros(columns, width, dtype=torch.int32, device=device)
        self._clear()
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._pinned = PinnedRing((columns, width), device)
        self._captured: dict[tuple[int, int | None], CapturedStep] = {}
        self._captured_shared: dict[int, CapturedStep] = {}
        # Whose captures were left for later and have not run.
        self._waiting: set[tuple[int, int | None]] = set()
        self._waiting_shared: set[int] = set()

    def first(self) -> list[Capture]:
        """Return the captures that a start waits for: a few sizes, and a single row with its draws."""
        return [partial(self._capture, graph) for graph in self._graphs if self._is_first(*graph)]

    def later(self) -> list[Capture]:
        """Return the other captures: the sizes between, further draws, and steps whose rows share prefixes."""
        graphs = [graph for graph in self._graphs if not self._is_first(*graph)]
        self._waiting, self._waiting_shared = set(graphs), set(self.shared_sizes)
        graphs.sort(key=lambda graph: graph[1] is not None)  # a size gains more than a draw: sizes come first
        shared = [partial(self._capture_shared, size) for size in reversed(self.shared_sizes)]
        return [*(partial(self._capture, graph) for graph in graphs), *shared]

    def _is_first(self, size: int, needs: int | None) -> bool:
        return size == 1 or (needs is None and size in (*FIRST_SIZES, self.sizes[-1]))

    def _capture(self, key: tuple[int, int | None], capture: GraphCapture) -> None:
        self._clear()
        graph, (logits, ids) = capture.capture(partial(self.compute, *key))
        self._captured[key] = CapturedStep(graph, logits, ids)
        self._waiting.discard(key)

    def _capture_shared(self, size: int, capture: GraphCapture) -> None:
        self._clear()
        graph, (logits, ids) = capture.capture(partial(self.compute, size, None, has_shared=True))
        self._captured_shared[size] = CapturedStep(graph, logits, ids)
        self._waiting_shared.discard(size)

    def _clear(self) -> None:
        """Make every row the scratch slot's, in no group: what runs outside a graph must not write into the blocks of
        the latest step's rows."""
        scratch = self.slots.num_slots
        self._columns.zero_()
        self._columns[0].fill_(scratch)
        self._columns[2].fill_(1)
        self._columns[3].fill_(scratch * self.slots.tokens.shape[1])

    def run_all_eagerly(self) -> None:
        """Run every step to capture once without a graph, to compile its kernels. The draw's kernels are the same for
        any number of rows."""
        for size in self.sizes:
            self.compute(size, None)
        for size in self.shared_sizes:
            self.compute(size, None, has_shared=True)
        for needs in DRAWS:
            self.compute(self.sizes[0], needs)

    def draws_for(self, num_rows: int, needs: int) -> int | None:
        """Return the `needs` of the graph for a step of `num_rows` rows whose draws need these features."""
        size = self._padded(num_rows)
        return needs if needs in captured_draws(size) and (size, needs) not in self._waiting else None

    def _padded(self, num_rows: int) -> int:
        """Return the smallest captured size with room for so many rows."""
        return next(size for size in self.sizes if size >= num_rows and (size, None) not in self._waiting)

    def begin(self, plan: StepPlan) -> None:
        """Take in the changes of block tables of a step that is about to run, whatever launches it."""
        if self.prefix_groups is not None:
            self.prefix_groups.begin(plan)

    def shared_prefixes(self, columns: StepColumns) -> RowGroups | None:
        """Return which rows of a step of decodes share prefixes; None where nothing is, it does not pay, or no graph
        for such a step is captured yet."""
        if self.prefix_groups is None or self._padded_shared(len(columns.row_slot)) is None:
            return None
        return self.prefix_groups.find(columns)

    def _padded_shared(self, num_rows: int) -> int | None:
        sizes = (size for size in self.shared_sizes if size not in self._waiting_shared)
        return next((size for size in sizes if size >= num_rows), None)

    def run(
        self, columns: StepColumns, needs: int | None, shared: RowGroups | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch the step. Returns (logits [N, V], ids [N] or None), views that the next launch overwrites. With
        `shared` prefixes it ends with the logits."""
        count = len(columns.row_slot)
        if shared is not None:
            size = self._padded_shared(count)
            assert size is not None  # `shared_prefixes` found one
            captured = self._captured_shared[size]
        else:
            size = self._padded(count)
            captured = self._captured[size, needs]
        self.upload(columns, size, shared)
        captured.graph.replay()
        return captured.logits[:count], None if captured.ids is None else captured.ids[:count]

    def batch(self, size: int) -> Batch:
        """Return the static batch of `size` rows, without its input tokens."""
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

    def shared_batch(self, size: int) -> Batch:
        """Return the static batch of `size` rows of which some share prefixes, without its input tokens."""
        batch = self.batch(size)
        columns = self._columns[COLUMNS:]
        batch.shared_prefixes = SharedPrefixColumns(columns[0, :size], columns[1, :size], columns[2:, :MOST_GROUPS])
        return batch

    def input_ids(self, size: int) -> torch.Tensor:
        """Look the rows' input tokens up on the device: [size] int32."""
        return self.slots.tokens.view(-1).index_select(0, self._columns[3, :size])

    def compute(
        self, size: int, needs: int | None, *, has_shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the logits [size, V] of what was uploaded, and its draws: what a graph holds. `has_shared`: some rows
        share prefixes."""
        batch = self.shared_batch(size) if has_shared else self.batch(size)
        batch.input_ids = self.input_ids(size)
        batch.plans = [
            self.ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(self.group_caches)
        ]
        logits = self.model.logits(self.model(batch))
        if needs is None:
            return logits, None
        return logits, self.ops.sample(logits, self.slots, batch.sample_slots, batch.sample_positions, needs)

    def upload(self, columns: StepColumns, size: int, shared: RowGroups | None = None) -> None:
        """Copy the plan's columns through pinned memory; rows up to `size` that it has not become the scratch slot's,
        which are in no group."""
        count = len(columns.row_slot)
        host: np.ndarray = self._pinned.take().numpy()
        width = self.slots.tokens.shape[1]
        host[0, :count], host[1, :count], host[2, :count] = columns.row_slot, columns.row_start, columns.row_len
        host[3, :count] = columns.row_slot * width + columns.row_start
        scratch = self.slots.num_slots
        host[0, count:size], host[1, count:size], host[2, count:size] = scratch, 0, 1
        host[3, count:size] = scratch * width
        num_columns = COLUMNS
        if shared is not None:
            num_columns += SHARED_COLUMNS
            further = host[COLUMNS:]
            further[0, :count], further[0, count:size] = shared.lengths, 0
            further[1, : len(shared.members)] = shared.members
            further[2:, :MOST_GROUPS] = shared.groups
        self._pinned.send(self._columns, slice(num_columns))


PROMPT_ROWS = 16  # prompts in one captured step; a step with more runs without a graph
DECODES = (0, 16, 64, 256)
PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
FIRST_TOKENS = (64, 256, 1024)  # of the steps captured first: prompts without decodes, and beside any number of them
FINE_TOKENS = (*range(32, 513, 32), *range(576, PROMPT_TOKENS[-1] + 1, 64))  # sizes of a step with prompts alone
PADDING_S = 0.2e-3  # what padding may cost: where the first of them takes longer, a first token waits for less of it
STEP_TOKENS = 64  # by which a step of a slow number of tokens grows
# About what launching a step kernel by kernel costs the host, for a plan on another machine: a start measures it.
LAUNCHES_S = 6e-3  # of a few layers
LAYER_LAUNCHES_S = 190e-6  # of a layer of a deep model
EXPERTS_LAUNCHES_S = 400e-6  # of one with experts: routing, and their products in more steps
EXCHANGES_LAUNCHES_S = 80e-6  # more, of a layer that is divided among ranks: two sums
ALIGNED = 4  # int32: columns begin at multiples of 16 bytes, as the kernels are compiled for


# -- decodes and prompts -----------------------------------------------------------------------------------------------


class MixedShape(NamedTuple):
    """The decode rows and prompt tokens that a captured step has room for."""

    decodes: int
    prompt_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows of the padded step."""
        return self.decodes + PROMPT_ROWS

    @property
    def num_tokens(self) -> int:
        """Tokens of the padded step."""
        return self.decodes + self.prompt_tokens

    @property
    def sections(self) -> list[int]:
        """Lengths of the columns in the buffer: row_slot, row_start, row_len, query_start, token_slot, positions, input
        place, sample_tokens, sample_slots, sample_positions."""
        rows, tokens = self.num_rows, self.num_tokens
        return [rows, rows, rows, rows + 1, tokens, tokens, tokens, rows, rows, rows]


def launches_s(config: DecoderConfig, ranks: int = 1) -> float:
    """Estimate the host's seconds to launch a step of this model kernel by kernel, on each of `ranks` devices."""
    experts = sum(config.moe_of(layer) is not None for layer in range(config.num_layers))
    seconds = (config.num_layers - experts) * LAYER_LAUNCHES_S + experts * EXPERTS_LAUNCHES_S
    exchanges = config.num_layers * EXCHANGES_LAUNCHES_S if ranks > 1 else 0.0
    return max(LAUNCHES_S, seconds + exchanges)


def shapes_to_capture(
    max_rows: int, max_tokens: int, token_s: float, launches_s: float = LAUNCHES_S
) -> list[MixedShape]:
    """Return the shapes worth a graph, in order. `token_s`: device seconds per token of a step; shapes that take longer
    than the host needs to launch them kernel by kernel, `launches_s`, are left out. Prompts without decodes, which are
    all that a quiet engine computes, have more sizes where the tokens of a large model take their time."""
    decodes = sorted({min(count, max_rows) for count in DECODES})
    pairs = {(d, p) for d in decodes for p in PROMPT_TOKENS}
    if FINE_TOKENS[0] * token_s > PADDING_S:
        pairs |= {(0, p) for p in FINE_TOKENS}
    shapes = {
        MixedShape(d, p if d + p != SLOW_TOKENS else p + STEP_TOKENS) for d, p in pairs if p * token_s <= launches_s
    }
    return sorted(shape for shape in shapes if shape.num_tokens <= max_tokens)


def without_slow(shapes: Iterable[MixedShape], slow_rows: Collection[int]) -> list[MixedShape]:
    """Return the shapes, those of a number of tokens in `slow_rows` with more prompt tokens: a larger step takes less
    time."""
    found = set()
    for shape in shapes:
        tokens = shape.prompt_tokens
        while shape.decodes + tokens in slow_rows:
            tokens += STEP_TOKENS
        found.add(MixedShape(shape.decodes, tokens))
    return sorted(found)


class MixedGraphs:
    """All captured steps with prompt chunks of a model."""

    def __init__(
        self,
        model: DecoderModel,
        ops: Ops,
        slots: Slots,
        group_caches: list[GroupCache],
        shapes: list[MixedShape],
    ) -> None:
        self.model, self.ops, self.slots, self.group_caches = model, ops, slots, group_caches
        self.shapes = sorted(shapes, key=lambda shape: shape.num_tokens)
        size = max((_begins(shape)[-1] for shape in shapes), default=0)
        device = slots.device
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = PinnedRing((size,), device)
        self._logits: torch.Tensor | None = None  # of every captured step, [most rows of a shape, V]
        self._captured: dict[MixedShape, torch.cuda.CUDAGraph] = {}
        self._waiting: set[MixedShape] = set()  # whose captures were left for later and have not run

    def shape(self, plan: StepPlan, num_draws: int) -> MixedShape | None:
        """Return the smallest captured shape with room for this step; None: there is none."""
        decodes, prompts = plan.num_decodes, len(plan.slots) - plan.num_decodes
        tokens = plan.num_tokens - decodes
        if prompts > PROMPT_ROWS:
            return None
        return next(
            (
                shape
                for shape in self.shapes
                if shape.decodes >= decodes and shape.prompt_tokens >= tokens and shape.num_rows >= num_draws
                if shape not in self._waiting
            ),
            None,
        )

    def first(self) -> list[Capture]:
        """Return the captures that a start waits for, largest first: the pool then has its full size from the start."""
        return [partial(self._capture, shape) for shape in reversed(self.shapes) if self._is_first(shape)]

    def later(self) -> list[Capture]:
        """Return the other captures, those of prompts without decodes last: they are the most."""
        self._waiting = {shape for shape in self.shapes if not self._is_first(shape)}
        ordered = sorted(self._waiting, key=lambda shape: (shape.decodes == 0, -shape.num_tokens))
        return [partial(self._capture, shape) for shape in ordered]

    def _is_first(self, shape: MixedShape) -> bool:
        largest = max(each.decodes for each in self.shapes)
        return shape == self.shapes[-1] or (shape.decodes in (0, largest) and shape.prompt_tokens in FIRST_TOKENS)

    def _capture(self, shape: MixedShape, capture: GraphCapture) -> None:
        self.upload(shape, None, 0)
        self._captured[shape], _ = capture.capture(partial(self._compute, shape))
        self._waiting.discard(shape)

    def run_all_eagerly(self) -> None:
        """Run every step to capture once without a graph, to compile its kernels."""
        for shape in self.shapes:
            self.upload(shape, None, 0)
            self.compute(self.batch(shape))

    def run(self, shape: MixedShape, plan: StepPlan, columns: StepColumns) -> tuple[Batch, torch.Tensor]:
        """Launch the step. Returns its batch, cut to the real draws, and logits [N, V], which the next launch
        overwrites."""
        batch = self.place(shape, plan, columns)
        self._captured[shape].replay()
        assert self._logits is not None  # a shape was captured
        return batch, self._logits[: batch.num_samples]

    def place(self, shape: MixedShape, plan: StepPlan, columns: StepColumns) -> Batch:
        """Upload the step's columns. Returns the batch that draws read."""
        self.upload(shape, columns, plan.num_decodes)
        batch = self.batch(shape)
        count = len(columns.sample_rows)
        batch.columns, batch.num_samples = columns, count
        batch.sample_slots, batch.sample_positions = batch.sample_slots[:count], batch.sample_positions[:count]
        return batch

    def batch(self, shape: MixedShape) -> Batch:
        """Return the static batch of a shape, without its input tokens."""
        slots = self.slots
        begins = _begins(shape)
        parts = [self._buffer[at : at + size] for at, size in zip(begins, shape.sections, strict=False)]
        batch = Batch()
        batch.columns = None
        batch.num_tokens, batch.num_rows, batch.num_decodes = shape.num_tokens, shape.num_rows, shape.decodes
        batch.num_samples = shape.num_rows
        batch.block_size, batch.block_tables = slots.block_size, slots.block_tables
        batch.row_slot, batch.row_start, batch.row_len, batch.query_start = parts[:4]
        batch.token_slot, batch.positions = parts[4], parts[5]
        batch.sample_tokens, batch.sample_slots, batch.sample_positions = parts[7:10]
        batch.slot_mapping = SlotMapping(slots.block_tables, batch.token_slot, batch.positions, slots.block_size)
        batch.plans = []
        return batch

    def compute(self, batch: Batch) -> torch.Tensor:
        """Compute the logits [rows of the shape, V] of a static batch: what a graph holds."""
        begin = _begins(MixedShape(batch.num_decodes, batch.num_tokens - batch.num_decodes))[6]
        batch.input_ids = self.slots.tokens.view(-1).index_select(0, self._buffer[begin : begin + batch.num_tokens])
        batch.plans = [
            self.ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(self.group_caches)
        ]
        hidden = self.model(batch)
        return self.model.logits(hidden.index_select(0, batch.sample_tokens))

    def upload(self, shape: MixedShape, columns: StepColumns | None, num_decodes: int) -> None:
        """Copy a step's columns, padded to the shape, through pinned memory. None: padding alone."""
        host = self._pinned.take().numpy()
        begins = _begins(shape)
        parts = [host[at : at + size] for at, size in zip(begins, shape.sections, strict=False)]
        row_slot, row_start, row_len, query_start, token_slot, positions, places, tokens, slots, drawn = parts
        row_slot.fill(self.slots.num_slots)
        token_slot.fill(self.slots.num_slots)
        slots.fill(self.slots.num_slots)
        row_start.fill(0)
        row_len.fill(1)
        positions.fill(0)
        tokens.fill(0)
        drawn.fill(1)
        query_start[: shape.decodes] = np.arange(shape.decodes, dtype=np.int32)
        query_start[shape.decodes :] = shape.decodes
        if columns is not None:
            d, shift = num_decodes, shape.decodes - num_decodes
            rows, count = len(columns.row_slot), len(columns.token_row)
            for column, values in (
                (row_slot, columns.row_slot),
                (row_start, columns.row_start),
                (row_len, columns.row_len),
            ):
                column[:d], column[d + shift : rows + shift] = values[:d], values[d:]
            query_start[d + shift : rows + shift] = columns.query_start[d:-1] + shift
            query_start[rows + shift :] = count + shift
            of_token = columns.row_slot[columns.token_row]
            for column, values in ((token_slot, of_token), (positions, columns.positions)):
                column[:d], column[d + shift : count + shift] = values[:d], values[d:]
            n = len(columns.sample_rows)
            tokens[:n] = np.where(columns.sample_tokens < d, columns.sample_tokens, columns.sample_tokens + shift)
            slots[:n], drawn[:n] = columns.row_slot[columns.sample_rows], columns.sample_positions
        np.multiply(token_slot, self.slots.tokens.shape[1], out=places)
        places += positions
        self._pinned.send(self._buffer, slice(begins[-1]))

    def _compute(self, shape: MixedShape) -> None:
        """Compute a shape's logits into the place that all graphs share."""
        logits = self.compute(self.batch(shape))
        if self._logits is None:  # the first time is not captured
            most_rows, vocab_size = max(each.num_rows for each in self.shapes), logits.shape[1]
            # Rows as far apart as the head leaves them: draws were compiled for that, and aligned rows are read faster.
            self._logits = logits.new_empty(most_rows, logits.stride(0))[:, :vocab_size]
        self._logits[: shape.num_rows].copy_(logits)


def _begins(shape: MixedShape) -> list[int]:
    """Return where each column begins in the buffer, and where the last one ends."""
    begins = [0]
    for size in shape.sections:
        begins.append(begins[-1] + -(-size // ALIGNED) * ALIGNED)
    return begins
