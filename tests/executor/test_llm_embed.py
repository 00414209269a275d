"""LLM.embed: the engine as a library gives what transformers gives, and refuses what it cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import inferengine
from inferengine.config.model_path import EMBEDDED
from inferengine.errors import InvalidRequest
from inferengine.llm import LLM
from tests.models.checkpoints import load

TEXTS = ["The cat sat on the mat.", "A queue is a line of people who wait for their turn, one behind the other.", "one"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sections = {
        "engine": {"device": "cpu", "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 16},
        "model": {"max_model_len": 128},
        "cache": {"num_blocks": 64, "block_size": 8},
    }
    with inferengine.LLM(**sections) as built:
        yield built


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_in_chunks_equal_transformers(llm: LLM, pooling: str) -> None:
    model = load(EMBEDDED)
    for text, embedding in zip(TEXTS, llm.embed(TEXTS, pooling=pooling, progress=False), strict=True):
        assert embedding.prompt == text
        assert embedding.prompt_ids == llm.tokenizer.encode(text)
        with torch.inference_mode():
            states = model.base_model(torch.tensor([embedding.prompt_ids]), use_cache=False).last_hidden_state[0]
        expected = states[-1] if pooling == "last" else states.mean(0)
        assert (torch.tensor(embedding.values) - expected / expected.norm()).norm() < 1e-4


def test_one_prompt_may_be_given_alone_as_text_or_tokens(llm: LLM) -> None:
    (text,) = llm.embed(TEXTS[0], progress=False)
    (tokens,) = llm.embed(text.prompt_ids, progress=False)
    assert tokens.prompt is None
    assert tokens.values == pytest.approx(text.values, abs=1e-6)
    assert tokens.num_cached_tokens == (len(text.prompt_ids) - 1) // 8 * 8
    assert llm.embed([], progress=False) == []


def test_what_cannot_run_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.core.scheduler.stats.num_steps
    for prompts, pooling, message in (
        (TEXTS, "max", "must be one of last, mean"),
        ([[1], []], None, "at least one token"),
        ([[1], [1] * 129], None, "maximum context length"),
        ([[4096]], None, "outside the vocabulary"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.embed(prompts, pooling=pooling, progress=False)
    assert llm.core.scheduler.stats.num_steps == steps
    assert len(llm.embed([[1] * 128], progress=False)) == 1


def test_generating_goes_on_as_before(llm: LLM) -> None:
    params = inferengine.SamplingParams(temperature=0.0, max_tokens=12)
    (before,) = llm.generate(TEXTS[0], params, progress=False)
    llm.embed(TEXTS, progress=False)
    (after,) = llm.generate(TEXTS[0], params, progress=False)
    assert after.text == before.text
    llm.core.scheduler.check()
