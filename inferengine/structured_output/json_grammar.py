"""Translates JSON schemas into llguidance's grammars: alone, and where a grammar in Lark has `%json` literals.

A schema that is a tool's (`TOOL_KEY`) and cannot be held to becomes any JSON object, with a note that says so: the
other tools of a request, and the request itself, go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLMatcher

from inferengine.structured_output.schema.plain import plain_schema
from inferengine.structured_output.schema.refusal import Refusal
from inferengine.structured_output.schema.translate import schema_rules, spacing_of
from inferengine.structured_output.schema.writer import Spacing

TOOL_KEY = "x-tool"  # of a %json literal: the tool whose arguments it describes
STYLE_KEY = "x-guidance"
ESCAPES = 'nrbtf\\"'  # no \u: a property that the schema names could hide behind another spelling
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|%json\s*')
_DECODER = json.JSONDecoder()


class Translation(NamedTuple):
    """A grammar in llguidance's form. `notes`: what it does not hold to. `is_costly`: making it takes longer than
    reading it."""

    grammar: str
    notes: tuple[str, ...] = ()
    is_costly: bool = True


def translate_schema(source: str, whitespace: str | None) -> Translation:
    """Translate a JSON schema. `whitespace`: see `spacing_of`. Raises Refusal naming what cannot be held to."""
    schema = _loads(source)
    spacing = spacing_of(whitespace)
    plain = plain_schema(schema)
    if plain is None:
        return Translation(str(LLMatcher.grammar_from_lark(schema_rules(schema, spacing))))
    overrides = {**spacing.options, "json_allowed_escapes": ESCAPES}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(plain), overrides=overrides)
    return Translation(str(grammar), is_costly='"pattern"' in source or '"format"' in source)


def translate_literals(source: str, is_given_up: Callable[[str], bool] = lambda tool: False) -> Translation:
    """Translate the `%json` literals of a grammar in Lark. `is_given_up`: whether the schema of a tool is not to be
    held to. Raises Refusal for a literal that is not a tool's."""
    pieces: list[str] = []
    rules: list[str] = []
    notes: list[str] = []
    place = 0
    while (match := _LITERAL.search(source, place)) is not None:
        pieces.append(source[place : match.start()])
        place = match.end()
        schema = None
        if match[0].startswith("%json"):
            schema, end = _decode(source, place)
        if not isinstance(schema, dict):
            pieces.append(match[0])
            continue
        place = end
        options, tool = schema.pop(STYLE_KEY, {}), schema.pop(TOOL_KEY, None)
        try:
            if tool is not None and is_given_up(str(tool)):
                raise Refusal("its schema does not compile, or not within the limits: simplify it")
            pieces.append(_literal(schema, options, f"json{len(pieces)}", rules))
        except Refusal as refusal:
            if tool is None:
                raise
            notes.append(f"tool {tool}: its arguments may be any JSON object: {refusal}")
            pieces.append(_literal({"type": "object"}, options, "", rules))
    pieces.append(source[place:])
    text = "".join(pieces).rstrip("\n") + "\n" + "".join(rules) if len(pieces) > 1 else source
    return Translation(str(LLMatcher.grammar_from_lark(text)), tuple(notes), "%json" in source)


def tools_of(source: str) -> list[str]:
    """Return the names of the tools in a grammar."""
    found = []
    for match in _LITERAL.finditer(source):
        if match[0].startswith("%json"):
            schema, _ = _decode(source, match.end())
            if isinstance(schema, dict) and TOOL_KEY in schema:
                found.append(str(schema[TOOL_KEY]))
    return found


def _literal(schema: dict[str, Any], options: Any, prefix: str, rules: list[str]) -> str:
    """The symbol of a schema in a grammar; what it needs besides goes to `rules`."""
    options = options if isinstance(options, dict) else {}
    plain = plain_schema(schema)
    if plain is not None:
        return f"%json {json.dumps({**plain, STYLE_KEY: {**options, 'json_allowed_escapes': ESCAPES}})}"
    if options.get("whitespace_flexible") is False:
        comma, colon = options.get("item_separator", ","), options.get("key_separator", ":")
        spacing = Spacing(str(comma), str(colon), "", "", options)
    else:
        spacing = spacing_of(options.get("whitespace_pattern"))
    rules.append(schema_rules(schema, spacing, f"{prefix}_start", prefix))
    return f"{prefix}_start"


def _loads(source: str) -> Any:
    def refuse(constant: str) -> Any:
        raise Refusal(f"{constant} is no JSON")

    return json.loads(source, parse_constant=refuse)


def _decode(source: str, place: int) -> tuple[Any, int]:
    """The JSON at a place and where it ends; None where there is none."""
    try:
        return _DECODER.raw_decode(source, place)
    except ValueError:
        return None, place
