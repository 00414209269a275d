"""CpuDraftRunner proposes the tokens that the draft model proposes in an ordinary step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferengine.executor import draft_model
from inferengine.executor.draft_model import CpuDraftRunner
from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams

QUESTIONS = ["What is a KV cache?", "Tell me a story about a fox.", "Hello!", "Which port does the HTTP server use?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an LLM for whose clock drafting costs nothing: there are always draft tokens."""
    sizes = {"cache": {"num_blocks": 128}, "engine": {"device": "cpu", "max_num_seqs": 4, "threads": 1}}
    with LLM(**sizes, speculation={"method": "draft", "max_drafts": 3}) as llm:
        llm.core._clock = lambda: 0.0
        yield llm


@pytest.fixture
def gaps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how far each draft token is below the best logit when its sequence is computed again as a prompt. This is
    done after every second call, so that calls continue from either way's keys and values."""
    found: list[float] = []
    draft: Any = llm._executor.draft
    propose, calls = CpuDraftRunner.propose, iter(range(10**6))

    def checked(self: CpuDraftRunner, slot: int, start: int, end: int, count: int) -> None:
        propose(self, slot, start, end, count)
        if next(calls) % 2 == 0:
            return
        hidden, _, _ = draft._forward([slot], [0], [end + count - 1])
        logits = draft._model.logits(hidden[-count:])
        drafted = draft._slots.tokens[slot, end : end + count].long()
        found.extend((logits.amax(1) - logits.gather(1, drafted.unsqueeze(1)).squeeze(1)).tolist())

    monkeypatch.setattr(CpuDraftRunner, "propose", checked)
    return found


def ask(llm: LLM, questions: list[str]) -> list[list[int]]:
    results = llm.chat([[{"role": "user", "content": question}] for question in questions], GREEDY)
    return [result.choices[0].token_ids for result in results]


@pytest.mark.parametrize("count", [1, 4])
def test_draft_tokens_are_the_likeliest_of_an_ordinary_step_too(llm: LLM, gaps: list[float], count: int) -> None:
    ask(llm, QUESTIONS[:count])
    ask(llm, QUESTIONS[-count:])  # in the same slots
    assert len(gaps) > 0
    assert max(gaps) < 1e-3


def test_a_copy_grows_with_its_sequence(llm: LLM, gaps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "ROOM", 16)
    ask(llm, QUESTIONS[1:2])
    assert len(gaps) > 0
    assert max(gaps) < 1e-3


def test_more_sequences_than_it_takes_give_the_same_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MOST_ROWS", 2)
    together = ask(llm, QUESTIONS)
    assert llm.core.scheduler.snapshot().num_drafted > 0
    assert together == [ask(llm, [question])[0] for question in QUESTIONS]
