"""Bad input: a clear error that names the field, at once, and nothing reaches the engine."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any, NoReturn

import pytest

from frontends.common.json import LARGE
from inferengine.errors import InvalidRequest
from inferengine.sampling_params import MAX_LISTED, from_map
from inferengine.wire.messages import Reject
from tests.frontends.http.builders import HEADERS, House, ids, says
from tests.frontends.scripted_engine import Script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]

# field changed, its value, HTTP status, param of the error, code
COMPLETION_FAULTS: list[tuple[str, Any, int, str | None, str]] = [
    ("model", "gpt-9", 404, "model", "model_not_found"),
    ("model", 7, 400, "model", "invalid_request"),
    ("prompt", None, 400, "prompt", "invalid_request"),
    ("prompt", "", 400, "prompt", "invalid_request"),
    ("prompt", [], 400, "prompt", "invalid_request"),
    ("prompt", [[]], 400, "prompt", "invalid_request"),
    ("prompt", ["fine", ""], 400, "prompt[1]", "invalid_request"),
    ("prompt", [1, "two"], 400, "prompt", "invalid_request"),
    ("prompt", [1, -2], 400, "prompt", "invalid_request"),
    ("prompt", [2**32], 400, "prompt", "invalid_request"),
    ("prompt", ["fine", 5], 400, "prompt[1]", "invalid_request"),
    ("prompt", [1.5], 400, "prompt", "invalid_request"),
    ("prompt", {"text": "x"}, 400, "prompt", "invalid_request"),
    ("prompt", ["x"] * 300, 400, "prompt", "invalid_request"),
    ("max_tokens", 0, 400, "max_tokens", "invalid_request"),
    ("max_tokens", -1, 400, "max_tokens", "invalid_request"),
    ("max_tokens", "ten", 400, "max_tokens", "invalid_request"),
    ("max_tokens", 10**30, 400, "max_tokens", "invalid_request"),
    ("min_tokens", 99, 400, "min_tokens", "invalid_request"),
    ("temperature", -0.1, 400, "temperature", "invalid_request"),
    ("temperature", 2.1, 400, "temperature", "invalid_request"),
    ("temperature", "hot", 400, "temperature", "invalid_request"),
    ("temperature", True, 400, "temperature", "invalid_request"),
    ("top_p", 0, 400, "top_p", "invalid_request"),
    ("top_p", 1.1, 400, "top_p", "invalid_request"),
    ("top_k", -2, 400, "top_k", "invalid_request"),
    ("min_p", 2, 400, "min_p", "invalid_request"),
    ("repetition_penalty", 0, 400, "repetition_penalty", "invalid_request"),
    ("repetition_penalty", 1e-308, 400, "repetition_penalty", "invalid_request"),
    ("repetition_penalty", 10**400, 400, "repetition_penalty", "invalid_request"),
    ("logit_bias", {"5": 10**400}, 400, "logit_bias.5", "invalid_request"),
    ("presence_penalty", 3, 400, "presence_penalty", "invalid_request"),
    ("frequency_penalty", -3, 400, "frequency_penalty", "invalid_request"),
    ("seed", 2**64, 400, "seed", "invalid_request"),
    ("n", 0, 400, "n", "invalid_request"),
    ("n", 10**6, 400, "n", "invalid_request"),
    ("stop", [""], 400, "stop", "invalid_request"),
    ("stop", ["x"] * 17, 400, "stop", "invalid_request"),
    ("stop", "x" * 300, 400, "stop", "invalid_request"),
    ("stop", 5, 400, "stop", "invalid_request"),
    ("stop_token_ids", [302], 400, "stop_token_ids", "invalid_request"),
    ("allowed_token_ids", [-1], 400, "allowed_token_ids", "invalid_request"),
    ("logit_bias", {"302": 1}, 400, "logit_bias", "invalid_request"),
    ("logit_bias", {"5": 101}, 400, "logit_bias", "invalid_request"),
    ("logit_bias", "x", 400, "logit_bias", "invalid_request"),
    ("logit_bias", {"a": 1}, 400, "logit_bias", "invalid_request"),
    ("logit_bias", {"5": "x"}, 400, "logit_bias.5", "invalid_request"),
    ("allowed_token_ids", [10**30], 400, "allowed_token_ids", "invalid_request"),
    ("stop_token_ids", [5, "x"], 400, "stop_token_ids[1]", "invalid_request"),
    ("logprobs", 21, 400, "logprobs", "invalid_request"),
    ("logprobs", -1, 400, "logprobs", "invalid_request"),
    ("stream", "yes", 400, "stream", "invalid_request"),
    ("stream_options", {"include_usage": True}, 400, "stream_options", "invalid_request"),
    ("echo", 1, 400, "echo", "invalid_request"),
    ("cache_salt", "x" * 1025, 400, "cache_salt", "invalid_request"),
    ("priority", 2**31, 400, "priority", "invalid_request"),
    ("truncate_prompt_tokens", 0, 400, "truncate_prompt_tokens", "invalid_request"),
    ("request_id", "x" * 200, 400, "request_id", "invalid_request"),
    ("suffix", "end", 400, "suffix", "unsupported"),
    ("best_of", 2, 400, "best_of", "unsupported"),
    ("use_beam_search", True, 400, "use_beam_search", "unsupported"),
    ("prompt_logprobs", 21, 400, "prompt_logprobs", "invalid_request"),
    ("response_format", {"type": "xml"}, 400, "response_format.type", "invalid_request"),
    ("response_format", {"schema": {}}, 400, "response_format.type", "invalid_request"),
    ("guided_json", False, 400, "guided_json", "invalid_request"),
    ("guided_json", 5, 400, "guided_json", "invalid_request"),
    ("guided_choice", [], 400, "guided_choice", "invalid_request"),
    ("structured_outputs", {"regex": ""}, 400, "structured_outputs.regex", "invalid_request"),
    ("bad_words", "x", 400, "bad_words", "invalid_request"),
    ("bad_words", [""], 400, "bad_words", "invalid_request"),
    ("bad_words", ["x"] * 200, 400, "bad_words", "invalid_request"),
    ("bad_words", ["né" * 100], 400, "bad_words", "invalid_request"),
]
CHAT_FAULTS: list[tuple[str, Any, int, str | None, str]] = [
    ("messages", None, 400, "messages", "invalid_request"),
    ("messages", [], 400, "messages", "invalid_request"),
    ("messages", "hi", 400, "messages", "invalid_request"),
    ("messages", ["hi"], 400, "messages[0]", "invalid_request"),
    ("messages", [{"content": "hi"}], 400, "messages[0].role", "invalid_request"),
    ("messages", [{"role": "user"}], 400, "messages[0].content", "invalid_request"),
    ("messages", [{"role": "user", "content": 5}], 400, "messages[0].content", "invalid_request"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        400,
        "messages[0].content[0]",
        "unsupported",
    ),
    ("messages", HELLO * 20_000, 413, "messages", "request_too_large"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}],
        413,
        "messages[0].content",
        "request_too_large",
    ),
    ("top_logprobs", 3, 400, "top_logprobs", "invalid_request"),
    ("logprobs", 3, 400, "logprobs", "invalid_request"),
    ("max_completion_tokens", 0, 400, "max_completion_tokens", "invalid_request"),
    ("chat_template", "{{ 1 }}", 400, "chat_template", "unsupported"),
    ("chat_template_kwargs", {"messages": []}, 400, "chat_template_kwargs", "invalid_request"),
    ("tools", "f", 400, "tools", "invalid_request"),
    ("tools", [{"type": "retrieval"}], 400, "tools[0]", "invalid_request"),
    ("tools", [{"type": "function", "function": {}}], 400, "tools[0].function.name", "invalid_request"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], 400, "tools[0].function.name", "invalid_request"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
        400,
        "tools[0].function.parameters",
        "invalid_request",
    ),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2, 400, "tools", "invalid_request"),
    ("tool_choice", "required", 400, "tool_choice", "invalid_request"),
    ("tool_choice", {"function": {}}, 400, "tool_choice", "invalid_request"),
    ("parallel_tool_calls", "yes", 400, "parallel_tool_calls", "invalid_request"),
    (
        "messages",
        [{"role": "user", "content": "hi", "tool_calls": True}],
        400,
        "messages[0].tool_calls",
        "invalid_request",
    ),
    ("documents", [1], 400, "documents", "invalid_request"),
    ("echo", True, 400, "echo", "unsupported"),
]


def refused(house: House, path: str, body: Any) -> tuple[int, Any, str, str]:
    started = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = house.http.post(path, content=content)
    assert time.monotonic() - started < 10.0
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 2000
    return response.status_code, error["param"], error["code"], error["message"]


@pytest.mark.parametrize(("field", "value", "status", "param", "code"), COMPLETION_FAULTS)
def test_a_completion_field_is_refused_by_name(
    served: House, field: str, value: Any, status: int, param: str, code: str
) -> None:
    assert refused(served, COMPLETIONS, {"prompt": "say", field: value})[:3] == (status, param, code)
    assert served.engine.submits == []


@pytest.mark.parametrize(("field", "value", "status", "param", "code"), CHAT_FAULTS)
def test_a_chat_field_is_refused_by_name(
    served: House, field: str, value: Any, status: int, param: str, code: str
) -> None:
    assert refused(served, CHAT, {"messages": HELLO, field: value})[:3] == (status, param, code)
    assert served.engine.submits == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": NaN,}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object(served: House, path: str, body: bytes) -> None:
    status, _, code, _ = refused(served, path, body)
    assert (status, code) == (400, "invalid_request")
    assert served.engine.submits == []


class Unread(list[int]):
    """A list that nobody may go through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("its entries were looked at")


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words_ids", "logit_bias"])
def test_a_list_far_too_long_is_refused_unread(field: str) -> None:
    with pytest.raises(InvalidRequest, match="at most") as caught:
        from_map({field: Unread(range(MAX_LISTED + 1))})
    assert caught.value.field == f"params.{field}"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b'{"prompt": "\\ud800"}', "prompt", "half of a surrogate pair"),
        (b'{"prompt": "x", "stop": ["a", "\\udc00b"]}', "stop[1]", "half of a surrogate pair"),
        (
            b'{"prompt": "x", "response_format": {"type": "\\ud800"}}',
            "response_format.type",
            "half of a surrogate pair",
        ),
        (b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', "logit_bias", "half of a surrogate pair"),
        (
            b'{"prompt": "x", "unknown": ' + b"[" * 900 + b'"\\ud800"' + b"]" * 900 + b"}",
            "unknown" + "[0]" * 31,
            "half",
        ),
        (b'{"prompt": "x\xff"}', None, "byte 13 is not UTF-8"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", None, "a number has thousands of digits"),
        (b'{"prompt": "x",}', None, "at position 15"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_wrong_with_a_body_is_told_with_its_place(served: House, body: bytes, param: str, says: str) -> None:
    status, where, _, message = refused(served, COMPLETIONS, body)
    assert (status, where) == (400, param)
    assert says in message


def test_a_large_body_is_told_what_is_wrong_with_it_as_a_small_one(served: House) -> None:
    body = {"prompt": [*[5] * 200_000, -1]}
    assert len(json.dumps(body)) > LARGE
    assert refused(served, COMPLETIONS, body)[:2] == refused(served, COMPLETIONS, {"prompt": [5, -1]})[:2]
    status, _, _, message = refused(served, COMPLETIONS, b" " * LARGE + b'{"prompt": "x",}')
    assert (status, message.partition(":")[0]) == (400, f"The body is not valid JSON at position {LARGE + 15}")


def test_a_body_of_very_many_lists_is_refused(served: House) -> None:
    status, param, code, message = refused(served, COMPLETIONS, {"prompt": [[]] * 300_000})
    assert (status, param, code) == (413, None, "request_too_large")
    assert "100000 lists and objects" in message


LISTS = ("/v1/chat/completions", "/v1/models", "/v1/files", "/v1/batches")
AS_ANTHROPIC = {"anthropic-version": "2023-06-01"}  # whose list of models has pages


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    "limit",
    [
        "0",
        "-1",
        "+1",
        "1.0",
        "1e1",
        " 1",
        "",
        "x",
        "\u0663",
        "00000",
        "00100001",
        f"0000{'1' * 3000}",
        f"0000{'1' * 5000}",
        f"{'0' * 5000}99999999999",
    ],
    ids=lambda limit: repr(limit[:12]),
)
def test_a_limit_that_is_no_number_of_entries_is_refused_by_name(served: House, path: str, limit: str) -> None:
    response = served.http.get(path, params={"limit": limit}, headers=AS_ANTHROPIC if path == "/v1/models" else {})
    assert response.status_code == 400, response.text
    assert "limit" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("zeros", [1, 6, 5000])
def test_zeros_before_a_limit_change_nothing(served: House, path: str, zeros: int) -> None:
    headers = AS_ANTHROPIC if path == "/v1/models" else {}
    plain = served.http.get(path, params={"limit": "7"}, headers=headers)
    response = served.http.get(path, params={"limit": "0" * zeros + "7"}, headers=headers)
    assert (response.status_code, response.json()) == (200, plain.json())


def test_both_halves_of_a_pair_are_a_character(served: House) -> None:
    served.script = says("fox")
    assert served.http.post(COMPLETIONS, content=b'{"prompt": "\\ud83c\\udf89"}').status_code == 200


def test_a_compressed_body_is_refused_as_such(served: House) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    error = served.http.post(COMPLETIONS, content=body, headers={"content-encoding": "gzip"}).json()["error"]
    assert (error["param"], error["code"]) == ("Content-Encoding", "unsupported")


def test_headers_over_the_limit_have_a_code(served: House) -> None:
    response = served.http.post(COMPLETIONS, content=b"{}", headers={"x-long": "x" * 70_000})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "request_too_large")


def test_another_method_is_told_which_one_there_is(served: House) -> None:
    response = served.http.get(COMPLETIONS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "use POST" in response.json()["error"]["message"]


def test_a_default_that_does_not_fit_is_not_told_as_if_the_client_had_asked_for_it(served: House) -> None:
    message = "max_tokens may be at most 5; got 16."
    refusal = Reject(None, None, "context_length_exceeded", message, "max_tokens")
    served.script = lambda submit, choice: Script(refusal=refusal)
    left_out = served.post(COMPLETIONS, prompt="x").json()["error"]["message"]
    assert left_out.endswith(f"{message} The request does not say it: 16 is the default here.")
    assert served.post(COMPLETIONS, prompt="x", max_tokens=16).json()["error"]["message"].endswith(message)
    infer = {"path": "/infer/v1/completions", "model": "tiny", "prompt": "x"}
    assert "The request does not say it: 128 is the default here." in served.post(**infer).text
    assert "is the default here" not in served.post(**infer, max_tokens=128).text


def test_too_long_a_conversation_is_refused_under_the_name_that_it_came_by(served: House) -> None:
    refusal = Reject(None, None, "context_length_exceeded", "The prompt is too long.", "prompt")
    served.script = lambda submit, choice: Script(refusal=refusal)
    bodies = {
        COMPLETIONS: ({"prompt": "x"}, "prompt"),
        CHAT: ({"messages": HELLO}, "messages"),
        "/v1/responses": ({"input": "hi"}, "input"),
    }
    for path, (body, field) in bodies.items():
        assert refused(served, path, body)[1:3] == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("include", 0, "include"),
        ("top_logprobs", 21, "top_logprobs"),
        ("input", [5], "input[0]"),
        ("previous_response_id", "x", "previous_response_id"),
        ("prompt", {"id": "x"}, "prompt"),
    ],
)
def test_a_field_of_a_response_is_refused_by_name(served: House, field: str, value: Any, param: str) -> None:
    assert refused(served, "/v1/responses", {"input": "hi", field: value})[1] == param


