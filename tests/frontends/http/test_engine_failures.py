"""What a client sees when the engine refuses, fails, dies or comes back. Never an invented `stop`."""

from __future__ import annotations

import json
import threading
import time

import pytest

from inferengine.text.tokenizer import fingerprint
from inferengine.wire.messages import DRAINING, STARTING, Reject
from tests.frontends.http.builders import House, events, house, ids, says, text_of, wait_until
from tests.frontends.scripted_engine import Script


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize(
    ("code", "status", "wait"),
    [
        ("overloaded", 503, "3"),
        ("rate_limited", 429, "3"),
        ("draining", 503, "3"),
        ("context_length_exceeded", 400, None),
        ("prompt_never_fits", 400, None),
    ],
)
def test_a_refusal_keeps_its_http_status(served: House, code: str, status: int, wait: str | None, stream: bool) -> None:
    refusal = Reject(None, None, code, "no", "prompt", True, 2500)
    served.script = lambda submit, choice: Script(refusal=refusal)
    response = served.post("/v1/completions", prompt="say", stream=stream)
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "prompt: no",
        "type": response.json()["error"]["type"],
        "param": "prompt",
        "code": code,
    }
    assert response.headers.get("retry-after") == wait


def test_one_refused_prompt_of_several_cancels_the_others(served: House) -> None:
    refusal = Reject(None, None, "overloaded", "full")

    def script(submit: object, choice: int) -> Script:
        return Script(refusal=refusal) if len(served.engine.submits) == 2 else Script(ids("fox " * 50), pause_s=0.01)

    served.script = script
    assert served.post("/v1/completions", prompt=["a", "b"], max_tokens=99).status_code == 503
    wait_until(lambda: served.engine.num_running == 0)


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_a_failure_of_the_engine_is_logged_with_the_request_and_the_reason(
    served: House, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    served.script = says("the fox", reason="error", detail=["engine_error", "the step failed"])
    response = served.post("/v1/completions", prompt="say", stream=stream)
    logged = [record.fields for record in caplog.records if record.getMessage() == "a request failed"]  # type: ignore[attr-defined]
    request_id = response.headers["x-request-id"]
    assert logged == [{"request_id": request_id, "code": "engine_error", "reason": "the step failed"}]


def test_the_field_of_a_request_that_could_not_go_on_is_named(served: House) -> None:
    served.script = says("the fox", reason="error", detail=["invalid_request", "takes too long", "grammar"])
    response = served.post("/v1/completions", prompt="say", guided_regex="a+")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_regex")
    assert error["message"] == "guided_regex: takes too long"


def test_an_error_before_the_end_is_an_error(served: House) -> None:
    served.script = says("the fox", reason="error", detail=["engine_error", "step failed in /srv/engine/step.py"])
    response = served.post("/v1/completions", prompt="say")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert "/srv" not in response.text
    documents = served.stream()
    assert text_of(documents[:-2]) == "the fox"
    assert documents[-2]["error"]["code"] == "engine_error"
    assert documents[-1] == "[DONE]"
    assert not any(c["finish_reason"] for event in documents[:-2] for c in event["choices"])


def test_without_an_engine_nothing_hangs() -> None:
    with house(running=False) as built:
        started = time.monotonic()
        response = built.post("/v1/completions", prompt="say")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert response.headers["retry-after"] == "1"
        assert built.http.get("/health").status_code == 503
        assert built.http.get("/ready").status_code == 503
        assert built.http.get("/ping").status_code == 200
        assert time.monotonic() - started < 10.0
        built.start_engine()  # the front end was there first
        assert built.complete()["choices"]


def test_an_engine_killed_in_the_middle_of_a_stream() -> None:
    with house() as built:
        built.script = says("the quick brown fox " * 20, stop_after=3)
        body = json.dumps({"prompt": "say", "stream": True, "max_tokens": 400, "resubmit": False})
        with built.http.stream("POST", "/v1/completions", content=body) as response:
            chunks = response.iter_text()
            first = next(chunks)
            built.engine.kill()
            documents = events(first + "".join(chunks))
        assert documents[-2]["error"]["code"] in ("engine_restarted", "engine_unavailable")
        assert documents[-1] == "[DONE]"
        assert not any(c["finish_reason"] for event in documents[:-2] for c in event["choices"])
        built.script = says("back again")
        built.start_engine()  # another epoch; the front end was not touched
        assert built.complete()["choices"][0]["text"] == "back again"


def test_an_engine_restarted_in_the_middle_of_a_document() -> None:
    with house() as built:
        built.script = lambda submit, choice: Script(ids("fox " * 100), stop_after=3)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(built.post("/v1/completions", prompt="say")))
        asking.start()
        wait_until(lambda: built.engine.num_running)
        built.engine.kill()
        built.engine.start()
        asking.join(10)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] in ("engine_restarted", "engine_unavailable")
        assert "retry-after" in answers[0].headers


@pytest.mark.parametrize("state", [STARTING, DRAINING])
def test_a_state_that_takes_no_requests_is_not_ready(state: str) -> None:
    with house(running=False) as built:
        built.engine.state = state
        built.engine.start()
        wait_until(lambda: built.http.get("/health").status_code == 200)
        response = built.http.get("/ready")
        assert response.status_code == 503
        assert state in response.json()["reason"]


def test_another_model_is_noticed() -> None:
    with house() as built:
        built.engine.kill()
        built.engine.info = built.engine.info.replace(name="other")
        built.start_engine()
        # until the front end has found the engine again, requests are refused
        wait_until(lambda: built.post("/v1/completions", prompt="say").json().get("model") == "other")
        assert built.http.get("/v1/models").json()["data"][0]["id"] == "other"


def test_a_model_without_a_tokenizer_is_listed_and_its_files_are_fetched_once() -> None:
    with house(running=False) as built:
        built.engine.files = {}
        built.engine.info = built.engine.info.replace(fingerprint=fingerprint({}))
        built.engine.start()
        wait_until(lambda: built.http.get("/health").status_code == 200)
        models = built.http.get("/v1/models")
        assert (models.status_code, models.json()["data"][0]["id"]) == (200, "tiny")
        assert built.http.get("/v1/models/tiny").status_code == 200
        wait_until(lambda: "tokenizer.json" in built.http.get("/ready").json()["reason"])
        for _ in range(3):
            refused = built.post("/v1/completions", prompt="say")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "unsupported")
            assert "tokenizer.json" in error["message"]
            assert built.http.get("/ready").status_code == 503
        time.sleep(0.5)  # the front end goes on asking for the model in the background
        assert built.engine.num_file_requests == 1


def test_models_are_listed_while_the_engine_is_away() -> None:
    with house() as built:
        built.engine.kill()
        wait_until(lambda: built.http.get("/ready").status_code == 503)
        assert built.http.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_frozen_loop_is_unhealthy() -> None:
    with house(engine={"frozen_after_s": 0.1}) as built:
        assert built.http.get("/health").status_code == 200
        built.engine.loop_age_ms = 500.0
        wait_until(lambda: built.http.get("/health").status_code == 503)
        assert built.http.get("/health").json()["engines"][0]["loop_age_ms"] == 500.0
