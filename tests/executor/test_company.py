"""What a request gets does not depend on who runs beside it, nor on guesses that prove wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inferengine.config.model_path import EMBEDDED
from inferengine.llm import LLM
from tests.executor.company import Answer, Company, Order, guess_at_random, make_orders, num_wrong
from tests.models.checkpoints import greedy_reference, load

ENGINE: dict[str, Any] = {"device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def orders() -> Iterator[tuple[list[Order], list[Answer]]]:
    with LLM(engine=ENGINE, cache={"num_blocks": 256}, speculation={"method": "none"}) as llm:
        listed = make_orders(llm, 24, seed=1)
        yield listed, [Company(llm).alone(order) for order in listed]


@pytest.mark.parametrize(
    ("most", "method", "num_blocks", "pressure"),
    [
        pytest.param(2, "auto", 512, "preempt", id="two at a time"),
        pytest.param(16, "auto", 512, "preempt", id="sixteen at a time"),
        pytest.param(6, "auto", 40, "swap", id="a small cache that swaps"),
        pytest.param(4, "ngram", 40, "preempt", id="guesses from the text, a small cache that preempts"),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_request_alone(orders, most, method, num_blocks, pressure) -> None:
    cache = {"num_blocks": num_blocks, "swap_gib": 0.05}
    with LLM(engine=ENGINE, cache=cache, speculation={"method": method}, scheduler={"preemption": pressure}) as llm:
        guess_at_random(llm, seed=most)
        assert num_wrong(llm, *orders, num_requests=60, most=most, seed=most) == 0
        assert llm.core.scheduler.snapshot().num_drafted > 0


def test_alone_it_is_what_transformers_gives(orders) -> None:
    model = load(EMBEDDED)
    plain = [
        (list(order.prompt), answer.tokens)
        for order, answer in zip(*orders, strict=True)
        if order.params.is_greedy and order.regex is None and order.params.repetition_penalty == 1.0
    ]
    assert len(plain) > 5
    assert [greedy_reference(model, *pair) for pair in plain] == [answer for _, answer in plain]
