"""OnnxModel: a model that ONNX Runtime computes, used by TorchExecutor in place of a model of torch modules.

Slots, batches, sampling, log-probabilities, draft models and the KV cache's memory are those of TorchExecutor. Tensors
are passed by address (I/O binding): nothing is copied between torch and ONNX Runtime, and the graph writes keys and
values into the executor's own cache (export.py).

A step is divided into runs of the graph. The queries of a run are padded to its longest row, so a run takes adjacent
rows of similar length: all decodes, with short drafts, are one run, and a prompt is mostly a run of its own. In each
layer the graph writes out the scores of all queries and keys, and the keys and values that it gathers. So many rows, or
a long prompt, behind long contexts take several runs, which bounds this memory: the measured step that sizes the KV
cache on a card has no context.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import nn

from inferengine.config import Config
from inferengine.core.executor import Progress
from inferengine.errors import ConfigError
from inferengine.executor.load import LoadedModel
from inferengine.executor.onnx.export import GRAPHS, Export, open_export, rotations
from inferengine.executor.settings import ExecutorSettings, choose_device
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import Attention
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.parallel import KEY, Communicator
from inferengine.models.decoder import DecoderModel
from inferengine.models.hf_config import read_json
from inferengine.quantization.checkpoints import layout_of

logger = logging.getLogger(__name__)

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}  # by engine.device
INT8 = "int8_w8a8"  # the value of model.quantization that means ONNX Runtime's dynamic quantization
NUMBERS = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}
PADDING = 1.5  # a run has at most PADDING * tokens + SPARE queries, padding included
SPARE = 16
RUN_BYTES = 1 << 30  # most that a run's scores, keys and values take in a layer; a single query may take more
GROW = "kSameAsRequested"  # allocate CUDA memory only as needed, since the KV cache takes most of it


def resolve(config: Config) -> Config:
    """Return the configuration with the device and number formats that this executor uses.

    Raises ConfigError naming a key that this executor does not support.
    """
    available = onnxruntime.get_available_providers()
    device = choose_device(config.engine.device).type
    if PROVIDERS[device] not in available:
        if config.engine.device == "cuda":
            raise ConfigError(
                "engine.device", "this onnxruntime has no CUDA provider: pip install onnxruntime-gpu, or set it to cpu"
            )
        device = "cpu"
    model, cache, engine = config.model, config.cache, config.engine
    refused = {
        "model.dtype": ("float32 alone: leave it at auto", model.dtype not in ("auto", "float32")),
        "model.quantization": (f"none or {INT8} alone", model.quantization not in ("none", INT8)),
        "model.adapters": ("no LoRA adapters: leave it empty, or set engine.executor to torch", bool(model.adapters)),
        "cache.dtype": ("no FP8 cache: set it to auto", cache.dtype != "auto"),
        "engine.deterministic": ("no fixed order of sums: set it to false", engine.deterministic),
        KEY: ("one device: set it to 1", engine.tensor_parallel > 1),
    }
    for key, (what, found) in refused.items():
        if found:
            raise ConfigError(key, f"engine.executor = onnx computes with {what}")
    return config.with_values(
        model={"dtype": "float32"}, engine={"device": device, "tune": "off", "cuda_graphs": False}
    )


def load_onnx_model(
    settings: ExecutorSettings, ops: Ops, progress: Progress, communicator: Communicator | None = None
) -> LoadedModel:
    """Open the graphs of a checkpoint, exporting it first if necessary. The counterpart of load_model.

    `settings` come from a configuration that `resolve` returned. Raises ConfigError.
    """
    if layout_of(read_json(settings.folder / "config.json")) is not None:
        raise ConfigError(
            "model.path", "engine.executor = onnx reads weights in 16 or 32 bits: name a checkpoint that has them"
        )
    export = open_export(settings, progress)
    try:
        model = OnnxModel(export, settings)
    except Exception as error:  # ONNX Runtime's exceptions have no common class
        logger.warning("ONNX Runtime cannot read the export %s: %s", export.folder, error)
        export = open_export(settings, progress, anew=True)
        model = OnnxModel(export, settings)
    progress("loading graphs", 1.0)
    return LoadedModel(export.config, export.config, model, torch.float32, settings.quantization, None)


class TokenRange(NamedTuple):
    """Tokens [first, last) of a step that are computed together. `columns` holds their rows only, without draws."""

    first: int
    last: int
    columns: StepColumns


class RunLimit(NamedTuple):
    """How large a run may be: bytes in all, for a query's score of one key, and for one key and its value."""

    most: int
    score: int
    key: int

    def has_room(self, queries: int, rows: int, context: int) -> bool:
        """Return whether a run of this shape, padded, is within the limit."""
        return context * (queries * self.score + rows * self.key) <= self.most

    def most_queries(self, context: np.ndarray) -> np.ndarray:
        """Return the most queries of one row, by its context; at least 1."""
        found: np.ndarray = np.maximum(1, (self.most // context - self.key) // self.score)
        return found


def limit_of(config: DecoderConfig) -> RunLimit:
    """Return the limit for a model's numbers, which are fp32."""
    size = torch.float32.itemsize
    return RunLimit(RUN_BYTES, size * config.num_heads, 2 * size * config.num_kv_heads * config.head_dim)


def runs_of(columns: StepColumns, limit: RunLimit, *, alone: bool = False) -> Iterator[TokenRange]:
    """Divide a step's rows into runs of similar length, each within the limit unless it is one row. `alone`: one run
    for each row."""
    bounds, num_rows, begin = columns.query_start, len(columns.row_slot), 0
    while begin < num_rows:
        end, longest, context = begin, 0, 0
        while end < num_rows:
            longest = max(longest, int(bounds[end + 1] - bounds[end]))
            context = max(context, int(columns.row_len[end]))
            tokens, rows = int(bounds[end + 1] - bounds[begin]), end + 1 - begin
            is_padded = longest * rows > PADDING * tokens + SPARE
            if rows > 1 and (alone or is_padded or not limit.has_room(longest * rows, rows, context)):
                break
            end += 1
        first, last = int(bounds[begin]), int(bounds[end])
        part = StepColumns(
            columns.row_slot[begin:end],
            columns.row_start[begin:end],
            columns.row_len[begin:end],
            bounds[begin : end + 1] - first,
            columns.token_row[first:last] - begin,
            columns.positions[first:last],
            *(bounds[:0],) * 3,
        )
        yield TokenRange(first, last, part)
        begin = end


def without_drafts(columns: StepColumns) -> StepColumns:
    """Return the step with the rows that verify draft tokens split into one row for each token."""
    verifies = np.bincount(columns.sample_rows, minlength=len(columns.row_slot)) > 1
    return _split(columns, verifies[columns.token_row])


def in_pieces(columns: StepColumns, limit: RunLimit) -> StepColumns:
    """Return the step with the rows beyond the limit split into shorter ones. A later one finds the keys of those
    before it in the cache."""
    most_queries = limit.most_queries(columns.row_len.astype(np.int64))
    if (np.diff(columns.query_start) <= most_queries).all():
        return columns
    within = _arange(len(columns.positions)) - columns.query_start[:-1][columns.token_row]
    return _split(columns, within % most_queries[columns.token_row] == 0)


def _split(columns: StepColumns, begins: np.ndarray) -> StepColumns:
    """Return the step with a row that begins at each of these tokens, beside those where its own rows begin. It draws
    nothing."""
    begins[columns.query_start[:-1]] = True
    first = np.flatnonzero(begins).astype(np.int32)
    bounds = np.append(first, np.int32(len(begins)))
    return StepColumns(
        columns.row_slot[columns.token_row[first]],
        columns.positions[first],
        columns.positions[bounds[1:] - 1] + 1,
        bounds,
        (np.cumsum(begins) - 1).astype(np.int32),
        columns.positions,
        *(bounds[:0],) * 3,
    )


class Binding:
    """A session of one graph, with the addresses of its inputs and outputs."""

    def __init__(self, session: onnxruntime.InferenceSession, device: torch.device) -> None:
        self._session, self._io, self._device = session, session.io_binding(), device

    def input(self, name: str, tensor: torch.Tensor) -> None:
        """Bind an input to a tensor's memory, which must stay allocated until the next `run` has ended."""
        self._io.bind_input(name, *_address(tensor))

    def output(self, name: str, tensor: torch.Tensor) -> None:
        """Bind an output to a tensor's memory."""
        self._io.bind_output(name, *_address(tensor))

    def run(self) -> None:
        """Run the graph once torch has made its inputs, and return when it has ended.

        ONNX Runtime has a stream of its own on a card, which does not wait for torch's. It would read inputs that torch
        is still writing, and write to memory that torch has given away and is still copying from. (It takes another
        stream by its address, and that of torch's default stream is 0: none.)
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(self._io)


def _address(tensor: torch.Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors have one address")
    device = tensor.device
    return device.type, device.index or 0, NUMBERS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()


class OnnxNorm(nn.Module):
    """The final norm, computed by the graph `norm`."""

    def __init__(self, binding: Binding) -> None:
        super().__init__()
        self._binding = binding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x [N, E], in the same shape."""
        out = torch.empty_like(x)
        self._binding.input("hidden", x)
        self._binding.output("normed", out)
        self._binding.run()
        return out


class OnnxModel(DecoderModel):
    """A decoder computed by ONNX Runtime.

    Its layers are the family's torch modules without weights. They give the sizes, and the KV cache is bound to their
    attention.
    """

    can_be_captured = False
    plans_attention = True

    def __init__(self, export: Export, settings: ExecutorSettings) -> None:
        """Open the graphs. Raises ONNX Runtime's exceptions for files that it cannot read."""
        super().__init__()
        self.config, self._device = export.config, settings.device
        sessions = {name: _session(export, name, settings) for name in GRAPHS}
        bindings = {name: Binding(session, self._device) for name, session in sessions.items()}
        self._body, self._head = bindings["body"], bindings["head"]
        self.embed, self.layers, self.head = export.model.embed, export.model.layers, export.model.head
        self.norm = OnnxNorm(bindings["norm"])
        self._limit = limit_of(self.config)
        self._attentions = [module for module in self.modules() if isinstance(module, Attention)]
        self._bound: list[torch.Tensor | None] = []  # the cache that the body reads and writes
        self._angles: list[torch.Tensor] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, E] of ids [T]."""
        if batch.columns is None:
            raise RuntimeError("the columns of a step are needed on the host")
        self._bind_cache()
        columns = batch.columns
        if batch.isolated:
            self._clear(batch, columns)
            columns = without_drafts(columns)
        columns = in_pieces(columns, self._limit)
        hidden = torch.empty(batch.num_tokens, self.config.hidden_size, dtype=torch.float32, device=self._device)
        for run in runs_of(columns, self._limit, alone=batch.isolated):
            self._run(batch, run, hidden)
        return hidden

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of rows [N, E] of the residual stream."""
        x = x.contiguous()  # kept until the run has ended
        out = torch.empty(len(x), self.config.vocab_size, dtype=torch.float32, device=x.device)
        self._head.input("hidden", x)
        self._head.output("logits", out)
        self._head.run()
        return out

    def _bind_cache(self) -> None:
        """Bind the cache and the rotations. Their addresses change only when another cache is allocated."""
        caches = [attention.kv for attention in self._attentions]
        if len(caches) == len(self._bound) and all(map(operator.is_, caches, self._bound)):
            return
        for index, kv in enumerate(caches):
            assert kv is not None  # KVCache.bind came before
            rows = kv.view(-1, *kv.shape[-2:])  # [blocks * 2 * K, block_size, D]
            self._body.input(f"kv.{index}", rows)
            self._body.output(f"kv_out.{index}", rows)
        tables = {attention.rope: attention.cos_sin for attention in self._attentions}
        self._angles = []
        for index, rope in enumerate(rotations(self.config)):
            table = tables[rope]
            assert table is not None  # KVCache.bind came before
            for name, half in zip(("cos", "sin"), table.chunk(2, dim=1), strict=True):
                self._angles.append(half.contiguous())
                self._body.input(f"{name}.{index}", self._angles[-1])
        self._bound = caches

    def _run(self, batch: Batch, run: TokenRange, hidden: torch.Tensor) -> None:
        first, last, columns = run
        counts = np.diff(columns.query_start)
        starts, width = columns.query_start[:-1], int(counts.max())
        queries = starts[:, None] + np.minimum(_arange(width), counts[:, None] - 1)
        places = columns.token_row * width + _arange(last - first) - starts[columns.token_row]
        inputs = {
            "positions": columns.positions.astype(np.int64),
            "query_tokens": queries.astype(np.int32),
            "token_places": places.astype(np.int32),
        }
        for group, window in enumerate(self.config.group_windows):
            table = batch.block_tables[group].cpu().numpy()
            inputs |= _keys(columns, table, batch.block_size, group, window)
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
        tensors["input_ids"] = batch.input_ids[first:last]
        for name, tensor in tensors.items():
            self._body.input(name, tensor)
        self._body.output("hidden", hidden[first:last])
        self._body.run()

    def _clear(self, batch: Batch, columns: StepColumns) -> None:
        """Zero the cache from the step's first token of each row to the end of its blocks.

        A masked key has weight 0, but 0 times a NaN that an earlier request left there is NaN.
        """
        for attention in self._attentions:
            assert attention.kv is not None  # KVCache.bind came before
            table = batch.block_tables[attention.group].tolist()
            for slot, start, end in zip(columns.row_slot, columns.row_start, columns.row_len, strict=True):
                for index in range(start // batch.block_size, (end - 1) // batch.block_size + 1):
                    offset = max(0, start - index * batch.block_size)
                    attention.kv[table[slot][index], :, :, offset:] = 0.0


def _keys(columns: StepColumns, table: np.ndarray, size: int, group: int, window: int | None) -> dict[str, np.ndarray]:
    """Return the inputs of the graph that say where a KV group's keys are written and read.

    The table of a row with fewer blocks than the others is filled up with its first block. The keys read there have
    positions after the row's last token, so the mask hides them.
    """
    written = table[columns.row_slot[columns.token_row], columns.positions // size]
    first_key = np.zeros(len(columns.row_slot), dtype=np.int64)
    if window is not None:
        first_key = np.maximum(columns.row_start.astype(np.int64) + 1 - window, 0)
    first_block = first_key // size
    num_blocks = -(-columns.row_len // size) - first_block
    column = _arange(int(num_blocks.max()))
    index = first_block[:, None] + np.where(column < num_blocks[:, None], column, 0)
    return {
        f"slots.{group}": np.stack((written, columns.positions % size), axis=1).astype(np.int64),
        f"block_tables.{group}": table[columns.row_slot[:, None], index].astype(np.int64),
        f"key_starts.{group}": first_block * size,
    }


def _arange(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def _session(export: Export, name: str, settings: ExecutorSettings) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads or torch.get_num_threads()
    options.log_severity_level = 3  # errors only; the warnings are about optimizations that were not applied
    # With few cores, threads that spin between products would take processor time from the front ends.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[tuple[str, dict[str, str]]] = [(PROVIDERS["cpu"], {})]
    if settings.device.type == "cuda":
        on_card = {
            "device_id": str(settings.device.index or 0),
            "arena_extend_strategy": GROW,
            "use_tf32": "0",  # the default is 1, which keeps 10 bits of each factor's mantissa
        }
        providers.insert(0, (PROVIDERS["cuda"], on_card))
    return onnxruntime.InferenceSession(str(export.graph(name)), options, providers=providers)
