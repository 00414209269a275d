"""A stop string that the front end finds ends like others: the answer counts what was cached, the engine a stop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontends.http.embedded import Embedded

PROMPT = "What is a KV cache? " * 20
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}


def finished(embedded: Embedded) -> dict[str, int]:
    return dict(embedded.http.get("/stats").json()["finished_by_reason"])


def stop_string(embedded: Embedded) -> tuple[str, int]:
    """Return some characters of the model's own output, and how much of its prompt is cached from now on."""
    embedded.ask("/v1/completions", **ASKED)
    whole = embedded.ask("/v1/completions", **ASKED)
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    return whole["choices"][0]["text"][8:12], cached


def test_the_document_counts_what_was_cached_and_the_engine_a_stop(embedded: Embedded) -> None:
    stop, cached = stop_string(embedded)
    before = finished(embedded)
    answer = embedded.ask("/v1/completions", **ASKED, stop=[stop])
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    after = finished(embedded)
    assert after.get("stop", 0) == before.get("stop", 0) + 1
    assert after.get("abort", 0) == before.get("abort", 0)


def test_the_last_chunk_of_a_stopped_stream_has_the_engines_usage(embedded: Embedded) -> None:
    stop, cached = stop_string(embedded)
    asked = {**ASKED, "stop": stop, "stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"detached": True}):
        lines = embedded.post("/v1/completions", **asked, **more).text.splitlines()
        *_, usage, end = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert end == "[DONE]"
        assert json.loads(usage)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert json.loads(usage)["usage"]["completion_tokens"] < ASKED["max_tokens"]


@pytest.mark.parametrize("more", [{}, {"detached": True}], ids=["attached", "detached"])
def test_usage_beside_the_choice_counts_what_was_cached(embedded: Embedded, more: dict[str, Any]) -> None:
    """Clients that send no stream_options read it in the last chunk of the choice."""
    stop, cached = stop_string(embedded)
    lines = embedded.post("/v1/completions", **ASKED, **more, stop=stop, stream=True).text.splitlines()
    *_, last, end = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert end == "[DONE]"
    assert json.loads(last)["choices"][0]["stop_reason"] == stop
    assert json.loads(last)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_and_the_other_dialects(embedded: Embedded) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"messages": messages, "max_tokens": 30, "temperature": 0}
    embedded.ask("/v1/messages", **asked)
    whole = embedded.ask("/v1/messages", **asked)
    stop = whole["content"][0]["text"][4:8]
    answer = embedded.ask("/v1/messages", **asked, stop_sequences=[stop])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["usage"]["cache_read_input_tokens"] == whole["usage"]["cache_read_input_tokens"] > 0
