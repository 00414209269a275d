"""Algebra: the set of values of each subschema, made when it is asked for.

Subschemas, and their intersections, unions and complements, are expressions: small numbers, equal for equal
expressions. So a recursive schema has finitely many, and each is worked out once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import reduce
from typing import Any

from inferengine.structured_output.schema.ecma import read_pattern
from inferengine.structured_output.schema.formats import pattern_of
from inferengine.structured_output.schema.language import (
    ALL,
    EMPTY,
    Language,
    alt,
    both,
    complement,
    length,
    literal,
)
from inferengine.structured_output.schema.numbers import NumberSet, to_fraction
from inferengine.structured_output.schema.references import Document, Location
from inferengine.structured_output.schema.refusal import Refusal
from inferengine.structured_output.schema.shapes import (
    ANYTHING,
    FALSE,
    NOTHING,
    TRUE,
    ArrayShape,
    Contains,
    Expr,
    ObjectShape,
    Rule,
    ValueSet,
    complement_of,
    intersect,
    is_nothing,
    unite,
)

MAX_EXPRESSIONS = 20_000
MAX_SETS = 4_000
LOOPS = "$ref leads back to itself with no property or item between: put one between, or remove it"
Scope = tuple[str, ...]
Evaluate = Callable[["Algebra", Any, str, Scope], ValueSet]

_TYPES = {
    "null": NOTHING._replace(constants=frozenset({"null"})),
    "boolean": NOTHING._replace(constants=frozenset({"true", "false"})),
    "number": NOTHING._replace(numbers=(NumberSet(),)),
    "integer": NOTHING._replace(numbers=(NumberSet(multiple=Fraction(1)),)),
    "string": NOTHING._replace(strings=ALL),
    "array": NOTHING._replace(arrays=(ArrayShape(),)),
    "object": NOTHING._replace(objects=(ObjectShape(),)),
}


class Algebra:
    """The expressions of one document. `evaluate` works out a schema that speaks of what others did not evaluate."""

    def __init__(self, document: Document, evaluate: Evaluate) -> None:
        self.document = document
        self._evaluate = evaluate
        self._numbers: dict[Any, Expr] = {("and", ()): TRUE, ("or", ()): FALSE}
        self._keys: list[Any] = [("and", ()), ("or", ())]
        self._schemas: dict[int, Any] = {}
        self._sets: dict[Expr, ValueSet] = {TRUE: ANYTHING, FALSE: NOTHING}
        self._open: set[Expr] = set()
        self._patterns: dict[str, Language] = {}

    # -- expressions -------------------------------------------------------------------------------------------------

    def _expression(self, key: Any) -> Expr:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._keys)
            self._keys.append(key)
            if found > MAX_EXPRESSIONS:
                raise Refusal("its keywords combine to too many schemas: write fewer of them into one schema")
        return found

    def schema(self, schema: Any, base: str, scope: Scope) -> Expr:
        """Return the expression of a subschema. `scope`: the resources that were entered, for $dynamicRef."""
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return FALSE
        if not isinstance(schema, dict):
            raise Refusal("a schema must be an object, true or false")
        base = self.document.base_of(schema, base)
        if self.document.has_dynamic_references and base not in scope:
            scope = (*scope, base)
        self._schemas[id(schema)] = schema
        return self._expression(("schema", id(schema), base, scope))

    def located(self, expr: Expr) -> tuple[Any, str, Scope] | None:
        """Return the subschema of an expression; None: it is none."""
        key = self._keys[expr]
        return (self._schemas[key[1]], key[2], key[3]) if key[0] == "schema" else None

    def all_of(self, exprs: Iterable[Expr]) -> Expr:
        """Return the expression of the values that all have."""
        parts: set[Expr] = set()
        for expr in exprs:
            key = self._keys[expr]
            parts.update(key[1] if key[0] == "and" else (expr,))
        if FALSE in parts or any(self._keys[one] == ("not", other) for one in parts for other in parts):
            return FALSE
        return parts.pop() if len(parts) == 1 else self._expression(("and", tuple(sorted(parts))))

    def any_of(self, exprs: Iterable[Expr]) -> Expr:
        """Return the expression of the values that any has."""
        parts: dict[Expr, None] = {}
        for expr in exprs:
            key = self._keys[expr]
            parts.update(dict.fromkeys(key[1] if key[0] == "or" else (expr,)))
        if TRUE in parts:
            return TRUE
        return next(iter(parts)) if len(parts) == 1 else self._expression(("or", tuple(parts)))

    def negate(self, expr: Expr) -> Expr:
        """Return the expression of every other value."""
        key = self._keys[expr]
        if key[0] == "not":
            return int(key[1])
        if expr in (TRUE, FALSE):
            return FALSE if expr == TRUE else TRUE
        return self._expression(("not", expr))

    def of(self, values: ValueSet) -> Expr:
        """Return the expression of a set."""
        return TRUE if values == ANYTHING else self._expression(("set", values))

    def join(self, one: Expr, two: Expr) -> Expr:
        """Return the expression of the values of both."""
        return self.all_of((one, two))

    # -- sets --------------------------------------------------------------------------------------------------------

    def values(self, expr: Expr) -> ValueSet:
        """Return the set of an expression. Raises Refusal."""
        found = self._sets.get(expr)
        if found is not None:
            return found
        if expr in self._open:
            raise Refusal(LOOPS)
        if len(self._sets) > MAX_SETS:
            raise Refusal("its keywords combine to too many schemas: write fewer of them into one schema")
        self._open.add(expr)
        try:
            found = self._sets[expr] = self._make(expr)
        finally:
            self._open.discard(expr)
        return found

    def _make(self, expr: Expr) -> ValueSet:
        kind, *rest = self._keys[expr]
        if kind == "schema":
            return self._schema_set(self._schemas[rest[0]], rest[1], rest[2])
        if kind == "set":
            return rest[0]  # type: ignore[no-any-return]
        if kind == "not":
            return complement_of(self.values(rest[0]), self.negate, self.join)
        sets = [self.values(one) for one in rest[0]]
        if kind == "or":
            return reduce(unite, sets, NOTHING)
        return self.meet(sets)

    def meet(self, sets: Iterable[ValueSet]) -> ValueSet:
        """Return what all sets have, without alternatives that are surely empty."""
        found = ANYTHING
        for one in sets:
            found = intersect(found, one, self.join)
            if len(found.arrays) + len(found.objects) > 8:
                found = found._replace(
                    arrays=tuple(shape for shape in found.arrays if not self._is_empty_array(shape, 1)),
                    objects=tuple(shape for shape in found.objects if not self._is_empty_object(shape, 1)),
                )
        return found

    def is_empty(self, expr: Expr, depth: int = 2) -> bool:
        """Whether an expression surely has no value, as far as `depth` levels show."""
        if expr in (TRUE, FALSE) or depth < 0:
            return expr == FALSE
        try:
            values = self.values(expr)
        except Refusal:
            return False  # said where the values are needed
        if not is_nothing(values._replace(arrays=(), objects=())):
            return False
        return all(self._is_empty_array(shape, depth - 1) for shape in values.arrays) and all(
            self._is_empty_object(shape, depth - 1) for shape in values.objects
        )

    def _is_empty_array(self, shape: ArrayShape, depth: int) -> bool:
        places = range(min(shape.least, len(shape.prefix) + 1))
        return any(self.is_empty(shape.item(place), depth) for place in places)

    def _is_empty_object(self, shape: ObjectShape, depth: int) -> bool:
        return any(self.is_empty(self.all_of(exprs), depth) for exprs in shape.values(shape.required).values())

    # -- keywords ----------------------------------------------------------------------------------------------------

    def _schema_set(self, schema: dict[str, Any], base: str, scope: Scope) -> ValueSet:
        if any(schema.get(name, True) not in (True, {}) for name in ("unevaluatedProperties", "unevaluatedItems")):
            return self._evaluate(self, schema, base, scope)
        return self._plain_set(schema, base, scope)

    def _plain_set(self, schema: dict[str, Any], base: str, scope: Scope) -> ValueSet:
        sets = [self.own(schema, base, scope)]
        sets += (self.values(self.schema(*target, scope)) for target in self.references(schema, base, scope))
        child = self.child(base, scope)
        sets += (self.values(child(one)) for one in _list(schema, "allOf"))
        if "anyOf" in schema:
            sets.append(self.values(self.any_of(child(one) for one in _list(schema, "anyOf"))))
        if "oneOf" in schema:
            sets.append(self.values(self.one_of([child(one) for one in _list(schema, "oneOf")])))
        if "not" in schema:
            sets.append(self.values(self.negate(child(schema["not"]))))
        if "if" in schema:
            condition = child(schema["if"])
            then, otherwise = child(schema.get("then", True)), child(schema.get("else", True))
            sets.append(self.values(self.any_of([condition, otherwise])))
            sets.append(self.values(self.any_of([self.negate(condition), then])))
        for name, dependent in self.dependent_schemas(schema):
            sets.append(self.values(self.any_of([self.without(name), child(dependent)])))
        return self.meet(sets)

    def child(self, base: str, scope: Scope) -> Callable[[Any], Expr]:
        """Return what makes expressions of subschemas of a schema at `base`."""
        return lambda schema: self.schema(schema, base, scope)

    def one_of(self, exprs: list[Expr]) -> Expr:
        """Return the expression of the values that exactly one has."""
        found = []
        for place, expr in enumerate(exprs):
            others = (other for index, other in enumerate(exprs) if index != place)
            overlapping = [other for other in others if not self.is_empty(self.all_of((expr, other)))]
            found.append(self.all_of([expr, *map(self.negate, overlapping)]))
        return self.any_of(found)

    def without(self, name: str) -> Expr:
        """Return the expression of the values that are no objects with this property."""
        return self.of(ANYTHING._replace(objects=(ObjectShape((name,), (Rule(literal(name), FALSE),)),)))

    def references(self, schema: dict[str, Any], base: str, scope: Scope) -> list[Location]:
        """Return what $ref and $dynamicRef of a schema name."""
        found = []
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                reference = schema[keyword]
                if not isinstance(reference, str):
                    raise Refusal(f"{keyword} must be a string")
                document = self.document
                dynamic = keyword == "$dynamicRef"
                found.append(
                    document.resolve_dynamic(reference, base, scope) if dynamic else document.resolve(reference, base)
                )
        return found

    def dependent_schemas(self, schema: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the names whose presence asks for a schema, with it: of dependentSchemas and the older keyword."""
        found = list(_map(schema, "dependentSchemas").items())
        return found + [(key, value) for key, value in _map(schema, "dependencies").items() if _is_schema(value)]

    def own(self, schema: dict[str, Any], base: str, scope: Scope) -> ValueSet:
        """Return what the keywords of a schema itself allow, without those that apply schemas to the same value."""
        found = ANYTHING
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not all(isinstance(name, str) and name in _TYPES for name in names):
                raise Refusal(f"type must be one of {', '.join(_TYPES)}, or a list of them")
            found = reduce(unite, (_TYPES[name] for name in names), NOTHING)
        if "enum" in schema:
            found = intersect(found, self._enum(_list(schema, "enum")), self.join)
        if "const" in schema:
            found = intersect(found, self._constant(schema["const"]), self.join)
        restricted = ANYTHING._replace(
            numbers=_numbers(schema),
            strings=self._strings(schema),
            arrays=(self._array(schema, base, scope),),
            objects=(self._object(schema, base, scope),),
        )
        found = intersect(found, restricted, self.join)
        required = [(key, value) for key, value in _map(schema, "dependentRequired").items()]
        required += [(key, value) for key, value in _map(schema, "dependencies").items() if not _is_schema(value)]
        for name, others in required:
            needed = ObjectShape(tuple(others), required=frozenset(others))
            present = self.of(ANYTHING._replace(objects=(needed,)))
            found = intersect(found, self.values(self.any_of([self.without(name), present])), self.join)
        return found

    def _enum(self, items: list[Any]) -> ValueSet:
        texts = alt(*(literal(item) for item in items if isinstance(item, str)))
        others = (self._constant(item) for item in items if not isinstance(item, str))
        return reduce(unite, others, NOTHING._replace(strings=texts))

    def _constant(self, value: Any) -> ValueSet:
        """Return the set of one value."""
        if value is None or isinstance(value, bool):
            return NOTHING._replace(constants=frozenset({json.dumps(value)}))
        if isinstance(value, int | float):
            number = to_fraction(value)
            return NOTHING._replace(numbers=(NumberSet(number, number),))
        if isinstance(value, str):
            return NOTHING._replace(strings=literal(value))
        if isinstance(value, list):
            items = tuple(self.of(self._constant(item)) for item in value)
            return NOTHING._replace(arrays=(ArrayShape(items, FALSE, len(items), len(items)),))
        names = tuple(value)
        rules = [Rule(literal(name), self.of(self._constant(value[name]))) for name in names]
        rules.append(Rule(complement(alt(*map(literal, names))), FALSE))
        return NOTHING._replace(objects=(ObjectShape(names, tuple(rules), frozenset(names)),))

    def _strings(self, schema: dict[str, Any]) -> Language:
        found = [length(_count(schema, "minLength") or 0, _count(schema, "maxLength"))]
        if "pattern" in schema:
            found.append(self.pattern(schema["pattern"]))
        if isinstance(schema.get("format"), str) and (expression := pattern_of(schema["format"])) is not None:
            found.append(self.pattern(expression))
        return both(*found)

    def pattern(self, pattern: Any) -> Language:
        """Return the texts that a `pattern` matches."""
        if not isinstance(pattern, str):
            raise Refusal("pattern must be a string")
        if pattern not in self._patterns:
            self._patterns[pattern] = read_pattern(pattern)
        return self._patterns[pattern]

    def _array(self, schema: dict[str, Any], base: str, scope: Scope) -> ArrayShape:
        child = self.child(base, scope)
        items = schema.get("items", True)
        prefix = _list(schema, "prefixItems")
        if isinstance(items, list):  # before 2020-12
            prefix, items = items, schema.get("additionalItems", True)
        contains: tuple[Contains, ...] = ()
        if "contains" in schema:
            least = _count(schema, "minContains")
            contains = (
                Contains(child(schema["contains"]), 1 if least is None else least, _count(schema, "maxContains")),
            )
        most = _count(schema, "maxItems")
        return ArrayShape(
            tuple(map(child, prefix)),
            child(items),
            _count(schema, "minItems") or 0,
            most,
            contains,
            schema.get("uniqueItems") is True,
        )

    def _object(self, schema: dict[str, Any], base: str, scope: Scope) -> ObjectShape:
        child = self.child(base, scope)
        properties, patterns = _map(schema, "properties"), _map(schema, "patternProperties")
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        assert isinstance(required, list)
        if not all(isinstance(name, str) for name in required):
            raise Refusal("required must be a list of names")
        rules = [Rule(literal(name), child(value)) for name, value in properties.items()]
        rules += [Rule(self.pattern(pattern), child(value)) for pattern, value in patterns.items()]
        if "additionalProperties" in schema:
            rules.append(Rule(complement(named_keys(self, schema)), child(schema["additionalProperties"])))
        if "propertyNames" in schema:
            names = self.values(child(schema["propertyNames"])).strings
            rules.append(Rule(complement(names), FALSE))
        return ObjectShape(
            tuple(dict.fromkeys([*properties, *required])),
            tuple(rule for rule in rules if rule.keys != EMPTY),
            frozenset(required),
            _count(schema, "minProperties") or 0,
            _count(schema, "maxProperties"),
        )


