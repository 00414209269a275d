"""ValueSet: a set of JSON values, as one union of alternatives for each type. Closed under union, intersection and
complement, which is what `not`, `oneOf` and `if` need.

Schemas inside arrays and objects are numbers of expressions (`algebra.py`), so a set is finite where a schema is
recursive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple, TypeVar

from inferengine.structured_output.schema.language import (
    ALL,
    EMPTY,
    Language,
    alt,
    both,
    complement,
    is_empty,
    literal,
    matches,
    words,
)
from inferengine.structured_output.schema.numbers import NumberSet
from inferengine.structured_output.schema.refusal import Refusal

TRUE, FALSE = 0, 1  # the expressions of every value and of none
MAX_ALTERNATIVES = 256
CONSTANTS = frozenset({"null", "true", "false"})
TOO_MANY = (
    "anyOf, oneOf, not, if and dependent keywords combine to more than "
    f"{MAX_ALTERNATIVES} alternatives: write fewer of them into one schema"
)
Expr = int
S = TypeVar("S")
Join = Callable[[Expr, Expr], Expr]
Negate = Callable[[Expr], Expr]


class Contains(NamedTuple):
    """From item `start` on, at least `least` and at most `most` items are of `value`."""

    value: Expr
    least: int = 1
    most: int | None = None
    start: int = 0


class ArrayShape(NamedTuple):
    """Arrays whose first items are of `prefix` each and the others of `rest`."""

    prefix: tuple[Expr, ...] = ()
    rest: Expr = TRUE
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    is_unique: bool = False
    has_duplicates: bool = False

    def item(self, place: int) -> Expr:
        """Return what the item at `place` must be."""
        return self.prefix[place] if place < len(self.prefix) else self.rest


class Rule(NamedTuple):
    """The values of properties whose names are in `keys`."""

    keys: Language
    value: Expr


class ObjectShape(NamedTuple):
    """Objects in which each property keeps all rules for its name. `order` are the names in the order of the schema;
    `exists`: there is a property with such a name and such a value."""

    order: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    required: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None
    exists: tuple[Rule, ...] = ()

    def values(self, names: Iterable[str]) -> dict[str, list[Expr]]:
        """Return what the properties of these names must be, all of them."""
        found: dict[str, list[Expr]] = {name: [] for name in names}
        for keys, value in self.rules:
            if value == TRUE:
                continue
            candidates = found if keys.listed is None else (name for name in keys.listed if name in found)
            for name in candidates:
                if keys.listed is not None or matches(keys, name):
                    found[name].append(value)
        return found


class ValueSet(NamedTuple):
    """JSON values: `constants` of null, true and false; an alternative of each other type, or of none."""

    constants: frozenset[str] = CONSTANTS
    numbers: tuple[NumberSet, ...] = (NumberSet(),)
    strings: Language = ALL
    arrays: tuple[ArrayShape, ...] = (ArrayShape(),)
    objects: tuple[ObjectShape, ...] = (ObjectShape(),)


ANYTHING = ValueSet()
NOTHING = ValueSet(frozenset(), (), EMPTY, (), ())


def intersect(one: ValueSet, two: ValueSet, join: Join) -> ValueSet:
    """Return what both have. `join`: the expression of what two expressions have in common."""
    return ValueSet(
        one.constants & two.constants,
        _limited([both_ for a, b in product(one.numbers, two.numbers) if not (both_ := a.intersect(b)).is_empty]),
        both(one.strings, two.strings),
        _limited([s for a, b in product(one.arrays, two.arrays) if (s := _both_arrays(a, b, join)) is not None]),
        _limited([o for a, b in product(one.objects, two.objects) if (o := both_objects(a, b)) is not None]),
    )


def unite(one: ValueSet, two: ValueSet) -> ValueSet:
    """Return what either has."""
    return ValueSet(
        one.constants | two.constants,
        _limited([*one.numbers, *two.numbers], NumberSet()),
        alt(one.strings, two.strings),
        _limited([*one.arrays, *two.arrays], ArrayShape()),
        _limited([*one.objects, *two.objects], ObjectShape()),
    )


def is_nothing(values: ValueSet) -> bool:
    """Whether no type is left. Contents of arrays and objects are not looked at."""
    return not (values.constants or values.numbers or values.arrays or values.objects) and is_empty(values.strings)


def both_objects(one: ObjectShape, two: ObjectShape) -> ObjectShape | None:
    """Return the objects of both shapes; None where there are surely none."""
    if two == ObjectShape():
        return one
    shape = ObjectShape(
        tuple(dict.fromkeys(one.order + two.order)),
        tuple(dict.fromkeys(one.rules + two.rules)),
        one.required | two.required,
        max(one.least, two.least),
        _smaller(one.most, two.most),
        tuple(dict.fromkeys(one.exists + two.exists)),
    )
    if shape.most is not None and max(shape.least, len(shape.required)) > shape.most:
        return None
    return None if any(FALSE in exprs for exprs in shape.values(shape.required).values()) else shape


def with_property(keys: Language, value: Expr) -> ObjectShape:
    """Return the objects that have a property with such a name and value."""
    names = words(keys)
    if names is not None and len(names) == 1:
        return ObjectShape(tuple(names), (Rule(literal(names[0]), value),), frozenset(names))
    return ObjectShape(exists=(Rule(keys, value),))


def other_objects(shape: ObjectShape, negate: Negate) -> list[ObjectShape]:
    """Return shapes that together have every object that `shape` has not."""
    found = [with_property(rule.keys, negate(rule.value)) for rule in shape.rules if rule.value != TRUE]
    found += [ObjectShape((name,), (Rule(literal(name), FALSE),)) for name in shape.order if name in shape.required]
    found += [ObjectShape(most=shape.least - 1)] if shape.least else []
    found += [ObjectShape(least=shape.most + 1)] if shape.most is not None else []
    return found + [ObjectShape(rules=(Rule(rule.keys, negate(rule.value)),)) for rule in shape.exists]


def other_arrays(shape: ArrayShape, negate: Negate) -> list[ArrayShape]:
    """Return shapes that together have every array that `shape` has not."""
    found = []
    for place, value in enumerate(shape.prefix):
        if value != TRUE:
            found.append(ArrayShape((TRUE,) * place + (negate(value),), least=place + 1))
    if shape.rest == FALSE:
        found.append(ArrayShape(least=len(shape.prefix) + 1))
    elif shape.rest != TRUE:
        found.append(ArrayShape(contains=(Contains(negate(shape.rest), start=len(shape.prefix)),)))
    found += [ArrayShape(most=shape.least - 1)] if shape.least else []
    found += [ArrayShape(least=shape.most + 1)] if shape.most is not None else []
    for value, least, most, start in shape.contains:
        found += [ArrayShape(contains=(Contains(value, 0, least - 1, start),))] if least else []
        found += [ArrayShape(contains=(Contains(value, most + 1, None, start),))] if most is not None else []
    found += [ArrayShape(has_duplicates=True)] if shape.is_unique else []
    return found + ([ArrayShape(is_unique=True)] if shape.has_duplicates else [])


def complement_of(values: ValueSet, negate: Negate, join: Join) -> ValueSet:
    """Return every other value. `negate`: the expression of every value that an expression has not."""
    found = ValueSet(CONSTANTS - values.constants, strings=complement(values.strings))
    for number in values.numbers:
        found = intersect(found, ANYTHING._replace(numbers=tuple(number.complement())), join)
    for array in values.arrays:
        found = intersect(found, ANYTHING._replace(arrays=tuple(other_arrays(array, negate))), join)
    for object_ in values.objects:
        found = intersect(found, ANYTHING._replace(objects=tuple(other_objects(object_, negate))), join)
    return found


def expressions(values: ValueSet) -> set[Expr]:
    """Return the expressions that a set holds."""
    found: set[Expr] = set()
    for array in values.arrays:
        found |= {*array.prefix, array.rest, *(one.value for one in array.contains)}
    for object_ in values.objects:
        found |= {rule.value for rule in object_.rules + object_.exists}
    return found


def _both_arrays(one: ArrayShape, two: ArrayShape, join: Join) -> ArrayShape | None:
    if two == ArrayShape():
        return one
    places = range(max(len(one.prefix), len(two.prefix)))
    shape = ArrayShape(
        tuple(join(one.item(place), two.item(place)) for place in places),
        join(one.rest, two.rest),
        max(one.least, two.least),
        _smaller(one.most, two.most),
        tuple(dict.fromkeys(one.contains + two.contains)),
        one.is_unique or two.is_unique,
        one.has_duplicates or two.has_duplicates,
    )
    first_impossible = next((place for place in places if shape.prefix[place] == FALSE), None)
    if first_impossible is None and shape.rest == FALSE:
        first_impossible = len(shape.prefix)
    if first_impossible is not None:
        shape = shape._replace(most=_smaller(shape.most, first_impossible))
    if shape.most is not None and shape.least > shape.most:
        return None
    return None if shape.is_unique and shape.has_duplicates else shape


def _smaller(one: int | None, two: int | None) -> int | None:
    return two if one is None else one if two is None else min(one, two)


def _limited(shapes: list[S], whole: S | None = None) -> tuple[S, ...]:
    """Without repetitions. `whole`: the shape that has all the others."""
    kept = tuple(dict.fromkeys(shapes))
    if whole is not None and whole in kept:
        return (whole,)
    if len(kept) > MAX_ALTERNATIVES:
        raise Refusal(TOO_MANY)
    return kept
