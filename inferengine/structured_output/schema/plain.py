"""Plain schemas: those that llguidance compiles exactly by itself, made ready for it.

Most schemas that people send are of this kind, and it compiles them fastest. Patterns and formats are written out in
its dialect, annotation and unknown keywords are left out.
"""

from __future__ import annotations

import json
from typing import Any

from inferengine.structured_output.schema.ecma import read_pattern
from inferengine.structured_output.schema.formats import pattern_of
from inferengine.structured_output.schema.language import to_regex
from inferengine.structured_output.schema.numbers import MAX_MULTIPLE

_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
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
    """A $ref to a place of the same schema, with nothing beside it that restricts values."""
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
    """The expression that a whole text must match."""
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
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_BOUND:
        raise _NotPlain
    return int(value) if value == int(value) else value
