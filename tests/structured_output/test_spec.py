"""The fields of a request that ask for structured output: what they are read as, and how they are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest
from inferengine.structured_output.spec import (
    MAX_NESTING,
    GrammarSpec,
    _nesting,
    grammar_field,
    grammar_from_list,
    grammar_to_list,
    read_grammar,
    validate_grammar,
)

SCHEMA = {"type": "object"}
LONE = "\ud800"  # half of a surrogate pair
SPELT = r'{"const": "\ud800"}'  # the same, as an escape inside of JSON text


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", "{}")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GrammarSpec("json_schema", json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": True}}, GrammarSpec("json_schema", "{}")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            GrammarSpec("json_schema", json.dumps(SCHEMA), ""),
        ),
        *(
            (
                {"response_format": idle, "guided_regex": "a+", "json_whitespace": "any"},
                GrammarSpec("regex", "a+", "any"),
            )
            for idle in ({}, {"type": "text"}, {"type": "text", "json_schema": None})
        ),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"guided_choice": ["yes", "no"]}, GrammarSpec("choice", '["yes", "no"]')),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            GrammarSpec("json_schema", json.dumps(SCHEMA), " ?"),
        ),
    ],
)
def test_every_spelling_is_read_as_one_spec(body: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert read_grammar(body) == spec


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "grammar"),
        ({"response_format": {"type": "text"}}, "grammar"),
        ({"json_whitespace": "any", "response_format": {"type": "text"}, "guided_regex": "a+"}, "guided_regex"),
        ({"json_whitespace": "any", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_whitespace_pattern": " ?", "guided_json": SCHEMA}, "guided_json"),
    ],
)
def test_the_field_of_a_grammar_is_the_one_that_asks_for_it(body: dict[str, Any], field: str) -> None:
    assert grammar_field(body) == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": SPELT}, "guided_json"),
        ({"guided_json": {"const": LONE}}, "guided_json"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {"structures": [{"begin": f"<{LONE}", "schema": {}}], "triggers": ["<"]}
                }
            },
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_what_cannot_be_read_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_grammar(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("yaml", "a"),
        GrammarSpec("regex", "a" * (LimitsConfig().max_grammar_bytes + 1)),
        GrammarSpec("regex", "a\0"),
        GrammarSpec("json_schema", "[" * (MAX_NESTING + 1)),
        GrammarSpec("json_schema", "{}", " " * 201),
        GrammarSpec("regex", LONE),
        GrammarSpec("json_schema", "{}", LONE),
    ],
)
def test_a_grammar_is_bounded_before_it_is_compiled(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_grammar(spec, LimitsConfig(), path="guided_regex")
    assert caught.value.field == "guided_regex"


def nesting(text: str) -> int:
    """Return the depth of brackets outside of strings, character by character."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "]]][",
        '"[[',
        '"\\"[[',
        '"\\\\"[[',
        '"\\',
        '[\\"]"[',
        '{"a": "]", "b": [{}]}',
        '"\n\\\n[" {',
        '""""[' * 3,
    ],
)
def test_brackets_count_outside_of_strings(text: str) -> None:
    assert _nesting(text) == nesting(text)


def test_nesting_of_random_texts_is_that_of_their_characters() -> None:
    draw = random.Random(5)
    pieces = ('"', "\\", '\\"', "[", "]", "{", "}", "a", "\n", '"x"', '"[{"', "\u2028", "\0", ":", ",", "é" * 40)
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 14)))
        assert _nesting(text) == nesting(text), text


@pytest.mark.parametrize("text", ['"', '\\"', '"\\', "[", '"a"', '"' + "\\" * 999_999, "é" * 999_999])
def test_nesting_of_a_long_text_takes_time_in_proportion(text: str) -> None:
    """A quadratic one would take hours."""
    text *= 1_000_000 // len(text)
    assert _nesting(text) == nesting(text)


@pytest.mark.parametrize("spec", [GrammarSpec("regex", "a+"), GrammarSpec("json_schema", "{}", " ?")])
def test_a_spec_travels_as_a_list(spec: GrammarSpec) -> None:
    assert grammar_from_list(grammar_to_list(spec)) == spec
