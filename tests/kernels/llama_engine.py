"""An engine over a random Llama by the kernels of the card, and its steps computed without padding, to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inferengine.core.executor import StepPlan
from inferengine.executor.slots import make_batch
from inferengine.executor.torch_executor import TorchExecutor
from inferengine.kernels import ops
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cuda import table
from inferengine.kernels.ops import Ops
from tests.executor.engine import Engine

VOCAB = 64


def save_llama(folder: Path, **sizes: int) -> None:
    """Save a Llama with random weights, as small as the kernels take it but for `sizes`."""
    smallest = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    LlamaForCausalLM(LlamaConfig(**{**smallest, **sizes})).save_pretrained(folder)


def use_card_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines compute by the kernels of the card; without one they are interpreted."""

    def kernels(device: torch.device, deterministic: bool = False) -> Ops:
        return Ops(**table.table(device, deterministic=deterministic))

    monkeypatch.setattr(ops, "resolve", kernels)


def make_llama_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, sizes: dict[str, int], **options: Any
) -> Engine:
    """Make an engine over `save_llama`'s model of these sizes, by the kernels of the card."""
    use_card_kernels(monkeypatch)
    save_llama(folder, **sizes)
    return Engine(folder, block_size=16, device=device.type, **options)


def unpadded_states(executor: TorchExecutor, plan: StepPlan, columns: StepColumns) -> tuple[Batch, torch.Tensor]:
    """Compute a step as no graph holds it. Returns its batch and the final hidden states [T, E]."""
    batch = make_batch(plan, columns, executor.slots, executor.device)
    batch.plans = [None]
    return batch, executor.model(batch)
