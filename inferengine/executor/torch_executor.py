"""TorchExecutor: implements core.executor.Executor with torch, on the CPU and on CUDA.

A step is: block copies, slot and block-table writes, one flattened batch through the model, one draw per sampling row.
What a step needs from the one before is on the device already (docs/executor.md), so steps may be launched back to
back. On a CPU the work is done when `execute` returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from inferengine.config import Config
from inferengine.core.executor import Capacity, KVGroup, Progress, StepPlan, is_fatal
from inferengine.core.step_time import Roofline
from inferengine.errors import ConfigError
from inferengine.executor.cpu_step import Threads, forward_on_cpu
from inferengine.executor.cuda_graphs import DecodeGraphs, MixedGraphs, MixedShape
from inferengine.executor.draft_model import DraftModel
from inferengine.executor.load import LoadedModel, load_dense, load_draft_model, load_model, score_layers
from inferengine.executor.memory.kv_cache import KVCache, zeros
from inferengine.executor.memory.measure import size_cache, swap_times
from inferengine.executor.memory.plan import context_length, device_memory, with_states, with_whole_prompts
from inferengine.executor.sampler import Pooling, StepDraws, StepPromptLogprobs
from inferengine.executor.settings import ExecutorSettings, executor_settings
from inferengine.executor.slots import Slots, columns_of, make_batch
from inferengine.executor.tools.roofline import roofline_of
from inferengine.executor.tools.trace import StepRecorder
from inferengine.executor.tune import TuneReport, tune
from inferengine.executor.warm_up import capture_graphs, run_warm_up_steps
from inferengine.kernels import ops as ops_table
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu import DecodeKvCache
from inferengine.kernels.cuda.compilation import Compilations, compile_workers, stop_workers
from inferengine.layers.parallel import KEY, Communicator
from inferengine.lora.bank import AdapterFolder
from inferengine.models.cpu_decode import decode_runner
from inferengine.models.hf_config import read_json

logger = logging.getLogger(__name__)

FORCED_ROWS_ON_CPU = 4  # measured: with eight rows running ahead cost a schema 4 % of its tokens, with one it gave 14 %


class TorchExecutor:
    """Holds the model, the KV cache and the slots. One thread calls it."""

    def __init__(
        self,
        settings: ExecutorSettings,
        communicator: Communicator | None = None,
        *,
        load: Callable[..., LoadedModel] = load_model,
    ) -> None:
        """`communicator`: to the other ranks that share the model; None: there are none. `load`: what loads the model,
        called as `load_model` is; it may be one that torch does not compute (executor/onnx)."""
        if settings.tensor_parallel > 1 and communicator is None:
            raise ConfigError(KEY, "only the engine and the class LLM run several ranks: set it to 1 here")
        self.settings, self.communicator, self._load = settings, communicator, load
        self.max_in_flight = 2 if settings.overlap else 1
        self.device = settings.device
        self.ops = ops_table.resolve(settings.device, deterministic=settings.deterministic)
        self.launched = ""  # how the latest step was launched, for the log of a step that hangs
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._prompt_shapes: list[MixedShape] = []  # of the steps with prompts to capture
        self._captures: list[Callable[[], None]] = []  # of graphs, left to `prepare`; the next one comes last
        self.draft: DraftModel | None = None
        self.adapters: AdapterFolder | None = None
        self.tuned: TuneReport | None = None  # which kernels were measured
        self.slow_rows: frozenset[int] = frozenset()  # better padded to a larger number: as measured
        self._helpers = ExitStack()
        self.compilations: Compilations | None = None  # counts since the end of warm-up
        self.implementation = ""  # whose layers compute the model, where they are not this engine's

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Capacity:
        """Read the checkpoint, measure what memory is left, allocate the cache. Returns what the device can hold."""
        settings = self.settings
        self._start_compiling()
        loaded = self._load(settings, self.ops, progress, self.communicator)
        self.config, self.whole = loaded.config, loaded.whole
        self.model, self.dtype = loaded.model, loaded.dtype
        self.quantization, self.adapters = loaded.quantization, loaded.adapters
        self.implementation = "" if self.config.implementation == "native" else self.config.implementation
        if self.model.is_slow_after_states and not settings.snapshot_bytes:  # what follows a prefix would be as slow
            settings = replace(settings, prefix_caching=False)
        if self.config.scores:
            self.dense = score_layers(self.model)
        else:
            self.dense = load_dense(settings, self.config.hidden_size, self.device)
        settings = with_states(settings, self.config, device_memory(self.device))
        settings = self.settings = with_whole_prompts(settings, self.config)
        self.threads = Threads(self.config, settings.threads) if self.device.type == "cpu" else None
        max_model_len = context_length(settings, self.config)
        self.tuned = tune(settings, self.model, self.dtype, max_model_len, progress)
        if self.tuned is not None:
            self.slow_rows = self.tuned.slow_rows
        groups, self._prompt_shapes = size_cache(self, max_model_len)
        self.allocate(groups, max_model_len)
        swap_block_s, prefill_token_s = swap_times(self) if settings.swap_bytes else (0.0, 0.0)
        self.capacity = Capacity(
            block_size=settings.block_size,
            groups=groups,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
            swap_block_s=swap_block_s,
            prefill_token_s=prefill_token_s,
            embedding_size=len(self.dense[-1].weight) if self.dense else self.config.hidden_size,
            max_forced_rows=FORCED_ROWS_ON_CPU if settings.device.type == "cpu" else 0,
            has_draft_model=settings.draft_folder is not None,
            has_states=bool(self.config.states),
            is_causal=self.config.is_causal,
            scores=self.config.scores,
            num_snapshots=settings.num_snapshots,
        )
        if settings.draft_folder is not None:
            self.draft = load_draft_model(
                settings, settings.draft_folder, loaded, self.ops, self.slots, self.kv, max_model_len
            )
        return self.capacity

    def _start_compiling(self) -> None:
        """Have the processes that compile kernels at hand, while the checkpoint is read; `warm_up` ends them."""
        if self.device.type == "cuda":
            self._helpers.enter_context(compile_workers())
        else:
            stop_workers()

    def allocate(self, groups: list[KVGroup], max_model_len: int, kv_dtype: torch.dtype | None = None) -> None:
        """Allocate the KV cache and the slots, and bind the cache to the model. `kv_dtype` replaces the configured
        number format of the cache."""
        settings = self.settings
        dtype = kv_dtype or settings.kv_dtype(self.config)
        self.kv = KVCache(self.config, groups, settings.block_size, dtype, self.device)
        self.kv.bind(self.model, max_model_len)
        self._group_caches = self.kv.group_caches
        self._bind_states()
        self.slots = Slots(
            num_slots=settings.max_num_seqs,
            max_model_len=max_model_len,
            block_size=settings.block_size,
            group_blocks=[group.num_blocks for group in groups],
            vocab_size=self.config.vocab_size,
            device=self.device,
        )
        self.decode_kv_cache = DecodeKvCache(len(self.kv.layers)) if self.device.type == "cpu" else None
        self.decode_runner = None
        if self.device.type == "cpu" and self.communicator is None:
            self.decode_runner = decode_runner(self.model, self.config, self.dtype, dtype)
        self.pooling = Pooling(
            self.slots.num_slots + 1,
            self.config.hidden_size,
            self.device,
            self.dense,
            is_normed=not self.config.scores,
        )

    def _bind_states(self) -> None:
        """Allocate the states of all slots and snapshots and bind them to the model. A row that begins its sequence
        reads none."""
        slots, float32 = self.settings.max_num_seqs + 1, torch.float32
        rows = slots + self.settings.num_snapshots
        kinds = [(state.shape, float32 if state.is_float32 else self.dtype) for state in self.config.states]
        self.model.bind_states([zeros((rows, *shape), dtype, self.device) for shape, dtype in kinds], slots)

    def release(self) -> None:
        """Drop the KV cache, the slots and the states."""
        del self.kv, self.slots, self._group_caches
        self.model.bind_states([])

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """Compile all kernels, capture the CUDA graphs, and run steps of every kind, so that no request waits for
        it."""
        self.begin_warm_up(progress)
        left = len(self._captures)
        while self.prepare():
            progress("capturing further graphs", 1.0 - len(self._captures) / left)

    @torch.inference_mode()
    def begin_warm_up(self, progress: Progress) -> None:
        """Warm up, but leave to `prepare` the graphs of sizes that a step can be padded beyond."""
        if self.device.type == "cuda":
            compile_draft = None if self.draft is None else self.draft.run_all_sizes
            captured = capture_graphs(self, self._prompt_shapes, compile_draft, progress)
            if captured is not None:
                self.graphs, self.mixed, later = captured
                self._captures = later[::-1]
        run_warm_up_steps(self, progress)
        self._helpers.close()
        self.compilations = Compilations(device_type=self.device.type)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one of the graphs that `begin_warm_up` left: tens of milliseconds, between two steps. Returns whether
        more are left."""
        if not self._captures:
            return False
        try:
            self._captures.pop()()
        except Exception as error:
            num_left = len(self._captures) + 1
            self._captures.clear()
            if is_fatal(error):
                raise
            logger.warning("%d graphs are not captured: steps are padded to others", num_left, exc_info=True)
        if not self._captures:
            torch.cuda.empty_cache()  # of what ran outside the graphs
        return bool(self._captures)

    def flush(self) -> None:
        """Do nothing: only the cache blocks are kept between requests, and the scheduler forgets those."""

    def roofline(self) -> Roofline | None:
        """Return the least work that the loaded model asks of this device, with the device's peaks; None: unknown."""
        settings = self.settings
        if self.threads is not None:
            torch.set_num_threads(self.threads.most)
        values = read_json(settings.folder / "config.json")
        return roofline_of(settings, self.whole, self.model, values, self.dtype, settings.kv_dtype(self.config))

    def recorder(self) -> StepRecorder:
        """Make a recorder of the steps between its `start` and its `stop`."""
        return StepRecorder(self.device)

    def close(self) -> None:
        """Free the device memory."""
        self._helpers.close()
        if self.compilations is not None:
            self.compilations.close()
        self.draft = None
        self.graphs = self.mixed = None
        self._captures.clear()
        for name in ("model", "kv", "slots", "decode_kv_cache", "decode_runner", "_group_caches"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # -- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepDraws:
        """Launch one step. On a CPU it is computed when this returns."""
        if self.threads is not None:
            self.threads.prepare(plan.num_tokens)
        # First: a remote engine may have sent the next step already, which runs although this one fails. Its rows must
        # not write into blocks of whoever had their slots before.
        self.slots.apply_blocks(plan.block_updates)
        self.kv.copy_blocks(plan)
        if self.draft is not None:
            self.draft.begin(plan)
        self.slots.admit(plan.admitted)
        restored = [item for item in plan.admitted if item.snapshot >= 0]
        if restored:
            self.model.restore_states([item.slot for item in restored], [item.snapshot for item in restored])
        if self.adapters is not None:
            for item in plan.admitted:
                self.adapters.bank.admit(item.slot, item.adapter)
        if self.graphs is not None:
            self.graphs.begin(plan)
        self.slots.write_tokens(plan.token_writes)
        if plan.device_drafts and self.draft is not None:
            self.draft.propose(plan)
            if self.communicator is not None:
                self._share_drafts(self.communicator, plan)
        begin = time.perf_counter()
        draws = self._compute(plan)
        if self.threads is not None:
            self.threads.observe(plan.num_tokens, time.perf_counter() - begin)
        return draws

    def _share_drafts(self, communicator: Communicator, plan: StepPlan) -> None:
        """Give all ranks the draft tokens of rank 0: rounding may differ from device to device."""
        counts = np.array(plan.num_drafts)
        slots = np.repeat(np.array(plan.slots), counts)
        within = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(np.array(plan.starts), counts) + 1 + within
        places = self.slots.upload(slots * self.slots.tokens.shape[1] + positions)
        tokens = self.slots.tokens.view(-1)
        tokens[places] = communicator.all_gather(tokens[places])[0]

    def _compute(self, plan: StepPlan) -> StepDraws:
        columns = columns_of(plan)
        adapted = self.adapters is not None and self.adapters.bank.begin(columns.row_slot, columns.token_row)
        if self.graphs is not None and self.mixed is not None and not adapted:
            draws = self._replay(self.graphs, self.mixed, plan, columns)
            if draws is not None:
                return draws
        self.launched = "kernel by kernel, with adapters" if adapted else "kernel by kernel"
        batch = make_batch(plan, columns, self.slots, self.device)
        if self.decode_kv_cache is not None:
            if not (adapted or plan.pooled or self.slots.wants_prompt_logprobs(columns)):
                self._keep_what_draws(batch)
            admitted = [item.slot for item in plan.admitted]
            hidden = forward_on_cpu(
                self.model, self.ops, batch, self._group_caches, self.decode_kv_cache, admitted, self.decode_runner
            )
        else:
            if not self.model.plans_attention:
                batch.plans = [
                    self.ops.prepare_attention(batch, group, kv, window)
                    for group, (kv, window) in enumerate(self._group_caches)
                ]
            hidden = self.model(batch)
        logits = None
        if batch.num_samples:
            is_whole = batch.kept_tokens is None and batch.num_samples < batch.num_tokens
            last = hidden.index_select(0, batch.sample_tokens) if is_whole else hidden
            logits = self._logits(last, columns.sample_rows)
        prompt = None
        if self.slots.wants_prompt_logprobs(columns):
            prompt = StepPromptLogprobs(self.ops, self._logits, hidden, self.slots, columns)
        embeddings = self.pooling.compute(self.model, hidden, plan.pooled, columns) if plan.pooled else None
        return StepDraws(self.ops, self.slots, plan, batch, logits, prompt=prompt, embeddings=embeddings)

    def _keep_what_draws(self, batch: Batch) -> None:
        """Have the last layer leave out the tokens of prompts that nothing is drawn after. Steps of one token a row are
        the decode runner's, which computes all."""
        has_chunks = batch.num_rows < batch.num_tokens
        if has_chunks and batch.num_samples < batch.num_tokens and self.model.can_keep and self.communicator is None:
            batch.kept_tokens = batch.sample_tokens if batch.num_samples else batch.sample_tokens.new_zeros(1)

    def _logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Return the logits [N, V] of states [N, E] of these rows of the step [N]."""
        if self.adapters is not None:
            self.adapters.bank.expect_logits(rows)
        return self.model.logits(hidden)

    def _replay(
        self, decode: DecodeGraphs, mixed: MixedGraphs, plan: StepPlan, columns: StepColumns
    ) -> StepDraws | None:
        """Launch the step as one graph, with its draws where the graph holds them. None: no graph holds such a step."""
        if plan.num_decodes == len(plan.slots):
            needs = self.slots.needs(columns.row_slot, columns.sample_positions)
            shared = decode.shared_prefixes(columns)
            held = None
            if shared is None and not plan.masked:
                held = decode.draws_for(len(columns.row_slot), needs)
            self.launched = "decode graph, without its draws" if held is None else "decode graph, with its draws"
            if shared is not None:
                self.launched = "decode graph of shared prefixes, without its draws"
            logits, ids = decode.run(columns, held, shared)
            batch = decode.batch(len(columns.row_slot))
            batch.columns = columns
            return StepDraws(self.ops, self.slots, plan, batch, logits, ids)
        shape = mixed.shape(plan, len(columns.sample_rows))
        if shape is None or plan.pooled or self.slots.wants_prompt_logprobs(columns):
            return None
        self.launched = "graph with prompts"
        batch, logits = mixed.run(shape, plan, columns)
        return StepDraws(self.ops, self.slots, plan, batch, logits if batch.num_samples else None)


def build_executor(config: Config) -> TorchExecutor:
    """Build an executor that has not loaded anything yet, of one device. Raises ConfigError naming a key that cannot be
    met."""
    return TorchExecutor(executor_settings(config))
