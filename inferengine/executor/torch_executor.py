"""TorchExecutor: implements core.executor.Executor with torch, on the CPU and on CUDA.

A step is: block copies, slot and block-table writes, one flattened batch through the model, one draw per sampling row.
What a step needs from the one before lies on the device already (docs/executor.md), so steps may be launched back to
back. On a CPU the work is done when `execute` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from inferengine.core.executor import Capacity, KVGroup, Progress
from inferengine.core.step_plan import BlockUpdates, SlotInit, StepPlan
from inferengine.core.step_roofline import Roofline
from inferengine.executor import cpu_forward
from inferengine.executor.batch import columns_of, make_batch
from inferengine.executor.cuda_graphs import warm_up as rehearsal
from inferengine.executor.cuda_graphs.decode import DecodeGraphs
from inferengine.executor.cuda_graphs.mixed import MixedGraphs, MixedShape
from inferengine.executor.memory import budget as memory
from inferengine.executor.memory import kv_cache as kv_scales
from inferengine.executor.memory import plan as memory_plan
from inferengine.executor.memory.kv_cache import KVCache
from inferengine.executor.pooling import Pooling
from inferengine.executor.sampling import logprobs as prompt_logprobs
from inferengine.executor.sampling.logprobs import PromptLogprobs
from inferengine.executor.sampling.sampler import StepDraws
from inferengine.executor.settings import ExecutorSettings
from inferengine.executor.slots import Slots
from inferengine.executor.speculation import draft_model
from inferengine.executor.speculation.draft_model import DraftModel
from inferengine.executor.threads import Threads
from inferengine.executor.tools.roofline import roofline_of
from inferengine.executor.tools.trace import StepRecorder
from inferengine.kernels import ops as ops_table
from inferengine.kernels.batch import StepColumns
from inferengine.kernels.cpu.decode_kv_cache import DecodeKvCache
from inferengine.kernels.cuda.compilation import Compilations
from inferengine.lora.bank import AdapterBank
from inferengine.lora.folder import AdapterFolder
from inferengine.models import registry, weights
from inferengine.models.hf_config import read_json
from inferengine.models.weight_map import Target
from inferengine.quantization.apply import quantize
from inferengine.sampling_params import SamplingParams

FORCED_ROWS_ON_CPU = 4  # measured: with eight rows running ahead cost a schema 4 % of its tokens, with one it gave 14 %


class TorchExecutor:
    """Holds the model, the KV cache and the slots. One thread calls it."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        self.max_in_flight = 2 if settings.overlap else 1
        self.device = settings.device
        self.ops = ops_table.resolve(settings.device, deterministic=settings.deterministic)
        self.launched = ""  # how the latest step was, for the log of one that never ends
        self.graphs: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._prompt_shapes: list[MixedShape] = []  # of steps that are captured
        self.draft: DraftModel | None = None
        self.adapters: AdapterFolder | None = None
        self.compilations: Compilations | None = None  # since it is warm

    # -- life --------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Capacity:
        """Read the checkpoint, measure what is left, allocate the cache."""
        settings = self.settings
        self.config, family = registry.read_model_config(settings.folder)
        self.dtype = settings.dtype or getattr(torch, self.config.dtype)
        max_model_len = memory_plan.context_length(self.settings, self.config)
        with torch.device("meta"):
            model = family.build(self.ops, self.config)
        self.quantization = quantize(
            model,
            self.ops,
            read_json(settings.folder / "config.json"),
            family.weight_map(self.config).targets,
            scheme=settings.quantization,
            device=self.device,
            random_weights=settings.random_weights,
            deterministic=settings.deterministic,
        )
        if settings.random_weights:
            weights.fill_random(model, dtype=self.dtype, device=self.device, seed=settings.seed)
            progress("making random weights", 1.0)
        else:
            weights.load_weights(
                model,
                family.weight_map(self.config),
                settings.folder,
                dtype=self.dtype,
                device=self.device,
                progress=lambda share: progress("loading weights", share),
            )
        self.threads = Threads(self.config, settings.threads) if self.device.type == "cpu" else None
        weights.finish(model)
        progress("packing weights", 1.0)
        self.model = model.eval()
        if settings.adapters_folder is not None:
            self._load_adapters(settings.adapters_folder, family.weight_map(self.config).targets)
        self.capacity = self._allocate(max_model_len)
        if settings.draft_folder is not None:
            self.draft = self._load_draft(settings.draft_folder)
        return self.capacity

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """Capture the decode graphs where there are any, then run prompts and a decode through the scratch slot: the
        first request pays for nothing."""
        if self.device.type == "cuda":
            graphs = DecodeGraphs(self.model, self.ops, self.slots, self._group_kv, self.settings.max_num_seqs)
            mixed = MixedGraphs(self.model, self.ops, self.slots, self._group_kv, self._prompt_shapes)
            drafting = [] if self.draft is None else [self.draft.touch_all]
            self._compile([graphs.touch_all, mixed.touch_all, *drafting])
            progress("compiling kernels", 1.0)
            if self.settings.cuda_graphs:
                graphs.capture_all(lambda share: progress("capturing decode graphs", share))
                mixed.capture_all(lambda share: progress("capturing prompt graphs", share), graphs.pool)
                self.graphs, self.mixed = graphs, mixed
        sizes = (16, self.settings.max_num_batched_tokens, 1) if self.device.type == "cuda" else (16, 1)
        plans = [*self._feature_plans(), *(self._scratch_plan(num_tokens) for num_tokens in sizes)]
        for index, plan in enumerate(plans):  # the last leaves the scratch slot as it was: greedy
            self._execute_open(plan).result()
            progress("warming up", (index + 1) / len(plans))
        self.compilations = Compilations(device_type=self.device.type)

    def flush(self) -> None:
        """Nothing is kept between requests but the cache blocks, which the scheduler forgets."""

    def roofline(self) -> Roofline | None:
        """What the loaded model asks of this device at least, for EngineCore to hold its steps against."""
        settings = self.settings
        if self.threads is not None:
            torch.set_num_threads(self.threads.most)
        values = read_json(settings.folder / "config.json")
        return roofline_of(settings, self.config, self.model, values, self.dtype, self._kv_dtype)

    def recorder(self) -> StepRecorder:
        """Records the steps from its `start` to its `stop`."""
        return StepRecorder(self.device)

    def close(self) -> None:
        """Give the memory back."""
        if self.compilations is not None:
            self.compilations.close()
        self.draft = None
        self.graphs = self.mixed = None
        self.__dict__.pop("_group_kv", None)
        self.__dict__.pop("model", None)
        self.__dict__.pop("kv", None)
        self.__dict__.pop("slots", None)
        self.__dict__.pop("decode_kv_cache", None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # -- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepDraws:
        if self.threads is not None:
            self.threads.prepare(plan.num_tokens)
        self.kv.copy_blocks(plan)
        if self.draft is not None:
            self.draft.begin(plan)
        self.slots.admit(plan.admitted)
        if self.adapters is not None:
            for item in plan.admitted:
                self.adapters.bank.admit(item.slot, item.adapter)
        self.slots.apply_blocks(plan.block_updates)
        self.slots.write_tokens(plan.token_writes)
        if plan.device_drafts and self.draft is not None:
            self.draft.guess(plan)
        begin = time.perf_counter()
        draws = self._compute(plan)
        if self.threads is not None:
            self.threads.observe(plan.num_tokens, time.perf_counter() - begin)
        return draws

    def _compute(self, plan: StepPlan) -> StepDraws:
        columns = columns_of(plan)
        adapted = self.adapters is not None and self.adapters.bank.begin(columns.row_slot, columns.token_row)
        if self.graphs is not None and not adapted:
            captured = self._replay(plan, columns)
            if captured is not None:
                return captured
        self.launched = "kernel by kernel, with adapters" if adapted else "kernel by kernel"
        batch = make_batch(plan, columns, self.slots, self.device)
        if self.decode_kv_cache is not None:
            admitted = [item.slot for item in plan.admitted]
            hidden = cpu_forward.forward(self.model, self.ops, batch, self._group_kv, self.decode_kv_cache, admitted)
        else:
            batch.plans = [
                self.ops.prepare_attention(batch, group, kv, window)
                for group, (kv, window) in enumerate(self._group_kv)
            ]
            hidden = self.model(batch)
        logits = None
        if batch.num_samples:
            last = hidden if batch.num_samples == batch.num_tokens else hidden.index_select(0, batch.sample_tokens)
            logits = self.model.logits(last)
        prompt = None
        if prompt_logprobs.are_asked(self.slots, columns):
            prompt = PromptLogprobs(self.ops, self.model, hidden, self.slots, columns)
        embeddings = self.pooling.compute(self.model, hidden, plan.pooled, columns) if plan.pooled else None
        return StepDraws(self.ops, self.slots, plan, batch, logits, prompt=prompt, embeddings=embeddings)

    def _replay(self, plan: StepPlan, columns: StepColumns) -> StepDraws | None:
        """The step as one graph launch, drawing included where the graph can. None: no graph holds such a step."""
        if plan.num_decodes == len(plan.slots):
            needs = self.slots.needs(columns.row_slot, columns.sample_positions)
            kind = None if plan.masked else self.graphs.kind(len(columns.row_slot), needs)
            self.launched = "decode graph, without its draws" if kind is None else "decode graph, with its draws"
            logits, ids = self.graphs.run(columns, kind)
            batch = self.graphs.batch(len(columns.row_slot))
            batch.columns = columns
            return StepDraws(self.ops, self.slots, plan, batch, logits, ids)
        shape = self.mixed.shape(plan, len(columns.sample_rows))
        if shape is None or plan.pooled or prompt_logprobs.are_asked(self.slots, columns):
            return None
        self.launched = "graph with prompts"
        batch, logits = self.mixed.run(shape, plan, columns)
        return StepDraws(self.ops, self.slots, plan, batch, logits if batch.num_samples else None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _compile(self, captured: list[Callable[[], None]]) -> None:
        """Compile what steps of every kind launch, those to be captured among them."""
        from inferengine.kernels.cuda.attention.decode import row_classes  # an engine on a CPU starts without triton

        eager = rehearsal.plans(
            self.slots.num_slots,
            len(self.kv.groups),
            max_rows=self.settings.max_num_seqs,
            max_tokens=min(self.settings.max_num_batched_tokens, self.slots.tokens.shape[1] - 1),
            decode_rows=row_classes(
                self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.settings.max_num_seqs
            ),
        )
        plans = (*self._feature_plans(), *eager)
        steps = [*captured, *(partial(self._execute_open, plan) for plan in plans)]
        rehearsal.compile_kernels(steps, self.model)

    def _feature_plans(self) -> Iterator[StepPlan]:
        """Warm-up steps for the features of the sampler. A CPU compiles nothing."""
        if self.device.type == "cpu":
            return iter(())
        rows = min(self.settings.max_num_seqs, self.settings.max_num_batched_tokens)
        groups = len(self.kv.groups)
        return rehearsal.feature_plans(self.slots.num_slots, groups, max_rows=rows, vocab_size=self.config.vocab_size)

    def _execute_open(self, plan: StepPlan) -> StepDraws:
        """Execute a plan whose masks, where it has any, allow every token."""
        draws = self.execute(plan)
        if plan.masked:
            draws.provide_masks(rehearsal.open_masks(plan, self.config.vocab_size))
        return draws

    def _load_adapters(self, folder: Path, targets: dict[str, Target]) -> None:
        """Make room for adapters beside the model, and load those that are there."""
        settings = self.settings
        bank = AdapterBank(self.model, num_slots=settings.max_num_seqs, device=self.device, dtype=self.dtype)
        self.adapters = AdapterFolder(folder, self.model, targets, bank, max_rank=settings.max_adapter_rank)
        self.adapters.load_all()

    def _load_draft(self, folder: Path) -> DraftModel:
        return DraftModel(
            folder,
            draft_model.read_draft_config(folder, self.config, self.capacity.max_model_len),
            ops=self.ops,
            slots=self.slots,
            group=self.kv.groups[0],
            block_size=self.settings.block_size,
            dtype=self.dtype,
            max_model_len=self.capacity.max_model_len,
            max_tokens=self.settings.max_num_batched_tokens,
        )

    def _allocate(self, max_model_len: int) -> Capacity:
        settings = self.settings
        cache = memory_plan.cache_settings(settings, max_model_len)
        if self._kv_dtype != self.dtype:
            self._scale_cache(max_model_len)
        budget = self._cache_budget(max_model_len)
        if settings.draft_folder is not None:
            draft = draft_model.read_draft_config(settings.draft_folder, self.config, max_model_len)
            budget = draft_model.share_of_target(budget, self.config, draft)
        groups = memory.plan_groups(self.config, cache, self._kv_dtype, budget)
        self._place_state(groups, max_model_len)
        swap_block_s, prefill_token_s = self._measure_swap() if settings.swap_bytes else (0.0, 0.0)
        return Capacity(
            block_size=settings.block_size,
            groups=groups,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
            swap_block_s=swap_block_s,
            prefill_token_s=prefill_token_s,
            embedding_size=self.config.hidden_size,
            max_forced_rows=FORCED_ROWS_ON_CPU if settings.device.type == "cpu" else 0,
            has_draft_model=settings.draft_folder is not None,
        )

    def _cache_budget(self, max_model_len: int) -> int:
        """Bytes for the KV cache, a draft model's among them. On CUDA: what the memory plan says, if it is there."""
        settings = self.settings
        if self.device.type == "cpu":
            return memory.host_budget_bytes(memory.free_host_bytes(), settings.memory_fraction)
        step = self._profile(max_model_len)
        free, total = torch.cuda.mem_get_info(self.device)
        plan = memory_plan.make_plan(settings, total)
        self._prompt_shapes = plan.prompt_shapes
        return memory_plan.held_budget(plan, settings.memory_fraction, total=total, free=free, step=step)

    @property
    def _kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.settings.cache_dtype == "fp8" else self.dtype

    def _scale_cache(self, max_model_len: int) -> None:
        """Run a sample through the model with a cache of the model's own number format: its magnitudes give the scales
        of the smaller one."""
        settings = self.settings
        count = max(1, min(kv_scales.SAMPLE_TOKENS, settings.max_num_batched_tokens, max_model_len - 1))
        blocks = list(range(-(-count // settings.block_size)))
        self._place_state(
            [KVGroup(len(blocks), window) for window in self.config.group_windows], max_model_len, self.dtype
        )
        plan, slot = self._scratch_plan(count), self.slots.num_slots
        tokens = kv_scales.sample_tokens(self.config.vocab_size, count)
        plan = plan._replace(
            admitted=[plan.admitted[0]._replace(token_ids=tokens)],
            block_updates=[BlockUpdates([slot] * len(blocks), blocks, blocks) for _ in self.kv.groups],
        )
        self.execute(plan).result()
        kv_scales.set_scales(self.model, self.kv.magnitudes())
        del self.kv, self.slots, self._group_kv

    def _place_state(self, groups: list[KVGroup], max_model_len: int, kv_dtype: torch.dtype | None = None) -> None:
        """Allocate the cache and the slots, and give the model its cache."""
        settings = self.settings
        self.kv = KVCache(self.config, groups, settings.block_size, kv_dtype or self._kv_dtype, self.device)
        self.kv.bind(self.model, max_model_len)
        layer_of = [self.config.windows.index(window) for window in self.config.group_windows]
        self._group_kv = [
            (self.kv.layers[layer], window) for layer, window in zip(layer_of, self.config.group_windows, strict=True)
        ]
        self.slots = Slots(
            num_slots=settings.max_num_seqs,
            max_model_len=max_model_len,
            block_size=settings.block_size,
            group_blocks=[group.num_blocks for group in groups],
            vocab_size=self.config.vocab_size,
            device=self.device,
        )
        self.decode_kv_cache = DecodeKvCache(len(self.kv.layers)) if self.device.type == "cpu" else None
        self.pooling = Pooling(self.slots.num_slots + 1, self.config.hidden_size, self.device)

    def _profile(self, max_model_len: int) -> int:
        """Bytes that the largest step needs beside weights and cache: measured by running it over a cache that is only
        the scratch block."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._place_state([KVGroup(0, window) for window in self.config.group_windows], max_model_len)
        settings = self.settings
        rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
        largest = self._scratch_plan(settings.max_num_batched_tokens // rows, rows)
        rehearsal.compile_kernels([lambda: self.execute(largest)], self.model)
        self.execute(largest).result()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del self.kv, self.slots, self._group_kv
        torch.cuda.empty_cache()
        return peak

    def _measure_swap(self) -> tuple[float, float]:
        """Seconds to move one block of all layers between host and device, and to compute one prompt token."""
        layers = list(zip(self.kv.layers, self.kv.host_layers, strict=True))
        begin = time.perf_counter()
        for layer, host in layers:
            host[:1].copy_(layer[-1:])
            layer[-1:].copy_(host[:1])
        block_s = (time.perf_counter() - begin) / 2
        count = min(64, self.settings.max_num_batched_tokens, self.slots.tokens.shape[1] - 1)
        plan = self._scratch_plan(num_tokens=count)
        self.execute(plan).result()
        begin = time.perf_counter()
        self.execute(plan).result()
        return block_s, (time.perf_counter() - begin) / count

    def _scratch_plan(self, num_tokens: int, num_rows: int = 1) -> StepPlan:
        """A step of the slot that belongs to nobody, whose KV goes to the scratch block."""
        num_tokens = max(1, min(num_tokens, self.slots.tokens.shape[1] - 1))
        slot = self.slots.num_slots
        return StepPlan(
            step=0,
            slots=[slot] * num_rows,
            starts=[0] * num_rows,
            counts=[num_tokens] * num_rows,
            samples=[True] * num_rows,
            num_decodes=num_rows if num_tokens == 1 else 0,
            num_tokens=num_tokens * num_rows,
            admitted=[SlotInit(slot, [0] * num_tokens, num_tokens, SamplingParams(temperature=0.0), 0, ())],
            block_updates=[BlockUpdates([], [], []) for _ in self.kv.groups],
        )
