"""Whatever the model draws, the output validates: 100 %, over byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from inferengine.errors import InvalidRequest
from inferengine.structured_output.spec import read_grammar
from tests.structured_output.builders import VOCABULARIES, Vocabulary

SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested arrays": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "array", "maxItems": 2, "items": {"enum": ["é", "你好", "a b", "line\nbreak", 'quo"te']}},
    },
    "refs": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "pattern": {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "ok": {"type": "boolean"}},
        "required": ["code", "ok"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": {"kind": "🎉", "n": 1}}]},
    "unicode keys": {
        "type": "object",
        "properties": {"größe": {"type": "integer", "maximum": 9, "minimum": 0}, "名": {"enum": ["一", "二"]}},
        "required": ["größe", "名"],
        "additionalProperties": False,
    },
}
EXPRESSIONS = [
    r"[a-z]{1,5}@[a-z]{1,5}\.(com|de)",
    "(true|false|ja nein|multi\nline)",
    r"\d{3} \d{4}",
    "[äöü]+ß?",
    "(ab ?){2,4}",
]


@pytest.fixture(params=sorted(VOCABULARIES), scope="module")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_validates_against_its_schema(vocabulary: Vocabulary, name: str) -> None:
    spec = read_grammar({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMAS[name]}}})
    assert spec is not None
    outputs = [vocabulary.generate(spec, seed) for seed in range(15)]
    for text in outputs:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert len(set(outputs)) > 1


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_text_matches_its_expression(vocabulary: Vocabulary, expression: str) -> None:
    spec = read_grammar({"guided_regex": expression})
    assert spec is not None
    for seed in range(15):
        assert re.fullmatch(expression, vocabulary.generate(spec, seed))


def test_any_json_object_parses(vocabulary: Vocabulary) -> None:
    spec = read_grammar({"response_format": {"type": "json_object"}})
    assert spec is not None
    for seed in range(15):
        assert isinstance(json.loads(vocabulary.generate(spec, seed)), dict)


def test_a_choice_is_one_of_the_choices(vocabulary: Vocabulary) -> None:
    choices = ["yes", "no", "it depends", 'say "no"', "back\\slash", "über\nzwei"]
    spec = read_grammar({"structured_outputs": {"choice": choices}})
    assert spec is not None
    seen = {vocabulary.generate(spec, seed) for seed in range(60)}
    assert seen <= set(choices)
    assert len(seen) > 3


def test_a_grammar_of_ones_own(vocabulary: Vocabulary) -> None:
    lark = 'start: sum "=" number\nsum: number ("+" number){1,2}\nnumber: /[0-9]{1,2}/\n'
    spec = read_grammar({"guided_grammar": lark})
    assert spec is not None
    for seed in range(15):
        assert re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,2}=\d{1,2}", vocabulary.generate(spec, seed))


def test_tags_hold_their_schema_within_free_text(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tag = {"begin": "(call)", "schema": schema, "end": "(end)"}
    spec = read_grammar({"structured_outputs": {"structural_tag": {"structures": [tag], "triggers": ["(call)"]}}})
    assert spec is not None
    matcher = vocabulary.compiler.compile(spec)
    for token in vocabulary.fast.encode("the (call)", add_special_tokens=False).ids:
        assert matcher.accept(token)
    assert vocabulary.fast.decode(matcher.forced()).startswith("{")


@pytest.mark.parametrize(
    ("asked", "forbidden"),
    [({}, r"\s{2}|[^,:]\s"), ({"json_whitespace": "any"}, r"\s{13}"), ({"disable_any_whitespace": True}, r"\s")],
)
def test_json_is_compact_unless_the_request_asks_for_any_space(
    vocabulary: Vocabulary, asked: dict[str, Any], forbidden: str
) -> None:
    more = {name: asked[name] for name in asked if name == "json_whitespace"}
    fields = {name: asked[name] for name in asked if name != "json_whitespace"}
    for schema in (SCHEMAS["flat"], {**SCHEMAS["flat"], "not": {"type": "null"}}):
        spec = read_grammar({"structured_outputs": {"json": schema, **fields}, **more})
        assert spec is not None
        texts = [vocabulary.generate(spec, seed) for seed in range(4)]
        outside = [re.sub(r'"([^"\\]|\\.)*"', '""', text) for text in texts]
        assert not any(re.search(forbidden, text) for text in outside)
        assert any(re.search(r"\s", text) for text in outside) or "disable_any_whitespace" in asked


@pytest.mark.parametrize("spec", [{"guided_json": {"type": "string", "minLength": 9}}, {"guided_regex": "b[a-f]{9}"}])
def test_an_end_that_is_a_letter_to_the_tokenizer_comes_at_the_end_alone(spec: dict[str, Any]) -> None:
    vocabulary = Vocabulary("byte_level", eos="a")
    read = read_grammar(spec)
    assert read is not None
    for seed in range(20):
        text = vocabulary.generate(read, seed)
        assert re.fullmatch("b[a-f]{9}", text) if "guided_regex" in spec else len(json.loads(text)) >= 9


def test_a_text_that_needs_such_a_letter_is_refused() -> None:
    read = read_grammar({"guided_regex": "[xy]bbcbb"})
    assert read is not None
    with pytest.raises(InvalidRequest, match="no text can match it"):
        Vocabulary("byte_level", eos="c").compiler.compile(read)
