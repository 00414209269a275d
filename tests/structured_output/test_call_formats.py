"""The grammar of tool calls in every format: what it allows is parsed as calls that match their schemas."""

from __future__ import annotations

import json

import jsonschema
import pytest

from inferengine.structured_output.spec import GrammarSpec
from inferengine.text.output_parser import FORMATS, Function, MessageReader, calls_grammar, strings_of
from tests.structured_output.builders import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F/K"]},
        "days": {"$ref": "#/$defs/n"},
        "exact": {"type": "boolean"},
        "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
}
OPTIONAL = {**SCHEMA, "required": []}
FUNCTIONS = [Function("weather", SCHEMA), Function("maybe", OPTIONAL), Function("now", {"type": "object"})]
CODE = {"type": "object", "properties": {"text": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["text", "line"]}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary("byte_level")


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_with_random_weights_makes_calls_that_match_their_schemas(name: str, vocabulary: Vocabulary) -> None:
    functions = [function for function in FUNCTIONS if function.parameters.get("properties")]
    if "{parameters}" in FORMATS[name].call:
        functions = FUNCTIONS
    source = calls_grammar(FORMATS[name], functions, parallel=True, special_id=lambda text: None)
    called = set()
    for seed in range(6):
        text = vocabulary.generate(GrammarSpec("lark", source), seed)
        message = MessageReader(None, FORMATS[name].make_parser(strings_of(functions))).read(text)
        assert message.calls, text
        assert not message.content, text
        for function, arguments in message.calls:
            called.add(function)
            jsonschema.validate(
                json.loads(arguments), next(one.parameters for one in functions if one.name == function)
            )
    assert len(called) > 1


ODD = ("from", "class", "my-key", "$ref", "2d", "first name", "it's", 'a "b"', "x=y", "x>", "(", "né\\", "{value}", "*")


def test_arguments_of_any_name_are_made_as_they_are_parsed(vocabulary: Vocabulary) -> None:
    """A list of Python calls names its arguments: some of these are no names there."""
    for names in (ODD, *((name,) for name in ODD)):
        for required in ([], list(names)):
            schema = {
                "type": "object",
                "properties": {name: {"enum": [name, 5, None]} for name in names},
                "required": required,
                "additionalProperties": False,
            }
            functions = [Function("f", schema)]
            source = calls_grammar(FORMATS["pythonic"], functions, parallel=False, special_id=lambda text: None)
            text = vocabulary.generate(GrammarSpec("lark", source), 1)
            message = MessageReader(None, FORMATS["pythonic"].make_parser({})).read(text)
            assert [name for name, _ in message.calls] == ["f"], text
            jsonschema.validate(json.loads(message.calls[0][1]), schema)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n{}\n</parameter>\n<parameter=line>\n7\n"
                        "</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>line</arg_key>\n"
                  "<arg_value>7</arg_value>\n</tool_call>"),
    ],
)  # fmt: skip
def test_a_bare_string_may_hold_any_text(name: str, text: str, vocabulary: Vocabulary) -> None:
    code = '<p class="a">\n  x << 1 </p>\n</parameter'
    functions = [Function("write", CODE)]
    source = calls_grammar(FORMATS[name], functions, parallel=False, special_id=lambda text: None)
    matcher = vocabulary.compiler.compile(GrammarSpec("lark", source))
    written = text.replace("{}", code)
    assert all(matcher.accept(token) for token in vocabulary.fast.encode(written, add_special_tokens=False).ids)
    assert matcher.is_terminated() or matcher.accept(vocabulary.eos)
    message = MessageReader(None, FORMATS[name].make_parser(strings_of(functions))).read(written)
    ((function, arguments),) = message.calls
    assert (function, json.loads(arguments)) == ("write", {"text": code, "line": 7})
