"""The result of a request does not depend on the requests beside it, nor on rejected draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferengine.config.model_path import EMBEDDED
from inferengine.llm import LLM
from tests.executor.overlapping import Job, JobResult, RequestDriver, draft_at_random, make_jobs, num_wrong
from tests.models.checkpoints import greedy_reference, load

ENGINE: dict[str, Any] = {"device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def jobs() -> Iterator[tuple[list[Job], list[JobResult]]]:
    with LLM(engine=ENGINE, cache={"num_blocks": 256}, speculation={"method": "none"}) as llm:
        listed = make_jobs(llm, 24, seed=1)
        yield listed, [RequestDriver(llm).alone(job) for job in listed]


@pytest.mark.parametrize(
    ("most", "method", "num_blocks", "pressure"),
    [
        pytest.param(2, "auto", 512, "preempt", id="two at a time"),
        pytest.param(16, "auto", 512, "preempt", id="sixteen at a time"),
        pytest.param(6, "auto", 16, "swap", id="a small cache that swaps"),
        pytest.param(4, "ngram", 14, "preempt", id="n-gram drafts, a small cache that preempts"),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_request_alone(jobs, most, method, num_blocks, pressure) -> None:
    cache = {"num_blocks": num_blocks, "swap_gib": 0.05}
    with LLM(engine=ENGINE, cache=cache, speculation={"method": method}, scheduler={"preemption": pressure}) as llm:
        draft_at_random(llm, seed=most)
        assert num_wrong(llm, *jobs, num_requests=30, most=most, seed=most) == 0
        snapshot = llm.core.scheduler.snapshot()
        assert snapshot.num_drafted > 0
        assert (llm.core.scheduler.stats.num_preemptions > 0) is (num_blocks < 512)
        assert (snapshot.num_blocks_swapped_out > 0) is (pressure == "swap")


def test_a_request_alone_equals_transformers(jobs) -> None:
    model = load(EMBEDDED)
    plain = [
        (list(job.prompt), answer.tokens)
        for job, answer in zip(*jobs, strict=True)
        if job.params.is_greedy and job.regex is None and job.params.repetition_penalty == 1.0
    ]
    assert len(plain) > 5
    assert [greedy_reference(model, *pair) for pair in plain] == [answer for _, answer in plain]
