"""DraftModel: a small model of the same vocabulary that guesses ahead for the large one.

It reads and writes the same slots and block tables, with a KV cache of its own beside the large model's: block b of one
stands for block b of the other. So prefix hits, chunks, preemption and copies need nothing of their own.

A guess is drawn with the parameters and the random numbers of the request, at its position: the draw that the large
model makes there uses the very same noise, so the two agree whenever their distributions do (Gumbel-max coupling, see
Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2025), and what
is emitted is always the large model's own draw.
"""

from __future__ import annotations

from pathlib import Path

import torch

from inferengine.core.executor import KVGroup
from inferengine.core.plan import StepPlan
from inferengine.errors import ConfigError
from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.models import registry, weights
from inferengine.runtime.batch import columns_of, make_batch
from inferengine.runtime.kv_cache import KVCache
from inferengine.runtime.slots import Slots

KEY = "speculation.draft_model"


def read_draft_config(folder: Path, target: DecoderConfig, max_model_len: int) -> DecoderConfig:
    """The draft's configuration. Raises ConfigError where it cannot guess for this model."""
    config, _ = registry.read_model_config(folder)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(KEY, f"has {config.vocab_size} tokens in its vocabulary, the model has {target.vocab_size}")
    if config.max_position < max_model_len:
        raise ConfigError(KEY, f"was made for {config.max_position} tokens, model.max_model_len is {max_model_len}")
    if config.group_windows != (None,) or target.group_windows[0] is not None:
        raise ConfigError(KEY, "sliding windows without full attention cannot be followed: choose another draft")
    return config


def share_of_target(budget_bytes: int, target: DecoderConfig, draft: DecoderConfig) -> int:
    """What of the KV budget is left to the target when every block has a twin in the draft's cache."""
    item = 2  # cancels out: both caches have the same type
    own = sum(target.kv_bytes_per_token(group, item) for group in range(len(target.group_windows)))
    return budget_bytes * own // (own + draft.kv_bytes_per_token(0, item))


class DraftModel:
    """Loaded beside the target; lives in the executor's thread."""

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
        random_weights: bool = False,
    ) -> None:
        self._ops, self._slots, self._device = ops, slots, slots.device
        _, family = registry.read_model_config(folder)
        with torch.device("meta"):
            model = family.build(ops, config)
        if random_weights:
            weights.fill_random(model, dtype=dtype, device=self._device)
        else:
            weights.load_weights(model, family.weight_map(config), folder, dtype=dtype, device=self._device)
        weights.finish(model)
        self._model = model.eval()
        self.kv = KVCache(config, [group], block_size, dtype, self._device)
        self.kv.bind(self._model, max_model_len)

    def guess(self, plan: StepPlan) -> None:
        """Write guesses after the pending token of every row that verifies some: one token of all such rows at a time.
        The k-th is drawn from the guesses before it."""
        rows = [row for row, count in enumerate(plan.num_drafts) if count]
        for index in range(max(plan.num_drafts)):
            rows = [row for row in rows if plan.num_drafts[row] > index]
            step = _decode_step(plan, rows, index)
            columns = columns_of(step)
            batch = make_batch(step, columns, self._slots, self._device)
            logits = self._model.logits(self._forward(batch))
            needs = self._slots.needs(columns.row_slot, columns.sample_positions)
            self._ops.sample(logits, self._slots, batch.sample_slots, batch.sample_positions, needs)

    def follow(self, batch: Batch) -> None:
        """Keep the draft's KV in step with the target's: the same tokens at the same places."""
        self._forward(batch)

    def _forward(self, batch: Batch) -> torch.Tensor:
        batch.plans = [self._ops.prepare_attention(batch, 0, self.kv.layers[0], None)]
        return self._model(batch)


def _decode_step(plan: StepPlan, rows: list[int], index: int) -> StepPlan:
    return StepPlan(
        step=plan.step,
        slots=[plan.slots[row] for row in rows],
        starts=[plan.starts[row] + index for row in rows],
        counts=[1] * len(rows),
        samples=[True] * len(rows),
        num_decodes=len(rows),
        num_tokens=len(rows),
        admitted=[],
        block_updates=[],
    )
