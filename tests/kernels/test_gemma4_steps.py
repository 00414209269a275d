"""Gemma 4's layers by the kernels of the card: caches of two shapes, layers that read another's, keys that are values.

Graphs themselves need a card; what a graph replays is computed here by Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.core.executor import StepPlan
from inferengine.executor.cuda_graphs import DecodeGraphs, MixedGraphs, MixedShape
from inferengine.executor.sampler import StepDraws
from inferengine.executor.slots import columns_of
from tests.executor.engine import Engine
from tests.kernels.llama_engine import use_card_kernels
from tests.models.checkpoints import logits_reference, model_of, save
from tests.models.families import GEMMA4

ATTENTION = {  # all that some size has: the last two layers read the keys of the first two
    **GEMMA4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 301, "sliding_window": 5,
}  # fmt: skip
PROMPTS = [list(range(20, 26)), [7, 3]]
SHAPE = MixedShape(2, 8)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # padded tokens compute with whatever is there
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_steps_and_padded_steps_give_transformers_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    model: Any = model_of("Gemma4TextConfig", ATTENTION)
    use_card_kernels(monkeypatch)
    monkeypatch.setattr("inferengine.executor.cuda_graphs.PROMPT_ROWS", 2)
    engine = Engine(save(model, tmp_path), block_size=16, device=device.type, budget=8, max_num_seqs=2, num_blocks=16)
    executor, seen = engine.executor, set()
    parts = executor.model, executor.ops, executor.slots, executor.kv.group_caches
    mixed, decode = MixedGraphs(*parts, [SHAPE]), DecodeGraphs(*parts, max_rows=2)
    plain, plain_logits, last = executor._compute, executor._logits, []

    def keep(*inputs: Any) -> torch.Tensor:
        last[:] = [plain_logits(*inputs)]
        return last[0].clone()

    def compare(plan: StepPlan) -> StepDraws:
        """Compute a step as graphs hold it, padded, and then as it is: it writes the same keys again."""
        columns = columns_of(plan)
        if plan.num_decodes == len(plan.slots):
            decode.upload(columns, 2)
            logits = decode.compute(2, None)[0][: len(columns.row_slot)].clone()
        else:
            padded = mixed.place(SHAPE, plan, columns)
            logits = mixed.compute(mixed.batch(SHAPE))[: padded.num_samples].clone()
        draws = plain(plan)
        if len(columns.sample_rows):
            torch.testing.assert_close(logits, last[0], rtol=1e-4, atol=1e-4)
            seen.add(plan.num_decodes == len(plan.slots))
        return draws

    executor._compute, executor._logits = compare, keep
    uids = [engine.submit(prompt, 2, logprobs=5) for prompt in PROMPTS]
    engine.run()
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        expected = logits_reference(model, prompt + engine.outputs[uid][:-1])[len(prompt) - 1 :].log_softmax(-1)
        assert engine.outputs[uid] == expected.argmax(-1).tolist()
        found = torch.tensor([item.top_logprobs for item in engine.logprobs[uid]])
        torch.testing.assert_close(found, expected.topk(5).values, rtol=1e-4, atol=1e-4)
    assert seen == {False, True}
