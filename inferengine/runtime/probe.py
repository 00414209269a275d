"""Probe: a prompt through a loaded executor's model, for measuring it: logits of every position, and what each layer
makes of it. Uses the blocks of the cache as if nobody else did; for tools, never beside requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferengine.core.plan import BlockUpdates, SlotInit, StepPlan
from inferengine.errors import ConfigError
from inferengine.kernels.batch import Batch
from inferengine.params import SamplingParams
from inferengine.runtime.batch import columns_of, make_batch
from inferengine.runtime.runner import TorchExecutor


class Probe:
    """One prompt at a time, in chunks of the executor's token budget."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        config = executor.config
        self._groups = [(executor.kv.layers[config.windows.index(window)], window) for window in config.group_windows]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] in fp32. Raises ConfigError when the cache is too small for the prompt."""
        executor = self._executor
        blocks = -(-len(token_ids) // executor.capacity.block_size)
        if blocks > min(group.num_blocks for group in executor.capacity.groups):
            raise ConfigError("cache.num_blocks", f"a prompt of {len(token_ids)} tokens needs {blocks}")
        budget = executor.capacity.max_num_batched_tokens
        parts = []
        for start in range(0, len(token_ids), budget):
            batch = self._batch(token_ids, start, min(budget, len(token_ids) - start), first=start == 0)
            parts.append(executor.model.logits(executor.model(batch)).float())
        return torch.cat(parts)

    def _batch(self, token_ids: Sequence[int], start: int, count: int, *, first: bool) -> Batch:
        executor = self._executor
        slot, slots = executor.slots.num_slots, executor.slots
        if first:
            blocks = list(range(-(-len(token_ids) // executor.capacity.block_size)))
            slots.admit([SlotInit(slot, token_ids, len(token_ids), SamplingParams(temperature=0.0), 0, ())])
            slots.apply_blocks([BlockUpdates([slot] * len(blocks), blocks, blocks) for _ in self._groups])
        plan = StepPlan(
            step=0,
            slots=[slot],
            starts=[start],
            counts=[count],
            samples=[False],
            num_decodes=0,
            num_tokens=count,
            admitted=[],
            block_updates=[],
        )
        batch = make_batch(plan, columns_of(plan), slots, executor.device)
        batch.plans = [
            executor.ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(self._groups)
        ]
        return batch

    def close(self) -> None:
        """Hand the scratch slot's block table back to the scratch block."""
        for table, group in zip(self._executor.slots.block_tables, self._executor.capacity.groups, strict=True):
            table[self._executor.slots.num_slots] = group.num_blocks
