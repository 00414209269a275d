"""A draft model changes no token: greedy, sampled, with penalties, masked or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferengine.config import Config
from inferengine.config.model_path import EMBEDDED, EMBEDDED_DRAFT
from inferengine.core.speculation import DraftModelProposer
from inferengine.errors import ConfigError
from inferengine.executor.torch_executor import TorchExecutor, build_executor
from inferengine.llm import LLM, Generation
from inferengine.sampling_params import SamplingParams
from tests.executor.engine import Engine
from tests.models.checkpoints import greedy_reference, model_of, save
from tests.models.families import BARE

QUESTIONS = ["What is a KV cache?", "What is 12 + 30?", "Hello!", "Which port does the HTTP server use?"]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
SMALL = {"cache": {"num_blocks": 256}, "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64}}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, min_p=0.02, seed=7, max_tokens=24),
    "penalties": SamplingParams(
        temperature=0.7,
        top_k=20,
        seed=3,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((300, 2.0),),
        max_tokens=24,
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, max_tokens=12),
}


def tokens(results: list[Generation]) -> list[list[int]]:
    return [result.choices[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**SMALL, speculation={"method": "none"}) as llm:
        yield llm


@pytest.fixture(scope="module", params=["draft", "ngram"])
def speculating(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**SMALL, speculation={"method": request.param, "max_drafts": 3}) as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_equal_those_without_speculation(plain: LLM, speculating: LLM, name: str) -> None:
    expected = plain.chat(CHATS, PARAMS[name])
    got = speculating.chat(CHATS, PARAMS[name])
    assert tokens(got) == tokens(expected)
    if name == "logprobs":
        for left, right in zip(got, expected, strict=True):
            ours, theirs = left.choices[0].logprobs or [], right.choices[0].logprobs or []
            assert [item.logprob for item in ours] == pytest.approx([item.logprob for item in theirs], abs=1e-4)
            assert len(ours) == len(left.choices[0].token_ids)


TIGHT = {
    "cache": {"num_blocks": 11, "block_size": 8},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 16, "threads": 1},
}


@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_chunks_prefix_hits_and_preemption_change_no_token(plain: LLM, method: str) -> None:
    again = [[*CHATS[0], {"role": "assistant", "content": "A KV cache."}, *chat] for chat in CHATS]  # share a prefix
    with LLM(**TIGHT, model={"max_model_len": 88}, speculation={"method": method, "max_drafts": 3}) as llm:
        for name in ("greedy", "sampled", "penalties"):
            assert tokens(llm.chat(again, PARAMS[name])) == tokens(plain.chat(again, PARAMS[name]))
        stats, snapshot = llm.core.scheduler.stats, llm.core.scheduler.snapshot()
        assert stats.num_preemptions > 0
        assert snapshot.num_prefix_hit_tokens > 0
        assert snapshot.num_drafted > 0


def test_a_grammar_holds_under_speculation(plain: LLM, speculating: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    chat = [[{"role": "user", "content": "Anna is 31. Give the person as JSON."}]]
    got, expected = (
        llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=60), **asked) for llm in (speculating, plain)
    )
    assert tokens(got) == tokens(expected)
    assert set(json.loads(got[0].text)) == {"name", "age"}


def test_every_draft_token_is_accepted_where_the_draft_is_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**SMALL, speculation={"method": "draft", "draft_model": str(EMBEDDED), "max_drafts": 3}) as llm:
        monkeypatch.setattr(
            llm.core, "_clock", lambda: 0.0
        )  # by which drafting costs nothing: there are always draft tokens
        llm.chat(CHATS, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24))
        llm.chat(
            CHATS, SamplingParams(temperature=2.0, seed=5, ignore_eos=True, max_tokens=24)
        )  # unlikely draws included
        snapshot = llm.core.scheduler.snapshot()
        assert snapshot.num_drafted > 40
        assert snapshot.num_drafts_accepted == snapshot.num_drafted


def test_a_draft_may_be_a_mixture_of_experts(tmp_path: Path) -> None:
    model = model_of("MixtralConfig", {**BARE, "num_local_experts": 3, "num_experts_per_tok": 2})
    folder = save(model, tmp_path)

    def build(config: Config) -> TorchExecutor:
        return build_executor(config.with_values(speculation={"draft_model": str(folder)}))

    engine = Engine(folder, build=build, proposer=DraftModelProposer(), max_drafts=3)
    (output,) = engine.generate([[5, 9, 17, 3]], 12)
    assert output == greedy_reference(model, [5, 9, 17, 3], output)
    assert engine.core.scheduler.snapshot().num_drafts_accepted > 0


def test_a_draft_of_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "draft")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    (tmp_path / "draft/config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    with pytest.raises(ConfigError, match="vocabulary") as caught:
        LLM(**SMALL, speculation={"method": "draft", "draft_model": str(tmp_path / "draft")})
    assert caught.value.field == "speculation.draft_model"


def test_a_draft_has_to_be_named_where_the_model_is_not_the_embedded_one() -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(EMBEDDED_DRAFT), **SMALL, speculation={"method": "draft"})
    assert caught.value.field == "speculation.draft_model"


def test_compiling_runs_chunks_and_decodes_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each class of chunk sizes, one for each decode attention kernel."""
    config = Config().with_values(**SMALL, speculation={"method": "draft"})
    executor = build_executor(config)
    executor.load(lambda phase, share: None)
    draft = executor.draft
    assert draft is not None
    reads: list[tuple[int, int]] = []  # rows, tokens of each
    read = draft._read

    def watched(slots: list[int], starts: list[int], ends: list[int]) -> Any:
        reads.append((len(slots), ends[0] - starts[0]))
        return read(slots, starts, ends)

    monkeypatch.setattr(draft, "_read", watched)
    draft.run_all_sizes()
    executor.close()
    assert [tokens for rows, tokens in reads if rows == 1 and tokens > 1] == [2, 16, 32, 64, 80, 64]
    assert (1, 1) in reads
    assert max(rows for rows, _ in reads) <= SMALL["engine"]["max_num_seqs"]
