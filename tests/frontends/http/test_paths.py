"""Other spellings of a path: without /v1, with a slash at the end, and some under /v1 that others serve there."""

from __future__ import annotations

import pytest

from tests.frontends.http.builders import House

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions/", "/v1/chat/completions/"])
def test_chat_by_another_path(served: House, path: str) -> None:
    assert served.post(path, messages=HI).json()["object"] == "chat.completion"


def test_models_by_another_path(served: House) -> None:
    for path in ("/models", "/v1/models/", "/models/tiny", "/v1/models/tiny/"):
        assert served.http.get(path).status_code == 200, path


def test_a_stored_answer_by_another_path(served: House) -> None:
    name = served.post("/responses", input="hi").json()["id"]
    assert served.http.get(f"/responses/{name}/").json()["id"] == name


def test_tokens_under_the_version(served: House) -> None:
    tokens = served.post("/v1/tokenize", prompt="say").json()["tokens"]
    assert tokens == served.post("/tokenize", prompt="say").json()["tokens"]
    assert served.post("/v1/detokenize/", tokens=tokens).json() == {"prompt": "say"}


@pytest.mark.parametrize("path", ["/abort_requests/", "/load_lora_adapter", "/reload_keys//"])
def test_an_admins_path_is_one_however_it_is_spelled(served: House, path: str) -> None:
    assert served.post(path).status_code == 403


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/v1/models", "/v1/generate/x", "//"])
def test_other_paths_stay_unknown(served: House, path: str) -> None:
    assert served.http.get(path).status_code in ({404} if path != "//" else {200, 404})


def test_a_path_of_openai_that_is_not_offered_is_unknown_and_no_id(served: House) -> None:
    """OpenAI's clients take 405 for a mistake of their own, and 404 for a server without the path."""
    for path in ("/v1/responses/compact", "/responses/compact/"):
        response = served.post(path, model="tiny", input="hi")
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (404, "not_found", "invalid_request_error")
        assert "There is no such path" in error["message"]
