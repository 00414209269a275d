"""The card's kernels pad the rows of the head: an engine that computes by them gives the tokens, ranks and
log-probabilities of the vocabulary alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.executor.cuda_graphs import MixedGraphs, MixedShape
from tests.executor.engine import Engine
from tests.kernels.llama_engine import make_llama_engine, save_llama, use_card_kernels

VOCAB = 61
PROMPT = [3, 60, 17, 5]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3, "prompt_logprobs": 2},
    "a flat distribution": {"temperature": 1e6, "seed": 5},
    "filters": {"temperature": 1e6, "top_k": 1000, "top_p": 0.99, "seed": 6},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": ((60, 2.0),), "seed": 7},
    "the last token": {"logit_bias": ((60, 1e4),), "logprobs": 61},
}


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_and_log_probabilities_are_those_of_the_reference(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    sizes = {"vocab_size": VOCAB, "tie_word_embeddings": tied}
    save_llama(tmp_path, **sizes)
    options: dict[str, Any] = {"budget": 24, "max_num_seqs": 8, "num_blocks": 32, "block_size": 16}
    expected = Engine(tmp_path, **options)
    use_card_kernels(monkeypatch)
    found = Engine(tmp_path, device=device.type, **options)
    assert found.executor.model.head.packed.shape == (64, 32)
    for each in (found, expected):
        for values in REQUESTS.values():
            each.submit(PROMPT, 8, **values)
        each.run()
    assert found.outputs == expected.outputs
    assert found.outputs[len(REQUESTS)] == [60] * 8
    for ours, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        for uid, rows in theirs.items():
            assert [row.rank for row in ours[uid]] == [row.rank for row in rows]
            assert [row.top_ids for row in ours[uid]] == [row.top_ids for row in rows]
            assert [row.logprob for row in ours[uid]] == pytest.approx([row.logprob for row in rows], abs=1e-4)


def test_captured_steps_keep_logits_in_rows_as_the_head_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The draws that follow were compiled for rows that begin at aligned addresses."""
    engine = make_llama_engine(tmp_path, monkeypatch, device, {"vocab_size": VOCAB}, budget=24, num_blocks=32)
    executor, shape = engine.executor, MixedShape(4, 8)
    mixed = MixedGraphs(executor.model, executor.ops, executor.slots, executor.kv.group_caches, [shape])
    logits = executor.model.logits(torch.randn(shape.num_rows, 32, device=executor.device))
    mixed.compute = lambda batch: logits  # type: ignore[method-assign]
    mixed._compute(shape)
    assert mixed._logits is not None
    assert logits.stride() == mixed._logits.stride() == (64, 1)
    assert torch.equal(mixed._logits, logits)
