"""Translates JSON schemas into llguidance's grammars: alone, and where a grammar in Lark has `%json` literals.

A plain schema is one that llguidance compiles exactly by itself. Most schemas that people send are of this kind, and it
compiles them fastest. `plain_schema` makes them ready for it: patterns and formats are written out in its dialect,
annotation and unknown keywords are left out. All others go through the algebra (schema/).

A schema that is a tool's (`TOOL_KEY`) and cannot be held to becomes any JSON object, with a note that says so: the
other tools of a request, and the request itself, go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLMatcher

from inferengine.structured_output.schema.language import Refusal, pattern_of, read_pattern, to_regex
from inferengine.structured_output.schema.value_sets import MAX_MULTIPLE
from inferengine.structured_output.schema.writer import Spacing, schema_rules, spacing_of

# -- plain schemas -----------------------------------------------------------------------------------------------------

_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_NUMBERS = _BOUNDS | {"multipleOf"}
_AS_THEY_ARE = frozenset({"type", "enum", "const", "required"})
_SINGLE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "$defs", "definitions"})
_NOT_PLAIN = frozenset(
    {"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$id", "additionalItems", "contains", "dependencies"}
    | {"dependentRequired", "dependentSchemas", "else", "if", "maxContains", "maxProperties", "minContains", "not"}
    | {"minProperties", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems", "uniqueItems"}
    | {"unevaluatedProperties"}
)
MAX_BOUND = 1e15


class _NotPlain(Exception):
    """A schema that needs the algebra."""


def plain_schema(schema: Any) -> Any | None:
    """Return the schema as llguidance takes it; None: it is not plain. Raises Refusal for a pattern that none can
    match."""
    try:
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if key != "$id"}  # the base of nothing but itself
        return _plain(schema)
    except _NotPlain:
        return None


def _plain(schema: Any) -> Any:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _NotPlain
    if (_NOT_PLAIN & schema.keys()) - ({"uniqueItems"} if schema.get("uniqueItems") is False else set()):
        raise _NotPlain
    if schema.get("enum") == [] or "\\u00" in json.dumps([schema.get("enum"), schema.get("const")]):
        raise _NotPlain  # control characters have no spelling there
    if "$ref" in schema:
        return _reference(schema)
    if _has_open_bound_within_one(schema):
        raise _NotPlain
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SINGLE:
            found[name] = False if value is False else _plain(value)
        elif name in _LISTS:
            found[name] = [_plain(one) for one in _is(value, list)]
        elif name in _MAPS:
            found[name] = {key: False if one is False else _plain(one) for key, one in _is(value, dict).items()}
        elif name in _AS_THEY_ARE:
            found[name] = value
        elif name in _COUNTS:
            found[name] = _count(value)
        elif name in _NUMBERS:
            found[name] = _number(value)
            if name == "multipleOf" and not 1e-6 <= value <= MAX_MULTIPLE:
                raise _NotPlain
    if (pattern := _pattern(schema)) is not None:
        found["pattern"] = pattern
    return found


def _reference(schema: dict[str, Any]) -> Any:
    """Return what a $ref refers to in the same schema, where nothing beside it restricts values."""
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")) or "%" in reference:
        raise _NotPlain
    beside = (
        _SINGLE | _LISTS | _AS_THEY_ARE | _COUNTS | _NUMBERS | {"properties", "pattern", "format"}
    ) & schema.keys()
    parts = reference[1:].split("/")[1:]
    if beside or (parts and (parts[0] not in ("$defs", "definitions") or len(parts) != 2)):
        raise _NotPlain
    held = {name: _plain({name: schema[name]})[name] for name in ("$defs", "definitions") if name in schema}
    return {"$ref": reference, **held}


def _pattern(schema: dict[str, Any]) -> str | None:
    """Return the expression that a whole text must match."""
    format = schema.get("format")
    expressions = [schema.get("pattern"), pattern_of(format) if isinstance(format, str) else None]
    given = [expression for expression in expressions if expression is not None]
    if not given:
        return None
    if len(given) > 1 or not isinstance(given[0], str):
        raise _NotPlain
    language = read_pattern(given[0])
    if language.kind == "alt" and not language.items:
        raise _NotPlain
    return f"^(?:{to_regex(language)})$"


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _NotPlain
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise _NotPlain
    return int(value)


def _number(value: Any) -> int | float:
    if not _is_number(value):
        raise _NotPlain
    return int(value) if value == int(value) else value


def _has_open_bound_within_one(schema: dict[str, Any]) -> bool:
    """Return whether two bounds, one of them exclusive, share their digits before the point, such as above 0 and at
    most 0.5. llguidance lets the exclusive one itself through where it is whole."""
    together = {**schema, **{name: value for part in _all_of(schema) for name, value in part.items()}}
    bounds = {name: together[name] for name in _BOUNDS if _is_number(together.get(name))}
    lows = [bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds]
    highs = [bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds]
    is_open = not bounds.keys().isdisjoint(("exclusiveMinimum", "exclusiveMaximum"))
    return is_open and any(int(low) == int(high) for low in lows for high in highs)


def _all_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    parts = schema.get("allOf")
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BOUND


TOOL_KEY = "x-tool"  # of a %json literal: the tool whose arguments it describes
STYLE_KEY = "x-guidance"
ESCAPES = 'nrbtf\\"'  # no \u: a property that the schema names could hide behind another spelling
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|%json\s*')
_DECODER = json.JSONDecoder()


# -- translation -------------------------------------------------------------------------------------------------------


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
    """Return the symbol of a schema in a grammar; the rules that it needs are added to `rules`."""
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
    """Decode the JSON at a place; return it and where it ends, or None where there is none."""
    try:
        return _DECODER.raw_decode(source, place)
    except ValueError:
        return None, place