def named_keys(algebra: Algebra, schema: dict[str, Any]) -> Language:
    """Return the names that `properties` and `patternProperties` of a schema speak of."""
    patterns = map(algebra.pattern, _map(schema, "patternProperties"))
    return alt(*map(literal, _map(schema, "properties")), *patterns)


def _numbers(schema: dict[str, Any]) -> tuple[NumberSet, ...]:
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
    multiple = _number(schema, "multipleOf")
    if multiple is not None and multiple <= 0:
        raise Refusal("multipleOf must be above 0")
    found = NumberSet(low, high, low_open, high_open, multiple)
    return () if found.is_empty else (found,)


def _bound(
    schema: dict[str, Any], name: str, open_name: str, tighter: Callable[..., Fraction]
) -> tuple[Fraction | None, bool]:
    closed = _number(schema, name)
    if isinstance(schema.get(open_name), bool):  # draft 4
        return closed, closed is not None and schema[open_name]
    opened = _number(schema, open_name)
    if opened is None or closed is None:
        return (closed, False) if opened is None else (opened, True)
    return (opened, True) if opened == closed or tighter(opened, closed) == opened else (closed, False)


def _number(schema: dict[str, Any], name: str) -> Fraction | None:
    value = schema.get(name)
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, int | float):
        raise Refusal(f"{name} must be a number")
    return to_fraction(value)


def _count(schema: dict[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise Refusal(f"{name} must be a whole number from 0")
    return int(value)


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name, [])
    if not isinstance(value, list):
        raise Refusal(f"{name} must be a list")
    return value


def _map(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise Refusal(f"{name} must be an object")
    return value


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)
