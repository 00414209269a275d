"""/openapi.json and the field table behind it are true: both sides of every range, and whatever a schema can make."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontends.http.app import ROUTES
from frontends.http.bodies import REFUSED, SAMPLING, STRUCTURE
from frontends.http.openapi import (
    ANSWERS,
    CLOSED,
    EVENTS,
    EXAMPLES,
    MESSAGE_EVENTS,
    RESPONSE_EVENTS,
    Field,
    bodies,
    body_schema,
    describe,
)
from inferengine.config import LimitsConfig
from tests.frontends.http.builders import HEADERS, House, says
from tests.frontends.http.test_tools import CITY, THOUGHT, TWO_CALLS, writes

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
TABLES = bodies(LimitsConfig())
GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "say"},
    "/v1/rerank": {"query": "say", "documents": ["one", "two"]},
    "/v1/score": {"text_1": "say", "text_2": ["one", "two"]},
    "/v1/completions": {"prompt": "say"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/conversations": {},
    "/v1/messages": {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/generate": {"prompt": "say"},
    "/generate": {"prompt": "say", "max_tokens": 8},
    "/infer/v1/completions": {"model": "tiny", "prompt": "say"},
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "say", "stream": False},
    "/api/embed": {"input": "say"},
    "/api/embeddings": {"prompt": "say"},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny", "stream": False},
}
# What a field needs beside it to be used at all.
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "n": {"temperature": 1.0},
    "stream_options": {"stream": True},
    "min_tokens": {"max_tokens": 300},
}


def beside(path: str, name: str) -> dict[str, Any]:
    """Return what a field needs beside it. A completion of no tokens at all is for its echo."""
    return {"echo": True} if (path, name) == ("/v1/completions", "max_tokens") else WITH.get(name, {})


# Values that a field refuses besides those of the wrong type and those just outside its range.
REFUSALS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": ""}, {"prompt": []}, {"prompt": ["say"] * 257}],
    "n": [{"n": 2, "temperature": 0}],
    "min_tokens": [{"min_tokens": 9, "max_tokens": 8}],
    "stop": [{"stop": ["a"] * 17}, {"stop": ["a" * 257]}, {"stop": [""]}],
    "stop_token_ids": [{"stop_token_ids": [10**6]}, {"stop_token_ids": [5] * 1025}],
    "logit_bias": [{"logit_bias": {"5": 101}}, {"logit_bias": {str(10**6): 1}}, {"logit_bias": {"the": 1}}],
    "allowed_token_ids": [{"allowed_token_ids": [-1]}],
    "bad_words": [{"bad_words": ["a"] * 129}],
    "stream_options": [{"stream_options": {"include_usage": True}, "stream": False}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 0}],
    "prompt_logprobs": [{"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 1, "detached": True}],
    "cache_salt": [{"cache_salt": "a" * 1025}],
    "prompt_cache_key": [{"prompt_cache_key": "a" * 1025}],
    "request_id": [{"request_id": "a" * 129}],
    "guided_regex": [{"guided_regex": "a+", "guided_choice": ["a"]}],
    "top_logprobs": [{"top_logprobs": 3}],
    "tool_choice": [{"tool_choice": "required"}],
    "tools": [{"tools": [{"type": "function", "function": {"name": "a b"}}]}],
}


def edges(field: Field) -> list[tuple[Any, bool]]:
    """Return the values at the ends of a range, and just outside, with whether they may be sent."""
    schema = field.schema
    if schema.get("type") not in ("number", "integer"):
        return []
    step = 1 if schema["type"] == "integer" else 0.01
    found: list[tuple[Any, bool]] = []
    if "minimum" in schema:
        found += [(schema["minimum"], True), (schema["minimum"] - step, False)]
    if "exclusiveMinimum" in schema:
        found += [(schema["exclusiveMinimum"], False), (schema["exclusiveMinimum"] + step, True)]
    if "maximum" in schema:
        found += [(schema["maximum"], True), (schema["maximum"] + step, False)]
    return [(value, good) for value, good in found if not good or abs(value) < 2**62 or field.name == "seed"]


def at_fault(response: httpx.Response) -> str:
    """Return the field that an error is about, or its message; Ollama's errors are a message."""
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error.get("param") or error["message"])


