"""Algebra: the set of values of each subschema, made when it is asked for.

Subschemas, and their intersections, unions and complements, are expressions: small numbers, equal for equal
expressions. So a recursive schema has finitely many, and each is worked out once.

Document says where the parts of a schema are that `$ref` and `$dynamicRef` name. Nothing outside the schema is read.

Evaluation: what `unevaluatedProperties` and `unevaluatedItems` speak of. Which properties a schema has evaluated
depends on which of its branches hold. So its values are split into cases, in each of which that is known; branches that
did not hold count for nothing, so they are complements there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from inferengine.structured_output.schema.language import (
    ALL,
    EMPTY,
    Language,
    Refusal,
    alt,
    both,
    complement,
    length,
    literal,
    pattern_of,
    read_pattern,
)
from inferengine.structured_output.schema.value_sets import (
    ANYTHING,
    FALSE,
    MAX_ALTERNATIVES,
    NOTHING,
    TOO_MANY,
    TRUE,
    ArrayShape,
    Contains,
    Expr,
    NumberSet,
    ObjectShape,
    PropertyRule,
    ValueSet,
    complement_of,
    intersect,
    is_nothing,
    to_fraction,
    unite,
)

SINGLE = (
    "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "items", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


# -- references --------------------------------------------------------------------------------------------------------


class Location(NamedTuple):
    """A subschema and the URI that its references start from."""

    schema: Any
    base: str


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas directly inside this one."""
    for name in SINGLE:
        if isinstance(schema.get(name), dict):
            yield schema[name]
    for name in LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()


