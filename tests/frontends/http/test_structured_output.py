"""Structured output over HTTP: what leaves is valid, what makes no sense is refused by name and disturbs nobody."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest

from tests.frontends.http.builders import House, events, text_of
from tests.frontends.http.embedded import Embedded

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Tell me of Ada in Paris."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "né 🎉"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
                        "required": ["city"], "additionalProperties": False}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
LONG = {"max_tokens": 300, "seed": 5}


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


def test_a_schema_holds_in_chat_and_completions(embedded: Embedded) -> None:
    chat = embedded.ask(CHAT, messages=HELLO, response_format=FORMAT, **LONG)["choices"][0]
    check(chat["message"]["content"])
    assert (chat["finish_reason"], chat["stop_reason"]) == ("stop", None)
    check(embedded.ask(COMPLETIONS, prompt="Ada", response_format=FORMAT, **LONG)["choices"][0]["text"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"json": PERSON}),
        ("structured_outputs", {"json": json.dumps(PERSON), "disable_any_whitespace": True}),
        ("guided_json", PERSON),
    ],
)
def test_the_other_names_of_a_schema(embedded: Embedded, field: str, value: Any) -> None:
    text = embedded.ask(COMPLETIONS, prompt="Ada", **{field: value}, **LONG)["choices"][0]["text"]
    check(text)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[0-9]{3}-[a-z é]{2,9}\n!"}}, r"[0-9]{3}-[a-z é]{2,9}\n!"),
        ({"guided_regex": r"(yes|no), (\d{2}\.){3}"}, r"(yes|no), (\d{2}\.){3}"),
        ({"structured_outputs": {"choice": ["red 🎈", "blue", "dark green"]}}, "red 🎈|blue|dark green"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, r"\(*(x\)*)?"),  # perhaps cut
        ({"guided_grammar": 'start: ("a" | "b" "c")~3'}, "(a|bc){3}"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
                        "triggers": ["<n>"],
                    }
                }
            },
            r"(?s:[^<]|<(?!n>)|<n>-?\d+</n>)*(<n>?.{0,60})?",
        ),
    ],
)
def test_expressions_choices_and_grammars_hold(embedded: Embedded, body: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        choice = embedded.ask(COMPLETIONS, prompt="Say", seed=seed, temperature=1.5, max_tokens=60, **body)["choices"][
            0
        ]
        assert re.fullmatch(pattern, choice["text"]), choice


def test_json_object_is_an_object(embedded: Embedded) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Ada"})):
        answer = embedded.ask(path, response_format={"type": "json_object"}, max_tokens=600, seed=2, **body)
        choice = answer["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text.lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_every_choice_has_a_grammar_of_its_own(embedded: Embedded) -> None:
    answer = embedded.ask(COMPLETIONS, prompt="Ada", response_format=FORMAT, n=4, temperature=1.2, **LONG)
    texts = [choice["text"] for choice in answer["choices"]]
    for text in texts:
        check(text)
    assert len(set(texts)) > 1


def test_a_stream_says_what_the_document_says(embedded: Embedded) -> None:
    body = {"messages": HELLO, "response_format": FORMAT, "temperature": 1.0, "n": 2, **LONG}
    whole = embedded.ask(CHAT, **body)["choices"]
    documents = embedded.stream(CHAT, **body)
    assert documents[-1] == "[DONE]"
    for index, choice in enumerate(whole):
        assert text_of(documents, index) == choice["message"]["content"]
        check(choice["message"]["content"])


def test_logprobs_tell_of_every_token_of_a_grammar(embedded: Embedded) -> None:
    choice = embedded.ask(COMPLETIONS, prompt="Ada", response_format=FORMAT, logprobs=2, return_token_ids=True, **LONG)[
        "choices"
    ][0]
    check(choice["text"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


# body of the request, the field that the error must name
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "(unclosed"}, "guided_regex"),
    ({"guided_regex": "(unclosed", "response_format": {"type": "text"}}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json"),
    ({"guided_json": json.loads("[" * 70 + "]" * 70)}, "guided_json"),
]


@pytest.mark.parametrize(("body", "field"), NONSENSE)
def test_nonsense_is_refused_by_name(embedded: Embedded, body: dict[str, Any], field: str) -> None:
    response = embedded.post(CHAT, messages=HELLO, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert error["message"]


def test_nonsense_disturbs_no_stream(embedded: Embedded) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    alone = embedded.stream(COMPLETIONS, **body)
    with embedded.http.stream("POST", COMPLETIONS, content=json.dumps(body)) as response:
        lines = response.iter_lines()
        next(lines)
        slowest = 0.0
        for nonsense, field in NONSENSE:
            started = time.monotonic()
            assert embedded.post(CHAT, messages=HELLO, **nonsense).json()["error"]["param"] == field
            slowest = max(slowest, time.monotonic() - started)
        rest = [line for line in lines if line.startswith("data: {")]
    assert slowest < 10.0  # milliseconds on a machine of one's own, once the compiler's process runs
    assert json.loads(rest[-1][6:])["choices"][0]["finish_reason"] == "length"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest)
    assert text_of(alone).endswith(text)


def ids_of(embedded: Embedded, text: str) -> list[int]:
    return list(embedded.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"])


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text can match it"),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
         "guided_json", "no text can match it"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar", "no text can match it"),
        ({"guided_choice": ["cat"], "bad_words": ["cat", "c", "ca"]}, "guided_choice", "bad_words leave no token"),
        ({"guided_regex": "x?", "bad_words": ["x"], "min_tokens": 2}, "guided_regex", "bad_words and min_tokens leave"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_have_no_output_is_refused_and_no_failure(
    embedded: Embedded, body: dict[str, Any], field: str, words: str, stream: bool
) -> None:
    """It was 500, with the words of a library or "not a number"."""
    response = embedded.post(COMPLETIONS, prompt="Once", max_tokens=20, stream=stream, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert words in error["message"]


def test_tokens_that_a_grammar_needs_and_the_request_does_not_allow(embedded: Embedded) -> None:
    allowed = ids_of(embedded, "a")
    response = embedded.post(COMPLETIONS, prompt="Once", guided_regex="[0-9]+", allowed_token_ids=allowed)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_regex")
    assert "the grammar and allowed_token_ids leave no token to begin with" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_comes_to_an_impasse_ends_with_the_fields_that_led_there(
    embedded: Embedded, stream: bool
) -> None:
    allowed = ids_of(embedded, "a")
    body = {"prompt": "Once", "guided_regex": "aaa[0-9]", "allowed_token_ids": allowed, "stream": stream}
    response = embedded.post(COMPLETIONS, **body)
    error = events(response.text)[-2]["error"] if stream else response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "guided_regex")
    assert "allowed_token_ids leave no token after 3 tokens of output" in error["message"]
    assert response.status_code == (200 if stream else 400)


def test_allowed_ids_that_are_all_bad_words_are_refused(embedded: Embedded) -> None:
    body = {"prompt": "Once", "bad_words": ["a"], "allowed_token_ids": ids_of(embedded, "a")}
    response = embedded.post(COMPLETIONS, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_hundreds_of_optional_properties_are_no_failure(embedded: Embedded) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(500)}}
    response = embedded.post(COMPLETIONS, prompt="Once", max_tokens=30, guided_json=schema)
    assert response.status_code == 200, response.text


def test_what_asks_for_nothing_is_nothing(served: House) -> None:
    for body in (
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"guided_json": None, "response_format": None},
    ):
        assert served.post(COMPLETIONS, prompt="say", **body).status_code == 200
        assert served.engine.submits[-1].grammar is None


def test_a_format_that_asks_for_nothing_stands_beside_one_that_does(served: House) -> None:
    for other in ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}):
        response = served.post(COMPLETIONS, prompt="say", response_format={"type": "text"}, **other)
        assert response.status_code == 200, response.text
        assert served.engine.submits[-1].grammar is not None