EDGES = [
    (path, field.name, value, good)
    for path, fields in TABLES.items()
    for field in fields
    for value, good in edges(field)
]


@pytest.mark.parametrize(("path", "name", "value", "good"), EDGES)
def test_both_sides_of_every_range(served: House, path: str, name: str, value: Any, good: bool) -> None:
    response = served.post(path, **{**GOOD[path], **beside(path, name), name: value})
    if good:
        assert response.status_code == 200, response.text
        return
    assert response.status_code in (400, 422), response.text
    assert name in at_fault(response)


@pytest.mark.parametrize(("path", "name"), [(path, f.name) for path, fields in TABLES.items() for f in fields])
def test_a_value_of_the_wrong_type_is_refused_by_name(served: House, path: str, name: str) -> None:
    """Something that no schema takes for this field."""
    schema = next(field.schema for field in TABLES[path] if field.name == name)
    wrong = next(value for value in ([[{}]], {"no": {"such": 1}}, 7.5, True) if not _fits(value, schema))
    response = served.post(path, **{**GOOD[path], **WITH.get(name, {}), name: wrong})
    assert response.status_code in (400, 404, 422), response.text
    assert name in at_fault(response)


@functools.cache
def validator(path: str) -> jsonschema.Draft202012Validator:
    """Return the validator of the bodies of a route."""
    return jsonschema.Draft202012Validator(body_schema(TABLES[path]))


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_the_document_is_openapi(served: House) -> None:
    document = served.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    paths = {re.sub(r":\w+}", "}", route.path) for route in ROUTES if route.include_in_schema}
    assert set(document["paths"]) == paths
    identifiers = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(identifiers)) == len(identifiers)
    for path in document["paths"].values():
        for operation in path.values():
            for content in operation.get("requestBody", {"content": {}})["content"].values():
                schema = content["schema"]
                jsonschema.Draft202012Validator.check_schema(schema)
    for path, body in GOOD.items():
        validator(path).validate(body)


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_example_of_a_route_is_answered(served: House, path: str) -> None:
    body = {**EXAMPLES[path], **({"model": "tiny"} if "model" in EXAMPLES[path] else {})}
    assert served.http.post(path, json=body).status_code == 200


def test_every_error_has_the_published_shape(served: House) -> None:
    schema = describe([], LimitsConfig())["components"]["schemas"]["Error"]
    for response in (served.post("/v1/completions"), served.post("/v1/nothing"), served.http.get("/v1/completions")):
        assert not response.is_success
        jsonschema.validate(response.json(), schema)


def answer_validator(document: dict[str, Any], method: str, path: str, kind: str) -> jsonschema.Draft202012Validator:
    """Return the validator of what a route answers with, by the document."""
    schema = document["paths"][path][method.lower()]["responses"]["200"]["content"][kind]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize("path", [path for method, path in ANSWERS if method == "POST" and path in GOOD])
def test_an_answer_is_what_the_document_says(served: House, path: str) -> None:
    document = served.http.get("/openapi.json").json()
    response = served.post(path, **GOOD[path])
    assert response.status_code == 200, response.text
    answer_validator(document, "POST", path, "application/json").validate(response.json())


def test_the_models_are_what_the_document_says(served: House) -> None:
    document = served.http.get("/openapi.json").json()
    models = served.http.get("/v1/models").json()
    assert models["data"]
    answer_validator(document, "GET", "/v1/models", "application/json").validate(models)
    answer_validator(document, "GET", "/v1/models/{model}", "application/json").validate(models["data"][0])