class Document:
    """A schema with its `$id`, `$anchor` and `$dynamicAnchor` looked up."""

    def __init__(self, root: Any) -> None:
        self._bases: dict[int, str] = {}  # by identity of the subschema, where it has an $id
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Location] = {}
        self._dynamic: dict[tuple[str, str], Location] = {}
        self.has_dynamic_references = False
        queue = [Location(root, "")]
        while queue:
            schema, base = queue.pop()
            if not isinstance(schema, dict):
                continue
            base = self._enter(schema, base)
            self.has_dynamic_references |= "$dynamicRef" in schema or "$recursiveRef" in schema
            queue += (Location(one, base) for one in subschemas(schema))

    def base_of(self, schema: Any, base: str) -> str:
        """Return the URI that references inside `schema` start from."""
        return self._bases.get(id(schema), base)

    def resolve(self, reference: str, base: str) -> Location:
        """Return what a `$ref` names. Raises Refusal where the schema does not contain it."""
        uri, fragment = _split(reference, base)
        if uri not in self._resources:
            raise Refusal(f"$ref to {uri[:120]}: only what the schema itself contains is read: copy it under $defs")
        if fragment.startswith("/"):
            return self._follow(uri, fragment, reference)
        if not fragment:
            return Location(self._resources[uri], uri)
        found = self._anchors.get((uri, fragment))
        if found is None:
            raise Refusal(f"$ref to {reference[:120]}: there is no such $anchor in the schema")
        return found

    def resolve_dynamic(self, reference: str, base: str, scope: tuple[str, ...]) -> Location:
        """Return what a `$dynamicRef` names where `scope` are the resources that were entered, the outermost first."""
        uri, fragment = _split(reference, base)
        found = self.resolve(reference, base)
        if (uri, fragment) in self._dynamic:
            for outer in scope:
                if (outer, fragment) in self._dynamic:
                    return self._dynamic[outer, fragment]
        return found

    def _enter(self, schema: dict[str, Any], base: str) -> str:
        if isinstance(own := schema.get("$id"), str) and not own.startswith("#"):
            base = self._bases[id(schema)] = urldefrag(_join(base, own)).url
            self._resources[base] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._anchors[base, name] = Location(schema, base)
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            self._dynamic[base, name] = Location(schema, base)
        return base

    def _follow(self, uri: str, pointer: str, reference: str) -> Location:
        value, base = self._resources[uri], uri
        for part in pointer[1:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise Refusal(f"$ref to {reference[:120]}: there is nothing at this place of the schema")
            base = self.base_of(value, base)
        return Location(value, base)


def _join(base: str, reference: str) -> str:
    if urlsplit(reference).scheme or not base:
        return reference
    return urljoin(base, reference)


def _split(reference: str, base: str) -> tuple[str, str]:
    if reference.startswith("#"):
        return base, unquote(reference[1:]) if not reference.startswith("#/") else reference[1:]
    try:
        uri, fragment = urldefrag(_join(base, reference))
    except ValueError:
        raise Refusal(f"$ref {reference[:120]} is no URI") from None
    return uri, fragment


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


# -- expressions -------------------------------------------------------------------------------------------------------


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
        """Return the expression of a subschema. `scope`: the resources that were entered, for $dynamicRef. Raises
        Refusal."""
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
        """Return whether an expression surely has no value, as far as `depth` levels show."""
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
        return self.of(ANYTHING._replace(objects=(ObjectShape((name,), (PropertyRule(literal(name), FALSE),)),)))

    def references(self, schema: dict[str, Any], base: str, scope: Scope) -> list[Location]:
        """Return what $ref and $dynamicRef of a schema name. Raises Refusal."""
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
        """Return what the keywords of a schema itself allow, without those that apply schemas to the same value. Raises
        Refusal."""
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
        rules = [PropertyRule(literal(name), self.of(self._constant(value[name]))) for name in names]
        rules.append(PropertyRule(complement(alt(*map(literal, names))), FALSE))
        return NOTHING._replace(objects=(ObjectShape(names, tuple(rules), frozenset(names)),))

    def _strings(self, schema: dict[str, Any]) -> Language:
        found = [length(_count(schema, "minLength") or 0, _count(schema, "maxLength"))]
        if "pattern" in schema:
            found.append(self.pattern(schema["pattern"]))
        if isinstance(schema.get("format"), str) and (expression := pattern_of(schema["format"])) is not None:
            found.append(self.pattern(expression))
        return both(*found)

    def pattern(self, pattern: Any) -> Language:
        """Return the texts that a `pattern` matches. Raises Refusal."""
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
        rules = [PropertyRule(literal(name), child(value)) for name, value in properties.items()]
        rules += [PropertyRule(self.pattern(pattern), child(value)) for pattern, value in patterns.items()]
        if "additionalProperties" in schema:
            rules.append(PropertyRule(complement(named_keys(self, schema)), child(schema["additionalProperties"])))
        if "propertyNames" in schema:
            names = self.values(child(schema["propertyNames"])).strings
            rules.append(PropertyRule(complement(names), FALSE))
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


ALL_ITEMS = 1 << 30


# -- what a schema has evaluated ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Values whose evaluated parts are known: properties with names in `keys`, the first `items` items, and those that
    one of `contains` has."""

    values: ValueSet = ANYTHING
    keys: Language = EMPTY
    items: int = 0
    contains: tuple[Expr, ...] = ()

    @property
    def says_nothing(self) -> bool:
        """Whether nothing is evaluated."""
        return self[1:] == (EMPTY, 0, ())


def evaluated_values(algebra: Algebra, schema: dict[str, Any], base: str, scope: Scope) -> ValueSet:
    """Return the values of a schema with unevaluatedProperties or unevaluatedItems."""
    return Evaluation(algebra).values(schema, base, scope)


class Evaluation:
    """Works out the cases of schemas."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self._open: set[Expr] = set()

    def values(self, schema: dict[str, Any], base: str, scope: Scope) -> ValueSet:
        """Return the values of a schema with unevaluatedProperties or unevaluatedItems."""
        values = NOTHING
        for case in self._schema_cases(schema, base, scope):
            values = unite(values, case.values)
        return values

    def _cases(self, expr: Expr) -> list[Case]:
        located = self._algebra.located(expr)
        if located is None:
            return [Case(self._algebra.values(expr))]
        if expr in self._open:
            self._algebra.values(expr)  # its own loop, which is refused there
            raise Refusal("unevaluatedProperties and unevaluatedItems cannot look through a $ref to themselves")
        self._open.add(expr)
        try:
            return self._schema_cases(*located)
        finally:
            self._open.discard(expr)

    def _schema_cases(self, schema: dict[str, Any], base: str, scope: Scope) -> list[Case]:
        algebra = self._algebra
        child = algebra.child(base, scope)
        cases = [self._own(schema, base, scope)]
        for target in algebra.references(schema, base, scope):
            cases = self._both(cases, self._cases(algebra.schema(*target, scope)))
        for one in schema.get("allOf", ()):
            cases = self._both(cases, self._cases(child(one)))
        if "anyOf" in schema:
            cases = self._both(cases, self._any([child(one) for one in schema["anyOf"]]))
        if "oneOf" in schema:
            cases = self._both(cases, self._one([child(one) for one in schema["oneOf"]]))
        if "not" in schema:
            cases = self._both(cases, [self._not(child(schema["not"]))])
        if "if" in schema:
            condition, then = child(schema["if"]), child(schema.get("then", True))
            held = self._both(self._cases(condition), self._cases(then))
            failed = self._both([self._not(condition)], self._cases(child(schema.get("else", True))))
            cases = self._both(cases, [*held, *failed])
        for name, dependent in algebra.dependent_schemas(schema):
            without = algebra.without(name)
            present = self._both([self._not(without)], self._cases(child(dependent)))
            cases = self._both(cases, [Case(algebra.values(without)), *present])
        return [self._restrict(case, schema, child) for case in cases]

    def _own(self, schema: dict[str, Any], base: str, scope: Scope) -> Case:
        algebra = self._algebra
        keys = named_keys(algebra, schema) if "additionalProperties" not in schema else ALL
        items = schema.get("items")
        prefix = items if isinstance(items, list) else schema.get("prefixItems", ())
        has_rest = "additionalItems" in schema if isinstance(items, list) else items is not None
        contains = (algebra.schema(schema["contains"], base, scope),) if "contains" in schema else ()
        return Case(algebra.own(schema, base, scope), keys, ALL_ITEMS if has_rest else len(prefix), contains)

    def _restrict(self, case: Case, schema: dict[str, Any], child: Any) -> Case:
        if "unevaluatedProperties" in schema:
            rest = PropertyRule(complement(case.keys), child(schema["unevaluatedProperties"]))
            if rest.keys != EMPTY and rest.value != TRUE:
                limit = ANYTHING._replace(objects=(ObjectShape(rules=(rest,)),))
                case = case._replace(values=self._algebra.meet((case.values, limit)))
            case = case._replace(keys=ALL)
        if "unevaluatedItems" in schema:
            value = child(schema["unevaluatedItems"])
            if case.items < ALL_ITEMS and value != TRUE:
                shape = ArrayShape((TRUE,) * case.items, self._algebra.any_of([*case.contains, value]))
                if value == 1 and not case.contains:
                    shape = shape._replace(most=case.items)
                limit = ANYTHING._replace(arrays=(shape,))
                case = case._replace(values=self._algebra.meet((case.values, limit)))
            case = case._replace(items=ALL_ITEMS)
        return case

    def _not(self, expr: Expr) -> Case:
        return Case(self._algebra.values(self._algebra.negate(expr)))

    def _both(self, ones: Iterable[Case], others: Iterable[Case]) -> list[Case]:
        found: dict[Any, ValueSet] = {}
        for one, other in product(list(ones), list(others)):
            values = self._algebra.meet((one.values, other.values))
            if is_nothing(values):
                continue
            contains = tuple(dict.fromkeys(one.contains + other.contains))
            key = alt(one.keys, other.keys), max(one.items, other.items), contains
            found[key] = unite(found[key], values) if key in found else values
            if len(found) > MAX_ALTERNATIVES:
                raise Refusal(TOO_MANY)
        return [Case(values, *key) for key, values in found.items()]

    def _any(self, exprs: list[Expr]) -> list[Case]:
        """Split by which of the schemas hold, as far as they evaluate something."""
        cases = [(expr, self._cases(expr)) for expr in exprs]
        silent = [expr for expr, found in cases if all(case.says_nothing for case in found)]
        held: list[Case] = []
        failed = [Case()]
        for expr, found in cases:
            if expr in silent:
                continue
            held = [*self._both(held, [*found, self._not(expr)]), *self._both(failed, found)]
            failed = self._both(failed, [self._not(expr)])
        return [*held, *self._both(failed, [Case(self._algebra.values(self._algebra.any_of(silent)))])]

    def _one(self, exprs: list[Expr]) -> list[Case]:
        found: list[Case] = []
        for place, expr in enumerate(exprs):
            others = [self._not(other) for index, other in enumerate(exprs) if index != place]
            cases = self._cases(expr)
            for other in others:
                cases = self._both(cases, [other])
            found += cases
        return found
