"""Evaluation: what `unevaluatedProperties` and `unevaluatedItems` speak of.

Which properties a schema has evaluated depends on which of its branches hold. So its values are split into cases, in
each of which that is known; branches that did not hold count for nothing, so they are complements there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from inferengine.structured_output.schema.algebra import Algebra, Scope, named_keys
from inferengine.structured_output.schema.language import ALL, EMPTY, Language, alt, complement
from inferengine.structured_output.schema.refusal import Refusal
from inferengine.structured_output.schema.shapes import (
    ANYTHING,
    MAX_ALTERNATIVES,
    NOTHING,
    TOO_MANY,
    TRUE,
    ArrayShape,
    Expr,
    ObjectShape,
    Rule,
    ValueSet,
    is_nothing,
    unite,
)

ALL_ITEMS = 1 << 30


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
            rest = Rule(complement(case.keys), child(schema["unevaluatedProperties"]))
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
