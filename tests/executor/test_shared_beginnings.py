"""Requests that begin alike give together what each gives alone: their beginning is attended once for all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inferengine.kernels.cpu_shared_prefix import SharedPlan
from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_requests_that_begin_alike_give_what_each_gives_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int] = []
    add = SharedPlan.add

    def counted(self: SharedPlan, *arguments: Any) -> Any:
        offsets.append(int(self.offsets.max()))
        return add(self, *arguments)

    monkeypatch.setattr(SharedPlan, "add", counted)
    rng = random.Random(7)
    system = [rng.randrange(300, 4000) for _ in range(400)]
    story = [rng.randrange(300, 900) for _ in range(8)]  # repeats: draft tokens are found
    prompts = [[*system, *story, *story, rng.randrange(300, 4000)] for _ in range(6)]
    prompts += [story * 5, [*system[:200], *story]]
    params = [SamplingParams(max_tokens=12 + place, temperature=0.0, logprobs=3) for place in range(len(prompts))]
    with LLM(
        engine={"device": "cpu", "threads": 1, "max_num_seqs": 6},
        model={"max_model_len": 512, "dtype": "float32"},
        cache={"num_blocks": 400},
        speculation={"method": method},
    ) as llm:
        alone = [llm.generate(prompt, own, progress=False)[0] for prompt, own in zip(prompts, params, strict=True)]
        assert not offsets
        together = llm.generate(prompts, params, progress=False)
    assert max(offsets) == 416  # whole blocks of the system prompt and the story
    for one, other in zip(alone, together, strict=True):
        (first,), (second,) = one.choices, other.choices
        assert first.token_ids == second.token_ids
        assert [entry.logprob for entry in first.logprobs] == pytest.approx(
            [entry.logprob for entry in second.logprobs], abs=1e-4
        )
