"""Embedding models made of decoders whose tokens see later ones: vectors are transformers'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine import LLM
from inferengine.config import Config
from inferengine.config.model_path import EMBEDDED
from inferengine.engine.options import scheduler_options
from inferengine.errors import ConfigError, InvalidRequest
from inferengine.kernels.bidirectional import bidirectional_attention
from tests.executor.engine import Engine
from tests.executor.test_embeddings import POOLINGS, prompts_of
from tests.models.checkpoints import make_model, model_of, save
from tests.models.families import CASES

# name -> what config.json says beside the family's
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"is_causal": False},
    "qwen2": {"is_causal": False},  # as GTE-Qwen2
    "qwen3": {"is_causal": False},
    "gemma3": {"use_bidirectional_attention": True},  # EmbeddingGemma
}


@pytest.fixture(scope="module", params=CHANGES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = make_model(request.param, **CHANGES[request.param])
    return save(model, tmp_path_factory.mktemp(request.param)), model


def reference(model: Any, prompt: list[int], pooling: str) -> torch.Tensor:
    """Pool what transformers computes with a mask that hides nothing; Gemma 3 makes its own masks."""
    length = len(prompt)
    has_masks = getattr(model.config, "use_bidirectional_attention", False)
    mask = None if has_masks else torch.zeros(1, 1, length, length)
    with torch.inference_mode():
        found = model.base_model(torch.tensor([prompt]), attention_mask=mask, use_cache=False)
    states = found.last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / vector.norm()


def make_engine(folder: Path, **values: Any) -> Engine:
    """Make an engine with the scheduler's options for what the model can do."""
    engine = Engine(folder, budget=256, chunked_prefill=False, prefix_caching=False, **values)
    options = scheduler_options(Config(), engine.capacity)
    assert (options.chunked_prefill, options.prefix_caching) == (False, False)
    assert options.max_num_batched_tokens >= engine.capacity.max_model_len, "the longest prompt is one step"
    return engine


def test_vectors_of_prompts_in_one_step_are_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    engine = make_engine(folder, max_num_seqs=6)
    wanted = {engine.embed(prompt, pooling): (prompt, pooling) for prompt in prompts_of() for pooling in POOLINGS}
    engine.run()
    assert engine.core.scheduler.stats.max_batch > 1
    for uid, (prompt, pooling) in wanted.items():
        vector = torch.tensor(engine.embeddings[uid], dtype=torch.float64)
        assert (vector - reference(model, prompt, pooling)).norm() < 1e-4, (len(prompt), pooling)
        assert engine.finished[uid].num_cached == 0


def test_a_token_sees_later_ones(checkpoint: tuple[Path, Any]) -> None:
    """The mean without the last token's own state would not change if its neighbours did not see it."""
    folder, model = checkpoint
    prompt = prompts_of((9,))[0]
    first = reference(model, [*prompt, 3], "mean")
    engine = make_engine(folder)
    uids = [engine.embed([*prompt, last], "mean") for last in (3, 4)]
    engine.run()
    one, other = (torch.tensor(engine.embeddings[uid], dtype=torch.float64) for uid in uids)
    assert (one - first).norm() < 1e-4
    assert (one - other).norm() > 1e-3


@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
def test_a_window_reaches_as_far_on_either_side(window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 1, 14]
    bounds = [0, 9, 10, 24]
    queries = torch.randn(24, 4, 8, generator=generator)
    keys, values = (torch.randn(24, 2, 8, generator=generator) for _ in range(2))
    found = bidirectional_attention(queries, keys, values, bounds, 0.3, window)
    for first, length in zip(bounds, lengths, strict=False):
        for token in range(length):
            seen = [other for other in range(length) if window is None or abs(other - token) < window]
            for head in range(4):
                scores = 0.3 * keys[first:, head // 2][seen] @ queries[first + token, head]
                expected = scores.softmax(0) @ values[first:, head // 2][seen]
                assert torch.allclose(found[first + token, head], expected, atol=1e-5)


def test_text_is_refused_and_named(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    with LLM(str(folder), engine={"device": "cpu"}, cache={"num_blocks": 64}) as llm:
        with pytest.raises(InvalidRequest, match="makes embeddings alone") as caught:
            llm.generate([5, 6, 7], progress=False)
        assert caught.value.code == "unsupported"
        (vector,) = llm.embed([[5, 6, 7]], pooling="mean", progress=False)
    assert (torch.tensor(vector.values, dtype=torch.float64) - reference(model, [5, 6, 7], "mean")).norm() < 1e-4


def test_caps_of_scores_are_refused_with_later_tokens(tmp_path: Path) -> None:
    case = CASES["gemma2"]
    folder = save(model_of(case.config, {**case.values, "is_causal": False}), tmp_path)
    with pytest.raises(ConfigError, match="is_causal = false is not served with caps"):
        Engine(folder)


def test_a_cache_in_fp8_is_refused_where_none_is_read(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", is_causal=False), tmp_path)
    with pytest.raises(ConfigError) as caught:
        Engine(folder, cache={"dtype": "fp8"})
    assert caught.value.field == "cache.dtype"
