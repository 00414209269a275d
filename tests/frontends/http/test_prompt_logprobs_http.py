"""Log-probabilities of the prompt over HTTP, as vLLM's clients and evaluation harnesses read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontends.http.builders import house
from tests.frontends.http.embedded import Embedded

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time there was a small"


def complete(embedded: Embedded, **body: Any) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = embedded.ask(
        COMPLETIONS, **{"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **body}
    )["choices"]
    return choices


def scheduled_tokens(embedded: Embedded) -> int:
    """Return what the engine has computed since its start."""
    assert embedded.engine.core is not None
    return embedded.engine.core.scheduler.stats.num_scheduled_tokens


def test_an_echo_tells_the_prompts_tokens_too(embedded: Embedded) -> None:
    (choice,) = complete(embedded, echo=True, logprobs=2)
    shown, ids = choice["logprobs"], [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["text"].startswith(PROMPT)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(shown[name]) == len(ids), name
    assert "".join(shown["tokens"]).endswith(choice["text"])
    special = len(ids) - len(PROMPT.split()) - len(choice["token_ids"])  # shown in the tokens, not in the text
    for token, offset in list(zip(shown["tokens"], shown["text_offset"], strict=True))[special:]:
        assert choice["text"][offset:].startswith(token)
    assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
    assert all(logprob <= 0 for logprob in shown["token_logprobs"][1:])


def test_an_echo_of_no_tokens_scores_the_prompt(embedded: Embedded) -> None:
    """What evaluation harnesses ask for: the same figures as with an output, and no output."""
    (scored,) = complete(embedded, echo=True, logprobs=2, max_tokens=0)
    (written,) = complete(embedded, echo=True, logprobs=2)
    count = len(scored["prompt_token_ids"])
    assert (scored["text"], scored["token_ids"]) == (PROMPT, [])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert scored["logprobs"][name] == written["logprobs"][name][:count]


def test_what_is_drawn_and_what_is_told_of_a_prompt_agree(embedded: Embedded) -> None:
    """The output's log-probabilities are those of the same tokens in a prompt."""
    (drawn,) = complete(embedded, logprobs=1)
    ids = [*drawn["prompt_token_ids"], *drawn["token_ids"]]
    (told,) = complete(embedded, prompt=ids, prompt_logprobs=1)
    entries = told["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(ids)
    for token, entry, logprob in zip(
        drawn["token_ids"], entries[-4:], drawn["logprobs"]["token_logprobs"], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert entry[str(token)]["rank"] == 1


def test_every_choice_has_the_logprobs_of_its_prompt(embedded: Embedded) -> None:
    choices = complete(embedded, prompt=[PROMPT, "A queue is"], n=2, temperature=1.0, prompt_logprobs=0)
    assert len(choices) == 4
    for choice in choices:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"] != choices[2]["prompt_logprobs"]


def test_a_chat_completion_has_prompt_logprobs_beside_its_choices(embedded: Embedded) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "max_tokens": 2}
    document = embedded.ask(CHAT, return_token_ids=True, **body)
    assert len(document["prompt_logprobs"]) == len(document["prompt_token_ids"])


def test_a_prompt_of_one_token_has_none(embedded: Embedded) -> None:
    (choice,) = complete(embedded, prompt=[5], prompt_logprobs=3)
    assert choice["prompt_logprobs"] == [None]


def test_a_cached_prompt_is_told_as_well(embedded: Embedded) -> None:
    first = complete(embedded, prompt=PROMPT * 5, prompt_logprobs=1)
    complete(embedded, prompt=PROMPT * 5)
    again = complete(embedded, prompt=PROMPT * 5, prompt_logprobs=1)
    assert [len(choice["prompt_logprobs"]) for choice in (*first, *again)] == [len(first[0]["prompt_token_ids"])] * 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "detached": True}, "prompt_logprobs"),
    ],
)
def test_prompt_logprobs_of_a_stream_are_refused(embedded: Embedded, body: dict[str, Any], param: str) -> None:
    error = embedded.post(COMPLETIONS, prompt=PROMPT, **body).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported")


def test_sixteen_choices_of_one_token_compute_their_prompt_once(embedded: Embedded) -> None:
    """The first ends with its only token; the others find what it has computed, but for the block it stopped in."""
    ids = [10 + (7 * place) % 4000 for place in range(600)]
    before = scheduled_tokens(embedded)
    choices = complete(embedded, prompt=ids, n=16, temperature=1.0, max_tokens=1, echo=True, logprobs=1)
    computed = scheduled_tokens(embedded) - before
    assert computed <= 600 + 15 * 16
    told = [choice["logprobs"]["token_logprobs"][: len(ids)] for choice in choices]
    assert told == [told[0]] * 16


def test_an_answer_written_beside_the_event_loop_is_the_same(
    embedded: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [PROMPT, "A queue is"], "echo": True, "logprobs": 2, "n": 2, "temperature": 1.0, "seed": 5}
    expected = rounded(complete(embedded, **body, prompt_logprobs=1))
    monkeypatch.setattr("frontends.http.respond.SMALL_VALUES", 0)
    assert rounded(complete(embedded, **body, prompt_logprobs=1)) == expected


def rounded(value: Any) -> Any:
    """Return the value without the last digits of numbers: they depend on which requests a step computes together."""
    if isinstance(value, float):
        return round(value, 3) + 0.0
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def test_more_than_one_answer_may_hold_is_refused_with_the_remedy(embedded: Embedded) -> None:
    ids = [[5] * 2000] * 10
    response = embedded.post(COMPLETIONS, prompt=ids, prompt_logprobs=5, n=16, temperature=1, max_tokens=1)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert "fewer alternatives, choices or prompts" in error["message"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [(COMPLETIONS, {"prompt": [5] * 20}), (CHAT, {"messages": [{"role": "user", "content": "the quick brown fox"}]})],
)
def test_the_configured_limit_holds_before_the_engine_sees_the_request(path: str, prompt: dict[str, Any]) -> None:
    with house(limits={"max_prompt_logprobs": 60}) as served:
        for values in (
            {"prompt_logprobs": 5},
            {"prompt_logprobs": 0, "n": 16, "temperature": 1},
            {"prompt_logprobs": 1, "n": 8, "temperature": 1},
        ):
            response = served.post(path, max_tokens=1, **prompt, **values)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("prompt_logprobs", "invalid_request")
            assert "at most 60" in error["message"]
        assert served.engine.submits == []
        assert served.post(path, max_tokens=1, prompt_logprobs=0, **prompt).status_code == 200
        assert served.post(path, max_tokens=1, n=16, temperature=1, **prompt).status_code == 200
