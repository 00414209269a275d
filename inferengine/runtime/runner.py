"""TorchExecutor: implements core.executor.Executor with torch, on the CPU and on CUDA.

A step is: block copies, slot and block-table writes, one flattened batch through the model, one draw per sampling row.
What a step needs from the one before lies on the device already (docs/runtime.md), so steps may be launched back to
back. On a CPU the work is done when `execute` returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from inferengine.core.executor import Capacity, Progress
from inferengine.core.plan import BlockUpdates, SlotInit, StepPlan
from inferengine.errors import ConfigError
from inferengine.kernels import ops as ops_table
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import registry, weights
from inferengine.params import SamplingParams
from inferengine.runtime import draft_model, memory
from inferengine.runtime.batch import columns_of, make_batch
from inferengine.runtime.draft_model import DraftModel
from inferengine.runtime.kv_cache import KVCache
from inferengine.runtime.sampler import StepDraws
from inferengine.runtime.slots import Slots


@dataclass(frozen=True)
class ExecutorSettings:
    """What the configuration decides, resolved: nothing is `auto` here. 0 in `cache` and `max_model_len`: decide."""

    folder: Path
    device: torch.device
    dtype: torch.dtype | None  # None: the checkpoint's
    random_weights: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    memory_fraction: float
    swap_bytes: int
    chunked_prefill: bool
    overlap: bool
    seed: int = 0
    draft_folder: Path | None = None


class TorchExecutor:
    """Holds the model, the KV cache and the slots. One thread calls it."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.settings = settings
        self.max_in_flight = 2 if settings.overlap else 1
        self.device = settings.device
        self.ops = ops_table.resolve(settings.device)
        self.draft: DraftModel | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Capacity:
        """Read the checkpoint, measure what is left, allocate the cache."""
        settings = self.settings
        self.config, family = registry.read_model_config(settings.folder)
        self.dtype = settings.dtype or getattr(torch, self.config.dtype)
        max_model_len = self._max_model_len(self.config)
        with torch.device("meta"):
            model = family.build(self.ops, self.config)
        if settings.random_weights:
            weights.fill_random(model, dtype=self.dtype, device=self.device, seed=settings.seed)
        else:
            weights.load_weights(
                model,
                family.weight_map(self.config),
                settings.folder,
                dtype=self.dtype,
                device=self.device,
                progress=lambda share: progress("loading weights", share),
            )
        weights.finish(model)
        self.model = model.eval()
        self.capacity = self._allocate(max_model_len)
        if settings.draft_folder is not None:
            self.draft = self._load_draft(settings.draft_folder)
        return self.capacity

    def warm_up(self, progress: Progress) -> None:
        """Run a prompt and a decode through the scratch slot, so that the first request pays for nothing."""
        num_steps = 2
        for index in range(num_steps):
            self.execute(self._scratch_plan(num_tokens=1 if index else 16)).result()
            progress("warming up", (index + 1) / num_steps)

    def flush(self) -> None:
        """Nothing is kept between requests but the cache blocks, which the scheduler forgets."""

    def close(self) -> None:
        """Give the memory back."""
        self.draft = None
        self.__dict__.pop("model", None)
        self.__dict__.pop("kv", None)
        self.__dict__.pop("slots", None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # -- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepDraws:
        self.kv.copy_blocks(plan)
        if self.draft is not None:
            self.draft.kv.copy_blocks(plan)
        self.slots.admit(plan.admitted)
        self.slots.apply_blocks(plan.block_updates)
        self.slots.write_tokens(plan.token_writes)
        if plan.device_drafts and self.draft is not None:
            self.draft.guess(plan)
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepDraws:
        columns = columns_of(plan)
        batch = make_batch(plan, columns, self.slots, self.device)
        batch.plans = [
            self.ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(self._group_kv)
        ]
        hidden = self.model(batch)
        logits = None
        if batch.num_samples:
            last = hidden if batch.num_samples == batch.num_tokens else hidden.index_select(0, batch.sample_tokens)
            logits = self.model.logits(last)
        if self.draft is not None:
            self.draft.follow(batch)
        return StepDraws(self.ops, self.slots, plan, batch, logits)

    # -- inside ------------------------------------------------------------------------------------------------------

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
        )

    def _max_model_len(self, config: DecoderConfig) -> int:
        wanted = self.settings.max_model_len
        if wanted > config.max_position:
            raise ConfigError(
                "model.max_model_len", f"the model was made for {config.max_position} tokens; {wanted} are too many"
            )
        return wanted or config.max_position

    def _allocate(self, max_model_len: int) -> Capacity:
        settings = self.settings
        chunk = settings.max_num_batched_tokens if settings.chunked_prefill else max_model_len
        cache = memory.CacheSettings(
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            memory_fraction=settings.memory_fraction,
            swap_bytes=settings.swap_bytes,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=chunk,
        )
        budget = memory.budget_bytes(self.device, settings.memory_fraction, self._activation_bytes())
        if settings.draft_folder is not None:
            draft = draft_model.read_draft_config(settings.draft_folder, self.config, max_model_len)
            budget = draft_model.share_of_target(budget, self.config, draft)
        groups = memory.plan_groups(self.config, cache, self.dtype, budget)
        self.kv = KVCache(self.config, groups, settings.block_size, self.dtype, self.device)
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
        )

    def _activation_bytes(self) -> int:
        """An upper bound of what the largest step allocates: its widest layer a few times over, and the logits."""
        config, tokens = self.config, self.settings.max_num_batched_tokens
        widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        return tokens * (widest + 4 * config.hidden_size) * 2 * self.dtype.itemsize + (
            self.settings.max_num_seqs * config.vocab_size * 12
        )

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

    def _scratch_plan(self, num_tokens: int) -> StepPlan:
        """A step of the slot that belongs to nobody, whose KV goes to the scratch block."""
        num_tokens = min(num_tokens, self.slots.tokens.shape[1] - 1)
        slot = self.slots.num_slots
        return StepPlan(
            step=0,
            slots=[slot],
            starts=[0],
            counts=[num_tokens],
            samples=[True],
            num_decodes=int(num_tokens == 1),
            num_tokens=num_tokens,
            admitted=[SlotInit(slot, [0] * num_tokens, num_tokens, SamplingParams(temperature=0.0), 0, ())],
            block_updates=[BlockUpdates([], [], []) for _ in self.kv.groups],
        )
