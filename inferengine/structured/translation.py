"""A GrammarSpec in llguidance's own form. Takes time in proportion to the source: compiling finds what it means."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, StructTag, regex_to_lark

from inferengine.errors import InvalidRequest
from inferengine.structure import GrammarSpec
from inferengine.structured.ebnf import is_ebnf, to_lark
from inferengine.structured.reasons import first_lines

# Between JSON tokens: a little of any space. Without a bound a model may print spaces until its length is used up.
WHITESPACE = r"[ \n\t]{0,12}"
MAX_RULES = 2000  # of a grammar: with 10,000 that name each other in turn llguidance is busy for minutes
_RULE = re.compile(r"(?m)^[ \t]*[?!]?[A-Za-z_]\w*[^:\n\"/]{0,80}:", re.ASCII)


def translate(spec: GrammarSpec) -> str:
    """Raises InvalidRequest saying what cannot be read."""
    try:
        return str(TRANSLATIONS[spec.kind](spec))
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise InvalidRequest("grammar", f"cannot be read: {first_lines(str(error))}") from None


def _json_schema(spec: GrammarSpec) -> str:
    whitespace = WHITESPACE if spec.whitespace is None else spec.whitespace
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(spec.source, overrides=options))


def _regex(spec: GrammarSpec) -> str:
    """A digit means 0-9, as everybody who writes \\d into a request means it."""
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.source, 'd')}/\n"))


def _lark(spec: GrammarSpec) -> str:
    """A grammar in Lark, or in the EBNF that llama.cpp and xgrammar read."""
    source = to_lark(spec.source) if is_ebnf(spec.source) else spec.source
    if sum(1 for _ in _RULE.finditer(source)) > MAX_RULES:
        raise ValueError(f"has more than {MAX_RULES} rules")
    return str(LLMatcher.grammar_from_lark(source))


def _choice(spec: GrammarSpec) -> str:
    items = json.loads(spec.source)
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("choices must be a list of strings, none of them empty")
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in items)
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n"))  # one expression: any number


def _structural_tag(spec: GrammarSpec) -> str:
    value = json.loads(spec.source)
    tags = []
    for item in value["structures"]:
        trigger = next((trigger for trigger in value["triggers"] if item["begin"].startswith(trigger)), "")
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item.get("end", "")))
    return str(StructTag.to_grammar(tags, assume_special=False))


TRANSLATIONS: dict[str, Callable[[GrammarSpec], str]] = {
    "json_schema": _json_schema,
    "json_object": lambda spec: _json_schema(spec._replace(source='{"type": "object"}')),
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "structural_tag": _structural_tag,
}
