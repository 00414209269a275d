"""Speculation behind real HTTP: the same text, and the counts of draft tokens in usage, /stats and /metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams
from tests.frontends.http.embedded import Embedded, embedded_model

STORY = [{"role": "user", "content": "Write a short story about a fox and an owl."}]
CHAT = "/v1/chat/completions"


class Plain(NamedTuple):
    """A conversation whose next answer repeats much of the last one, and that answer, of an engine without
    speculation."""

    messages: list[dict[str, str]]
    answer: str


@pytest.fixture(scope="module")
def plain() -> Plain:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM(engine={"threads": 1}, cache={"num_blocks": 64}) as llm:
        first = llm.chat(STORY, params, progress=False)[0].text
        messages = [*STORY, {"role": "assistant", "content": first}, *STORY]
        return Plain(messages, llm.chat(messages, params, progress=False)[0].text)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with embedded_model(str(tmp_path_factory.mktemp("e")), speculation={"method": "ngram"}) as embedded:
        yield embedded


@pytest.fixture
def asked_again(plain: Plain) -> dict[str, Any]:
    return {"messages": plain.messages, "temperature": 0}


def told(embedded: Embedded, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return `speculation` of /stats once the condition holds, or after a while: it is of the engine's last STATUS."""
    deadline = time.monotonic() + 60
    while True:
        figures: dict[str, Any] = embedded.http.get("/stats").json()["speculation"]
        if condition(figures) or time.monotonic() > deadline:
            return figures
        time.sleep(0.05)


def settled(embedded: Embedded) -> dict[str, Any]:
    """Return the statistics once three readings agree: the steps of earlier requests are in them."""
    readings: list[dict[str, Any]] = []

    def agree(figures: dict[str, Any]) -> bool:
        readings.append(figures)
        return readings[-3:] == [figures] * 3

    return told(embedded, agree)


def test_draft_tokens_are_counted_for_the_request_and_the_engine_alike(
    embedded: Embedded, asked_again: dict[str, Any], plain: Plain
) -> None:
    before = settled(embedded)
    answer = embedded.ask(CHAT, **asked_again, max_tokens=64)
    assert answer["choices"][0]["message"]["content"] == plain.answer
    details = answer["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert 0 < accepted < answer["usage"]["completion_tokens"]  # how many depends on how long steps take here
    after = told(embedded, lambda figures: figures["accepted"] - before["accepted"] >= accepted)
    assert after["accepted"] - before["accepted"] == accepted
    assert after["drafted"] - before["drafted"] == accepted + rejected
    assert after["acceptance_rate"] == pytest.approx(after["accepted"] / after["drafted"])
    assert after["mean_accepted_length"] == pytest.approx(1 + after["accepted"] / after["verified"])
    assert sum(after["accepted_by_position"].values()) == after["accepted"]


def test_a_prediction_that_is_right_is_accepted(embedded: Embedded) -> None:
    """Of an answer whose conversation has none of it: prompt lookup alone finds nothing."""
    body = {"messages": STORY, "temperature": 0, "max_tokens": 48}
    plain = embedded.ask(CHAT, **body)
    text = plain["choices"][0]["message"]["content"]
    accepted: list[int] = []
    for prediction in (text, "Nothing of this is said: 7 8 9."):
        answer = embedded.ask(CHAT, **body, prediction={"type": "content", "content": prediction})
        assert answer["choices"][0]["message"]["content"] == text
        accepted.append(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
    assert accepted[0] > accepted[1]


def test_metrics_say_what_stats_say(embedded: Embedded, asked_again: dict[str, Any]) -> None:
    embedded.ask(CHAT, **asked_again, max_tokens=64)
    text = embedded.http.get("/metrics").text
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total{.*} (\S+)$", text, re.MULTILINE)
    assert accepted is not None
    stats = told(embedded, lambda figures: figures["accepted"] >= float(accepted[1]))
    for name, key in (
        ("vllm:spec_decode_num_drafts_total", "verified"),
        ("vllm:spec_decode_num_draft_tokens_total", "drafted"),
        ("vllm:spec_decode_num_accepted_tokens_total", "accepted"),
        ("vllm:spec_decode_draft_acceptance_rate", "acceptance_rate"),
        ("inferengine_spec_decode_mean_accepted_length", "mean_accepted_length"),
    ):
        found = re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        assert float(found[1]) == pytest.approx(stats[key])


def test_a_stop_string_inside_draft_tokens_ends_the_text_before_it(
    embedded: Embedded, asked_again: dict[str, Any], plain: Plain
) -> None:
    stop = plain.answer[80:90]
    before = plain.answer[: plain.answer.index(stop)]
    answer = embedded.ask(CHAT, **asked_again, max_tokens=64, stop=[stop])
    assert answer["choices"][0]["message"]["content"] == before
    chunks = embedded.stream(CHAT, **asked_again, max_tokens=64, stop=[stop])
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if isinstance(chunk, dict)]
    assert "".join(deltas) == before


def test_a_request_without_draft_tokens_has_no_such_details(embedded: Embedded) -> None:
    answer = embedded.ask(CHAT, messages=STORY, max_tokens=1)
    assert "completion_tokens_details" not in answer["usage"]