def test_top_k_zero_bad_json_and_list_prompts_are_no_server_errors(served: House) -> None:
    assert served.complete(top_k=0)["choices"]
    assert served.complete(top_k=-1)["choices"]
    assert served.complete(prompt=["say", "say"])["choices"][1]["index"] == 1
    assert refused(served, COMPLETIONS, b"{bad")[0] == 400


def test_a_body_over_the_limit_is_refused_unread(served: House) -> None:
    limit = served.front.service.config.http.max_body_bytes
    assert refused(served, COMPLETIONS, b'{"prompt":"' + b"x" * limit + b'"}')[0::2] == (413, "request_too_large")

    def drops() -> Any:  # chunked: no length is declared
        yield b'{"prompt":"'
        for _ in range(limit // 65536 + 2):
            yield b"x" * 65536

    response = served.http.post(COMPLETIONS, content=drops())
    assert response.status_code == 413


def test_another_content_type_is_refused(served: House) -> None:
    """A page of another origin may post text/plain without asking; it may not post JSON."""
    response = served.http.post(COMPLETIONS, content=b'{"prompt":"x"}', headers={"content-type": "text/plain"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Content-Type")
    assert "-H 'Content-Type: application/json'" in response.json()["error"]["message"]  # the remedy, whole
    assert served.http.post(
        COMPLETIONS, content=b'{"prompt":"x"}', headers={"content-type": "application/json; charset=utf-8"}
    ).is_success


def test_unknown_paths_and_methods_speak_the_same_language(served: House) -> None:
    missing = served.http.post("/v1/nothing", content=b"{}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = served.http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_an_error_is_bounded_and_shows_no_places(served: House) -> None:
    message = refused(served, COMPLETIONS, {"prompt": "x", "model": "/srv/models/secret/llama" + "x" * 5000})[3]
    assert len(message) <= 1000
    assert "/srv/models" not in message


def test_huge_headers_are_refused(served: House) -> None:
    response = served.http.get("/version", headers={"x-junk": "x" * 70_000})
    assert response.status_code in (400, 431)
    assert served.http.get("/version").is_success


def test_refusals_disturb_nobody(served: House) -> None:
    """Health and refusals answer while a stream waits for its next token, and the stream is whole."""
    served.script = says("the quick brown fox " * 4)
    served.engine.hold()
    served.engine.release(1)
    with served.http.stream("POST", COMPLETIONS, content=json.dumps({"prompt": "say", "stream": True})) as stream:
        lines = stream.iter_lines()
        next(lines)
        for field, value, status, *_ in COMPLETION_FAULTS[:20]:
            body = json.dumps({"prompt": "x", field: value})
            assert served.http.post(COMPLETIONS, content=body, headers=HEADERS).status_code == status
        assert served.http.get("/health").status_code == 200
        served.engine.release()
        assert sum(line.startswith("data: {") for line in lines) == len(ids("the quick brown fox " * 4)) - 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_a_whole_number_beyond_every_float_is_refused_by_name(served: House, name: str) -> None:
    body = b'{"prompt": "x", "%b": 1%b}' % (name.encode(), b"0" * 400)
    response = served.http.post("/v1/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xed\xa0\x80"}', '{"prompt": "\ud800"}'.encode("utf-16", "surrogatepass"),
             '{"prompt": "\ud800"}'.encode("utf-16-le", "surrogatepass")]
)  # fmt: skip
def test_half_a_surrogate_pair_in_bytes_is_refused_too(served: House, body: bytes) -> None:
    response = served.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "surrogate pair" in response.json()["error"]["message"]