# Streams that between them have every event, and every field of one: what is written, and the request's fields.
WEATHER: dict[str, Any] = {"name": "weather", "parameters": CITY}
STREAMS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "/v1/completions": [
        (says("the fox", reason="length"), {"stream_options": {"include_usage": True}}),
        (writes("the fox"), {"logprobs": 0, "n": 2, "temperature": 1.0, "return_token_ids": True}),
        (
            says("the fox", reason="abort", detail=["cancelled", "ended"]),
            {"stream_options": {"continuous_usage_stats": True}},
        ),
    ],
    "/v1/chat/completions": [
        (says("the fox", reason="length"), {"stream_options": {"include_usage": True}}),
        (writes(THOUGHT), {"logprobs": True, "n": 2, "temperature": 1.0, "return_token_ids": True}),
        (writes(TWO_CALLS), {"tools": [{"type": "function", "function": WEATHER}]}),
        (
            says("the fox", reason="abort", detail=["cancelled", "ended"]),
            {"stream_options": {"continuous_usage_stats": True}},
        ),
    ],
    "/v1/responses": [
        (says("the fox", reason="length"), {}),
        (writes(THOUGHT), {"include": ["message.output_text.logprobs"], "top_logprobs": 0}),
        (writes(TWO_CALLS), {"tools": [{"type": "function", **WEATHER}]}),
        (writes(TWO_CALLS), {"tools": [{"type": "custom", "name": "weather"}]}),
        (says("the fox", reason="abort", detail=["cancelled", "ended"]), {}),
        (says("the fox", reason="error", detail=["engine_error", "the step failed"]), {}),
    ],
    "/v1/messages": [
        (says("the fox", reason="length"), {}),
        (writes(THOUGHT), {}),
        (writes(TWO_CALLS), {"tools": [{"name": "weather", "input_schema": CITY}]}),
        (says("the fox", reason="abort", detail=["cancelled", "ended"]), {}),
        (says("the fox", reason="error", detail=["engine_error", "the step failed"]), {}),
    ],
}
TYPES: dict[str, set[str]] = {"/v1/responses": set(RESPONSE_EVENTS), "/v1/messages": set(MESSAGE_EVENTS)}


def test_every_streamed_api_has_its_events_described() -> None:
    assert {path for _, path in EVENTS} == set(STREAMS)


