"""Embedding models whose tokens see later ones, by the kernels of the card: vectors are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.executor.engine import Engine
from tests.executor.test_bidirectional import CHANGES
from tests.executor.test_bidirectional import reference as decoder_reference
from tests.executor.test_embeddings import prompts_of
from tests.kernels.llama_engine import use_card_kernels
from tests.models.checkpoints import make_model, save
from tests.models.test_bert import ids, make
from tests.models.test_bert import reference as encoder_reference

WHOLE = {"chunked_prefill": False, "prefix_caching": False}


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_vectors_of_a_decoder_are_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    use_card_kernels(monkeypatch)
    model = make_model(name, **CHANGES[name])
    engine = Engine(save(model, tmp_path), budget=96, block_size=16, device=device.type, **WHOLE)
    wanted = {engine.embed(prompt, "mean"): prompt for prompt in prompts_of((3, 17, 20))}
    engine.run()
    for uid, prompt in wanted.items():
        vector = torch.tensor(engine.embeddings[uid], dtype=torch.float64)
        assert (vector - decoder_reference(model, prompt, "mean")).norm() < 1e-4


def test_vectors_of_bert_are_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    use_card_kernels(monkeypatch)
    model = make("bert", tmp_path)
    engine = Engine(tmp_path, budget=96, block_size=16, device=device.type, **WHOLE)
    if device.type == "cuda":
        engine.executor.warm_up(lambda phase, share: None)
    wanted = {engine.embed(prompt, "cls"): prompt for prompt in ids((3, 17, 20))}
    engine.run()
    for uid, prompt in wanted.items():
        assert (torch.tensor(engine.embeddings[uid]) - encoder_reference(model, prompt, "cls")).norm() < 1e-4
