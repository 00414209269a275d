"""What a JSON schema allows is what its grammar allows, keyword by keyword; the rest is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferengine.errors import InvalidRequest
from inferengine.structured_output.build import translate
from inferengine.structured_output.spec import GrammarSpec

BYTES = LLTokenizer("byte")
LETTERS = {"enum": ["a", "b", "c"]}
CARD = {"properties": {"card": {"type": "string"}, "address": {"type": "string"}}}
TREE = {
    "$id": "https://example.com/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}


def allows(schema: Any, value: Any) -> bool:
    matcher = LLMatcher(BYTES, translate(GrammarSpec("json_schema", json.dumps(schema))).grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = list((value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))).encode())
    return bool(matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting())


def compile_error(schema: Any) -> str:
    matcher = LLMatcher(BYTES, translate(GrammarSpec("json_schema", json.dumps(schema))).grammar, log_level=0)
    assert matcher.is_error()
    return str(matcher.get_error())


def refusal(spec: GrammarSpec) -> str:
    with pytest.raises(InvalidRequest) as caught:
        translate(spec)
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"not": {"type": "string"}}, [1, None, [], {"a": 1}], ['"a"']),
        ({"type": "string", "not": {"pattern": "^a"}}, ['"b"', '""', '"ba"'], ['"a"', '"ab"', '"\\u0061"']),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, {"b": 1, "a": 2}]),
        ({"not": {"enum": [1, "a", None, [1]]}}, [2, '"b"', [2], [1, 1]], [1, '"a"', None, [1]]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, '"a"'], [3, 1.5]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        (
            {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, "else": False},
            [{"a": 1, "b": 2}],
            [{"a": 1}, {"a": 2, "b": 2}, {}],
        ),
        ({"contains": {"type": "integer"}, "maxContains": 2}, [[1], ["a", 1, 2]], [[], ["a"], [1, 2, 3]]),
        ({"contains": {"const": 1}, "minContains": 2, "maxItems": 3}, [[1, 1], [1, 0, 1]], [[1], [1, 0, 0, 1]]),
        ({"items": LETTERS, "uniqueItems": True}, [[], ["b", "a"], ["c", "a", "b"]], [["a", "a"], ["b", "a", "b"]]),
        ({"items": LETTERS, "uniqueItems": True, "minItems": 2, "maxItems": 2}, [["a", "c"]], [["a"], ["a", "b", "c"]]),
        ({"propertyNames": {"pattern": "^x"}}, [{}, {"x": 1, "xy": 2}], [{"y": 1}, {"x": 1, "a": 2}]),
        ({"dependentRequired": {"card": ["address"]}, **CARD}, [{}, {"address": "b"}], [{"card": "a"}]),
        (
            {"dependentSchemas": {"card": {"required": ["address"]}}, **CARD},
            [{"card": "a", "address": "b"}],
            [{"card": "a"}],
        ),
        (
            {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}},
            [{"ab": 7, "a": 1}],
            [{"ab": 1}, {"a": "x"}],
        ),
        ({"minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "b": 2, "c": 3}]),
        (
            {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
            [{}, {"a": 1}],
            [{"b": 1}, {"a": 1, "b": 1}],
        ),
        (
            {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {}], "unevaluatedProperties": False},
            [{}, {"a": 1}],
            [{"a": 2}],
        ),
        ({"prefixItems": [True], "contains": {"const": 1}, "unevaluatedItems": False}, [[2, 1], [1]], [[2], [1, 2]]),
        (
            {"$ref": "w#one", "$id": "https://a.com/", "$defs": {"w": {"$id": "w", "$anchor": "one", "const": 1}}},
            [1],
            [2],
        ),
        (
            {**TREE, "$id": "https://example.com/strict", "$ref": "tree", "required": ["data"], "$defs": {"t": TREE}},
            [{"data": 1, "children": [{"data": 2}]}],
            [{"data": 1, "children": [{}]}],
        ),
        ({"const": {"a": [1, None], "b": "x"}}, [{"a": [1, None], "b": "x"}], [{"a": [1, None]}, {"a": [1], "b": "x"}]),
        ({"type": "string", "format": "color"}, ['"anything"'], []),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"today"']),
        ({"minimum": 1.5, "exclusiveMaximum": 1e25}, [1.5, 2, 9.99, '"a"'], [1.49, -2, 1e25]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.001, 0.5], ["0", "-0", "0.0", 0.51]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, [1.01, 1.49], ["1", "1.0", 1.5]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.01], ["-0", "0", "-0.0", -0.51]),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.5], ["0", 0.6]),
        ({"additionalProperties": False, "properties": {"a": {}}}, [{"a": 1}], ['{"\\u0061":1,"a":2}', {"b": 1}]),
        (True, [1, {"a": []}], []),
    ],
)  # fmt: skip
def test_a_keyword_holds(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not allows(schema, value)] == []
    assert [value for value in wrong if allows(schema, value)] == []


ALGEBRA = {"oneOf": [True]}  # has a schema written by the algebra, which allows the same


@pytest.mark.parametrize("beside", [{}, ALGEBRA], ids=["as it is", "by the algebra"])
@pytest.mark.parametrize(
    ("kind", "counts", "values"),
    [
        (kind, {f"min{of}": least, f"max{of}": most}, values)
        for kind, of, values in (
            ("string", "Length", ['""', '"abc"', '"abcde"', '"abcdef"']),
            ("array", "Items", [[], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]),
        )
        for least, most in ((5, 3), (1, 0), (5, 0))
    ],
)
def test_more_at_least_than_at_most_is_no_value(
    kind: str, counts: dict[str, int], values: list[Any], beside: dict[str, Any]
) -> None:
    nothing = {"type": kind, **counts, **beside}
    for schema in (
        {"anyOf": [nothing, {"type": "integer"}]},
        {**counts, **beside},
        {"not": {"not": {"anyOf": [nothing, {"type": "integer"}]}}},
    ):
        assert [value for value in values if allows(schema, value)] == [], schema
        assert allows(schema, 5), schema
    assert [value for value in [*values, 5] if not allows({"not": nothing}, value)] == []
    inside = {"additionalProperties": nothing, "items": nothing, **beside}
    texts = [value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for value in values]
    assert [value for value in ("{}", "[]") if not allows(inside, value)] == []
    assert [text for text in texts if allows(inside, f"[{text}]") or allows(inside, f'{{"a":{text}}}')] == []
    message = refusal(GrammarSpec("json_schema", json.dumps(nothing))) if beside else compile_error(nothing)
    assert "no value can match" in message or "unsatisfiable" in message.lower()


@pytest.mark.parametrize("beside", [{}, ALGEBRA], ids=["as it is", "by the algebra"])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "maxLength": 3}, ['""', '"a"', '"abc"'], ['"abcd"', 5]),
        ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
        ({"maxLength": 2}, ['""', '"ab"', 5, [1], None], ['"abc"']),
        ({"type": "string", "minLength": 2, "maxLength": 2}, ['"ab"'], ['"a"', '"abc"']),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"maxItems": 2}, [[], [1, 2], '"abc"'], [[1, 2, 3]]),
    ],
)
def test_a_count_alone_holds(schema: Any, right: list[Any], wrong: list[Any], beside: dict[str, Any]) -> None:
    assert [value for value in right if not allows({**schema, **beside}, value)] == []
    assert [value for value in wrong if allows({**schema, **beside}, value)] == []


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": "^(a{5,3}|b)$"})),
        GrammarSpec("lark", 'root ::= "a"{5,3} | "b"'),
    ],
)
def test_a_repeat_that_ends_before_it_begins_is_refused_by_its_text(spec: GrammarSpec) -> None:
    assert "{5,3}" in refusal(spec)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems", "enum"]),
        ({"$ref": "https://example.com/other"}, ["$ref", "$defs"]),
        ({"$ref": "#word"}, ["$ref", "no such $anchor"]),
        ({"$ref": "#"}, ["$ref", "put one between"]),
        ({"minProperties": 2}, ["minProperties", "name them"]),
        ({"pattern": "^(?=a).*$"}, ["(?=", "lookaround", "allOf"]),
        ({"pattern": r"\bword\b"}, [r"\b", "[^A-Za-z0-9_]"]),
        ({"pattern": r"(a)\1"}, ["back reference", "alternative"]),
        ({"type": "string", "const": 1}, ["contradict"]),
        ({"type": "integer", "not": {"multipleOf": 3}}, ["multipleOf", "enum"]),
        ({"type": "text"}, ["type must be one of"]),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_the_remedy(schema: Any, said: list[str]) -> None:
    message = refusal(GrammarSpec("json_schema", json.dumps({**schema, "oneOf": [True]})))
    assert [words for words in said if words not in message] == []


@pytest.mark.parametrize("expression", ["a(?=b)", "(?<!x)y", r"\bword", r"(a)\1"])
def test_an_expression_with_lookaround_is_refused_with_what_to_write(expression: str) -> None:
    assert "not supported: write" in refusal(GrammarSpec("regex", expression))


def test_a_class_may_have_a_backspace_and_an_escaped_backslash_may_stand_before_b() -> None:
    assert translate(GrammarSpec("regex", r"[\bx]\\b"))


def test_a_tool_that_cannot_be_held_to_is_any_object_and_is_named() -> None:
    tools = [{"type": "object", "properties": {"a": {"$ref": "#/x"}}, "x-tool": "f"}, {"oneOf": [True], "x-tool": "g"}]
    source = "start: a | b\n" + "".join(
        f"{name}: %json {json.dumps(tool)}\n" for name, tool in zip("ab", tools, strict=True)
    )
    translation = translate(GrammarSpec("lark", source))
    assert [note.split(":")[0] for note in translation.notes] == ["tool f"]
    matcher = LLMatcher(BYTES, translation.grammar, log_level=0)
    assert matcher.try_consume_tokens(list(b'{"z": 1}')) == 8


def test_alternatives_that_multiply_are_refused_and_not_worked_out() -> None:
    schema = {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(8)]} for n in range(8)], "not": {}}
    message = refusal(GrammarSpec("json_schema", json.dumps({**schema, "not": {"type": "null"}})))
    assert "alternatives" in message