@pytest.mark.parametrize("path", STREAMS)
def test_every_event_is_what_the_document_says(thinker: House, path: str) -> None:
    document = thinker.http.get("/openapi.json").json()
    event_schema = answer_validator(document, "POST", path, "text/event-stream")
    types = set()
    for script, body in STREAMS[path]:
        thinker.script = script
        text = thinker.post(path, **{**GOOD[path], **body, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert events
        for event in events:
            event_schema.validate(event)
            types.add(event.get("type"))
    assert types == TYPES.get(path, {None})


def test_the_document_names_how_keys_are_shown(served: House) -> None:
    document = served.http.get("/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert {} in document["security"]


def test_the_table_has_every_field_that_is_read() -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        names = {field.name for field in TABLES[path]}
        assert {*SAMPLING, *STRUCTURE} <= names
        assert not names & REFUSED.keys()
    for fields in TABLES.values():
        names = [field.name for field in fields]
        assert len(set(names)) == len(names)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return the values that a schema of the table takes."""
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)) | st.integers(
                schema.get("minimum", 0), min(schema.get("maximum", 9), 9)
            )
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum", -1e6)),
                schema.get("maximum", 1e6),
                exclude_min="exclusiveMinimum" in schema,
            )
        case "string":
            if "pattern" in schema:
                return st.sampled_from(["f", "a_b", "x.y-z"])
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 12), 12))
        case "array":
            most = min(schema.get("maxItems", 3), 3)
            return st.lists(
                values(schema["items"]),
                min_size=schema.get("minItems", 0),
                max_size=max(most, schema.get("minItems", 0)),
            )
    required = schema.get("required", [])
    properties = {name: values(inner) for name, inner in schema.get("properties", {}).items()}
    if properties:
        return st.fixed_dictionaries(
            {name: properties[name] for name in required},
            optional={name: inner for name, inner in properties.items() if name not in required},
        )
    inner = schema.get("additionalProperties", {"type": "boolean"})
    return st.dictionaries(st.sampled_from(["a", "b", "1", "22"]), values(inner), max_size=2)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


HUNT = int(os.environ.get("INFERENGINE_HUNT", 0))  # examples of a hunt, drawn anew each time; docs/testing.md
SAMPLED = settings(
    max_examples=HUNT or 100,
    derandomize=not HUNT,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SAMPLED
@given(data=st.data())
def test_what_the_schema_takes_is_never_the_servers_fault(served: House, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(TABLES)))
    chosen = data.draw(st.lists(st.sampled_from(TABLES[path]), max_size=5, unique_by=lambda field: field.name))
    body = {**GOOD[path], **{field.name: data.draw(values(field.schema)) for field in chosen}}
    validator(path).validate(body)
    response = served.http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404, 422, 429), response.text


@SAMPLED
@given(data=st.data())
def test_what_the_schema_refuses_is_refused(served: House, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(TABLES)))
    field = data.draw(st.sampled_from(TABLES[path]))
    value = data.draw(ANYTHING)
    body = {**GOOD[path], **WITH.get(field.name, {}), field.name: value}
    response = served.http.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404, 422, 429), response.text
    if not validator(path).is_valid(body):
        assert response.status_code != 200, (path, field.name, value)


# Where a false value was once taken for a missing one, and a text for a list of texts.
WRONG: list[Any] = [
    *(False, True, 0, 1, 0.0, 1.5, -1, "", "0", "a", [], {}),
    *([item] for item in (0, "", "a", None, [], {}, True)),
    *({"a": 0}, {"a": "b"}, {"type": 0}, {"type": "a"}),
]


@pytest.mark.parametrize("path", sorted(TABLES))
def test_no_small_value_of_a_wrong_type_is_taken(served: House, path: str) -> None:
    taken = []
    connection = http.client.HTTPConnection(served.front.url.removeprefix("http://"))  # httpx takes thrice as long
    with contextlib.closing(connection):
        for field in TABLES[path]:
            for value in WRONG:
                body = {**GOOD[path], **WITH.get(field.name, {}), field.name: value}
                if validator(path).is_valid(body):
                    continue
                connection.request("POST", path, json.dumps(body), HEADERS)
                with connection.getresponse() as response:
                    response.read()
                if response.status == 200:
                    taken.append((field.name, value))
    assert taken == []


def test_a_closed_route_refuses_what_it_does_not_know(served: House) -> None:
    for path in CLOSED:
        assert served.post(path, **GOOD[path], surprise=1).status_code == 422


def rows() -> dict[str, Field]:
    found: dict[str, Field] = {}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for field in TABLES[path]:
            found.setdefault(field.name, field)
    return found


def test_the_page_and_the_browser_clients_types_are_up_to_date() -> None:
    """Definition, range and refusals of each field, as scripts/parameter_reference writes them."""
    command = [sys.executable, str(ROOT / "scripts" / "parameter_reference"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", rows())
def test_the_page_names_a_test_of_every_field(name: str) -> None:
    line = next((line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")), "")
    tests = re.findall(r"`(\w+)\.py: (\w+)`", line)
    assert tests, "no test is named"
    for file, function in tests:
        sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"{file}.py")]
        assert any(f"def {function}(" in source for source in sources), (file, function)


def refusals(path: str, field: Field) -> list[dict[str, Any]]:
    """Return bodies that are refused because of a field."""
    wrong = next(value for value in ([[{}]], {"no": {"such": 1}}, 7.5, True) if not _fits(value, field.schema))
    values = [value for value, good in edges(field) if not good]
    bodies = [{**WITH.get(field.name, {}), field.name: value} for value in [*values, wrong]]
    return [{**GOOD[path], **body} for body in [*bodies, *REFUSALS.get(field.name, [])]]


@pytest.mark.parametrize("name", rows())
def test_the_page_has_the_words_of_every_refusal(served: House, name: str) -> None:
    """What the response's message says behind the field's name, with N and V for the numbers of tokens."""
    path = next(path for path in ("/v1/completions", "/v1/chat/completions") if name in {f.name for f in TABLES[path]})
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    for body in refusals(path, rows()[name]):
        response = served.post(path, **body)
        assert response.status_code in (400, 404), (body, response.text)
        assert f"`{words(response.json()['error']['message'])}`" in line, body


def words(message: str) -> str:
    said = message.partition(": ")[2] or message
    return re.sub(r"token id -?\d+ is outside the vocabulary of \d+", "token id N is outside the vocabulary of V", said)
