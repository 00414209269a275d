"""Grammars in llama.cpp's and xgrammar's EBNF: what comes out matches, and what cannot be read is named by its line."""

from __future__ import annotations

import json
import re

import pytest

from inferengine.errors import InvalidRequest
from inferengine.structured_output.ebnf import is_ebnf, to_lark
from inferengine.structured_output.spec import GrammarSpec, read_grammar
from tests.structured_output.builders import Vocabulary

VLLM = """
    root ::= select_statement

    select_statement ::= "SELECT " column " from " table " where " condition

    column ::= "col_1 " | "col_2 "

    table ::= "table_1 " | "table_2 "

    condition ::= column "= " number

    number ::= "1 " | "2 "
"""  # of vLLM's page on structured outputs
JSON = r"""
root   ::= object   # llama.cpp's grammars/json.gbnf, shortened
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value){0,2} )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  ){0,9} "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]?)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def vocabulary(request) -> Vocabulary:
    return Vocabulary(request.param)


def outputs(vocabulary: Vocabulary, source: str, count: int = 5) -> list[str]:
    spec = read_grammar({"guided_grammar": source})
    assert spec is not None
    return [vocabulary.generate(spec, seed) for seed in range(count)]


def test_the_grammar_of_vllms_documentation(vocabulary):
    statement = re.compile(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ")
    for text in outputs(vocabulary, VLLM):
        assert statement.fullmatch(text)


def test_a_grammar_that_is_part_of_itself(vocabulary):
    for text in outputs(vocabulary, JSON):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ('root ::= "a" | ("b" | "c")+ "d"?', r"a|[bc]+d?"),
        ("root ::= [^a-z]{3}", r"[^a-z]{3}"),
        (r'root ::= "\"\\/\n\t\x41\u00e9\U0001F600" [\]\-^/é]{2}', r'"\\/\n\tAé😀[\]\-^/é]{2}'),
        ('root ::= "x" .{2} "y"', r"(?s)x.{2}y"),
        ("root ::= a-b 1x\na-b ::= [0-9]{2,3}\n1x ::= | \"!\"", r"[0-9]{2,3}!?"),
        ('root ::=\n  "a"\n  | "b" # or\n\n  | "c"', r"[abc]"),
        ('root ::= "" | "a"{0,2} "b"', r"|a{0,2}b"),
    ],
)  # fmt: skip
def test_each_operator_allows_what_it_allows_in_ebnf(vocabulary, source, expression):
    for text in outputs(vocabulary, source):
        assert re.fullmatch(expression, text)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('first ::= "a"', "there is no rule named root"),
        ("root ::= word", "line 1: there is no rule named word"),
        ('root ::= "a\nb ::= "c"', "line 1"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there are two rules named root"),
        ('root ::= ("a"', "line 1: 1 ( not closed"),
        ('root ::= "a")', "line 1: ) closes nothing"),
        ("root ::= *", "line 1: * has nothing before it"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "has no characters"),
        ('root ::= "\\q"', "is no escape"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= "a"{3,1}', "no number of repetitions"),
        ('root ::= "a"{99999}', "no number of repetitions"),
        (f'root ::= {"(" * 99}"a"{")" * 99}', "nested deeper"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(source, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        to_lark(source)


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "a"{' + " " * 200_000,
        'root ::= "a"{1' + " " * 100_000 + "," + " " * 100_000,
        'root ::= "' + "\\" * 200_001,
        "root ::= [" + "a" * 200_000,
        "root ::= " + "a" * 200_000,
        "root ::= a" + " " * 200_000,
        "\n" * 200_000 + "root ::= a",
        'root ::= "a"{' + "9" * 200_000 + "}",
    ],
)
def test_long_runs_of_one_sign_are_refused_as_soon_as_others(vocabulary, source):
    """They are read by expressions, which can take the square of a run's length: then this would not end."""
    with pytest.raises(InvalidRequest):
        vocabulary.compiler.compile(GrammarSpec("lark", source))


@pytest.mark.parametrize("run", ["\n", " ", "a", "?", "_\n", ":"])
def test_long_runs_of_one_sign_are_refused_in_lark(vocabulary, run):
    with pytest.raises(InvalidRequest):
        vocabulary.compiler.compile(GrammarSpec("lark", run * (200_000 // len(run))))


def test_a_refusal_reaches_the_request(vocabulary):
    with pytest.raises(InvalidRequest, match="line 1: there is no rule named word"):
        vocabulary.compiler.compile(GrammarSpec("lark", "root ::= word"))


def test_lark_is_left_as_it_is():
    assert not is_ebnf('start: "a ::= b" | other\nother: /x ::= y/\n')


def test_long_chains_of_rules_are_translated_in_a_line_each():
    source = "root ::= r0\n" + "".join(f"r{number} ::= r{number + 1}\n" for number in range(5000)) + 'r5000 ::= "a"'
    assert len(to_lark(source).splitlines()) == 5003
