"""POST /generate and POST /infer/v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferengine.wire.messages import Reject
from tests.frontends.http.builders import TOKENIZER, House, ids, says
from tests.frontends.scripted_engine import Script


def infer_events(house: House, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    response = house.post("/infer/v1/completions", **{"prompt": "say", **body})
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
        "stop_reason": "length",
    }
    assert served.engine.submits[0].params["max_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"max_tokens": 5}, 422, "prompt"),
        ({"prompt": "a"}, 422, "max_tokens"),
        ({"prompt": 5, "max_tokens": 5}, 422, "prompt"),
        ({"prompt": "", "max_tokens": 5}, 400, "prompt"),
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
    assert served.post(path, prompt="a", max_tokens=5).status_code == status


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
    [("model", "other"), ("unknown", 1), ("n", 2), ("prompt", ""), ("max_tokens", 0), ("temperature", 9)],
)
def test_infer_refuses_with_422(served: House, field: str, value: Any) -> None:
    response = served.post("/infer/v1/completions", **{"prompt": "a", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (422, field)
    assert served.engine.submits == []
