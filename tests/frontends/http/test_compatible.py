"""POST /generate and POST /infer/v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferengine.wire import messages
from inferengine.wire.messages import Reject
from tests.frontends.http.builders import TOKENIZER, House, ids, says
from tests.frontends.scripted_engine import Script


def infer_events(house: House, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    response = house.post("/infer/v1/completions", **{"model": "tiny", "prompt": "say", **body})
    assert response.status_code == 200, response.text
    parsed = []
    for part in response.text[:-2].split("\n\n"):
        name, data = part.split("\n")
        parsed.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return parsed


def test_generate_gives_the_text_with_its_prompt(served: House) -> None:
    document = served.post("/generate", prompt="say ", max_tokens=9, request_id="g").json()
    assert document == {
        "request_id": "g",
        "prompt": "say ",
        "generated_text": "say the quick brown fox",
        "token_count": len(ids("the quick brown fox")),
        "stop_reason": "The maximum of 9 tokens was reached.",
        "finish_reason": "length",
    }
    assert served.engine.submits[0].params["temperature"] == 0.0, "greedy unless asked otherwise"
    assert served.engine.submits[0].params["max_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"max_tokens": 5}, 422, "prompt"),
        ({"prompt": "a"}, 422, "max_tokens"),
        ({"prompt": 5, "max_tokens": 5}, 422, "prompt"),
        ({"prompt": "", "max_tokens": 5}, 400, "prompt"),
        ({"prompt": " \n", "max_tokens": 5}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": -3}, 400, "max_tokens"),
    ],
)
def test_generate_refuses(served: House, body: dict[str, Any], status: int, param: str) -> None:
    response = served.post("/generate", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert served.engine.submits == []


@pytest.mark.parametrize("path", ["/generate", "/infer/v1/completions"])
@pytest.mark.parametrize(("code", "status"), [("overloaded", 503), ("deadline_exceeded", 504)])
def test_no_capacity_and_no_time(served: House, path: str, code: str, status: int) -> None:
    served.script = lambda submit, choice: Script(refusal=Reject(None, None, code, "no"))
    assert served.post(path, model="tiny", prompt="a", max_tokens=5).status_code == status


def test_infer_tells_each_token(served: House) -> None:
    served.script = says("the 🎉")
    events = infer_events(served, max_tokens=50)
    assert [name for name, _ in events] == ["token"] * len(ids("the 🎉")) + ["done"]
    assert [data["token_id"] for name, data in events if name == "token"] == ids("the 🎉")
    assert "".join(data["token"] for name, data in events if name == "token") == TOKENIZER.decode(ids("the 🎉"))
    assert events[-1][1]["finish_reason"] == "length"
    assert events[-1][1]["usage"]["completion_tokens"] == len(ids("the 🎉"))


def test_infer_ends_with_an_error_event(served: House) -> None:
    served.script = says("the fox", reason="error", detail=["engine_error", "it failed"])
    events = infer_events(served)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["message"] == "it failed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("model", None),
        ("unknown", 1),
        ("n", 2),
        ("max_tokens", 0),
        ("temperature", 9),
        ("top_k", 0),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", [[1], [2]]),
        ("response_format", {"type": "xml"}),
    ],
)
def test_infer_refuses_with_422(served: House, field: str, value: Any) -> None:
    response = served.post("/infer/v1/completions", **{"model": "tiny", "prompt": "a", field: value})
    assert (response.status_code, response.json()["error"]["param"].partition(".")[0]) == (422, field)
    assert served.engine.submits == []


@pytest.mark.parametrize("prompt", ["", []])
def test_infer_refuses_an_empty_prompt_with_400(served: House, prompt: Any) -> None:
    response = served.post("/infer/v1/completions", model="tiny", prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_infer_refuses_a_prompt_that_is_too_long_with_422(served: House) -> None:
    served.script = lambda submit, choice: Script(refusal=Reject(None, None, "context_length_exceeded", "too long"))
    assert served.post("/infer/v1/completions", model="tiny", prompt=[5, 6]).status_code == 422


def test_infer_takes_token_ids_and_a_response_format_and_always_streams(served: House) -> None:
    served.script = says("the fox")
    events = infer_events(served, prompt=[5, 6], response_format={"type": "json_object"}, stream=False)
    assert events[-1][0] == "done"
    (submit,) = served.engine.submits
    assert submit.prompt == messages.to_u32([5, 6])
    assert submit.grammar is not None


@pytest.mark.parametrize(
    ("reason", "detail", "told"), [("stop", None, "eos"), ("stop", "fox", "stop"), ("length", None, "length")]
)
def test_infer_tells_the_models_own_end_from_a_stop_text(served: House, reason: str, detail: Any, told: str) -> None:
    served.script = says("the fox", reason=reason, detail=detail)
    assert infer_events(served)[-1][1]["finish_reason"] == told


@pytest.mark.parametrize(
    ("reason", "detail", "told"),
    [
        ("stop", None, "The model ended its text."),
        ("stop", "fox", "The stop text 'fox' was generated."),
        ("stop", 7, "The stop token 7 was generated."),
    ],
)
def test_generate_says_in_a_sentence_why_it_ended(served: House, reason: str, detail: Any, told: str) -> None:
    served.script = says("the fox", reason=reason, detail=detail)
    assert served.post("/generate", prompt="say", max_tokens=9).json()["stop_reason"] == told
