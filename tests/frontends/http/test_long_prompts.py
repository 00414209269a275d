"""Prompts far beyond the model's length are refused on every route before they are tokenized."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inferengine.text import Tokenizer
from tests.frontends.http.builders import House

LONG = "a" * 2_000_000
TURN = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["x", LONG], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": TURN, "max_tokens": 1}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": TURN, "max_tokens": 1}),
        ("/generate", {"prompt": LONG, "max_tokens": 1}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_untokenized(
    served: House, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(Tokenizer, "_encode", encode)
    served.engine.submits.clear()
    began = time.monotonic()
    response = served.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "maximum context length" in error["message"]
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert not served.engine.submits
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/generate", {"prompt": LONG}, "at most 8000 characters"),
        ("/infer/v1/completions", {"model": "tiny", "prompt": LONG}, "maximum context length"),
    ],
)
def test_some_routes_answer_422_to_a_prompt_that_is_too_long(
    served: House, path: str, body: dict[str, Any], message: str
) -> None:
    response = served.post(path, **body)
    assert response.status_code == 422
    assert message in response.json()["error"]["message"]


def test_a_long_text_can_still_be_cut_to_its_end(served: House) -> None:
    text = "the quick brown fox " * 20_000
    served.complete(prompt=text, truncate_prompt_tokens=5, max_tokens=2)
    (submit,) = served.engine.submits
    served.engine.submits.clear()
    served.complete(prompt="the quick brown fox " * 50, truncate_prompt_tokens=5, max_tokens=2)
    assert submit.prompt == served.engine.submits[0].prompt


def test_a_long_text_is_still_counted(served: House) -> None:
    text = "the quick brown fox " * 10_000
    document = served.post("/tokenize", prompt=text).json()
    assert document["count"] == len(document["tokens"]) > 10_000
    assert document["token_strs"] is None
    document = served.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert "".join(document["token_strs"]).endswith(text)
