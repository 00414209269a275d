"""Sets of JSON values: NumberSet, and ValueSet, one union of alternatives for each type. Closed under union,
intersection and complement, which is what `not`, `oneOf` and `if` need.

NumberSet has numbers between bounds that are, or are not, multiples of others, and says how they are written in JSON.
Bounds become regular expressions over decimal digits. Multiples other than whole numbers are left to llguidance, which
counts remainders.

Schemas inside arrays and objects are numbers of expressions (`algebra.py`), so a set is finite where a schema is
recursive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple, TypeVar

from inferengine.structured_output.schema.language import (
    ALL,
    EMPTY,
    Language,
    Refusal,
    alt,
    both,
    cat,
    chars,
    complement,
    is_empty,
    literal,
    matches,
    repeat,
    words,
)

MAX_LISTED = 1000  # whole numbers of a range that are written one by one
MAX_MULTIPLE = 100_000  # its remainders are the states of an automaton
MAX_DIGITS = 400  # of a bound
SIGNIFICANT_DIGITS = 15  # that a float keeps: more could round to a bound that is excluded

_DIGIT = chars([(0x30, 0x39)])
_NONZERO = chars([(0x31, 0x39)])
_DIGITS = repeat(_DIGIT, 0, None)
_NONZERO_DIGITS = cat(_DIGITS, _NONZERO, _DIGITS)
_MINUS = literal("-")
_SIGN = repeat(_MINUS, 0, 1)
_WHOLE = alt(literal("0"), cat(_NONZERO, _DIGITS))
_POINT = literal(".")
_SOME_FRACTION = repeat(cat(_POINT, repeat(_DIGIT, 1, None)), 0, 1)
_EXPONENT = cat(chars([(0x45, 0x45), (0x65, 0x65)]), repeat(alt(literal("+"), _MINUS), 0, 1), repeat(_DIGIT, 1, None))
INTEGER_TEXT = cat(_SIGN, _WHOLE)
NUMBER_TEXT = cat(_SIGN, _WHOLE, _SOME_FRACTION, repeat(_EXPONENT, 0, 1))


@dataclass(frozen=True, slots=True)
class NumberSet:
    """Numbers from `low` to `high`; an open end is not part of it. `multiple`: all are multiples of it."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: Fraction | None = None
    not_multiples: frozenset[Fraction] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether surely no number is in it."""
        if self.multiple is not None and any((self.multiple / other).denominator == 1 for other in self.not_multiples):
            return True
        if self.low is None or self.high is None:
            return False
        low, high = self.low, self.high
        if low > high or (low == high and (self.low_open or self.high_open)):
            return True
        if self.multiple is not None:
            return self._first_multiple() is None
        return low == high and any((low / other).denominator == 1 for other in self.not_multiples)

    def _first_multiple(self) -> Fraction | None:
        """Return the least multiple between the bounds. There must be both, and `multiple`."""
        assert self.low is not None
        assert self.high is not None
        assert self.multiple is not None
        first = math.ceil(self.low / self.multiple) * self.multiple
        if first == self.low and self.low_open:
            first += self.multiple
        return first if first < self.high or (first == self.high and not self.high_open) else None

    def intersect(self, other: NumberSet) -> NumberSet:
        """Return what both have."""
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, sign=1)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, sign=-1)
        multiple = self.multiple or other.multiple
        if self.multiple is not None and other.multiple is not None:
            multiple = _common_multiple(self.multiple, other.multiple)
        return NumberSet(low, high, low_open, high_open, multiple, self.not_multiples | other.not_multiples)

    def complement(self) -> list[NumberSet]:
        """Return the sets that together have every other number."""
        found = []
        if self.low is not None:
            found.append(NumberSet(high=self.low, high_open=not self.low_open))
        if self.high is not None:
            found.append(NumberSet(low=self.high, low_open=not self.high_open))
        if self.multiple is not None:
            found.append(NumberSet(not_multiples=frozenset([self.multiple])))
        return [*found, *(NumberSet(multiple=other) for other in self.not_multiples)]

    def write(self) -> Language | dict[str, Any]:
        """Return the texts of these numbers, or the JSON schema of them that llguidance takes. Raises Refusal."""
        if self.low is not None and self.low == self.high:
            return EMPTY if self.is_empty else literal(_decimal_text(self.low))
        if self.not_multiples - {Fraction(1)} or (self.multiple not in (None, 1) and self.not_multiples):
            return self._listed("not with multipleOf")
        if self.multiple not in (None, 1):
            return self._multiples()
        if self.low is None and self.high is None and not self.not_multiples:
            return NUMBER_TEXT if self.multiple is None else INTEGER_TEXT
        return both(self._form(), *self._bounds())

    def _form(self) -> Language:
        if self.multiple is not None:
            return INTEGER_TEXT
        bounds = [_digits(bound) for bound in (self.low, self.high) if bound is not None]
        if self.not_multiples:  # few enough digits that a float keeps the fraction
            whole = alt(literal("0"), cat(_NONZERO, repeat(_DIGIT, 0, 8)))
            places = max(6, *(len(fraction) + 1 for _, fraction in bounds)) if bounds else 6
            some = [cat(repeat(_DIGIT, 0, places - 1), _NONZERO)]
            return cat(_SIGN, whole, _POINT, *some)
        places = max(1, SIGNIFICANT_DIGITS - max(len(whole) for whole, _ in bounds))
        places = max(places, *(len(fraction) + 1 for _, fraction in bounds))
        return cat(_SIGN, _WHOLE, repeat(cat(_POINT, repeat(_DIGIT, 1, places)), 0, 1))

    def _bounds(self) -> list[Language]:
        found: list[Language] = []
        if self.low is not None:
            if self.low > 0 or (self.low == 0 and self.low_open):
                found.append(_above(self.low, self.low_open))
            else:
                found.append(complement(cat(_MINUS, _above(-self.low, not self.low_open))))
                if self.low == 0:  # -0 is 0, but nobody needs it
                    found.append(complement(cat(_MINUS, _WHOLE, _SOME_FRACTION)))
        if self.high is not None:
            if self.high < 0 or (self.high == 0 and self.high_open):
                found.append(cat(_MINUS, _above(-self.high, self.high_open)))
            else:
                found.append(complement(_above(self.high, not self.high_open)))
        return found

    def _multiples(self) -> dict[str, Any]:
        assert self.multiple is not None
        if int(_decimal_text(self.multiple).replace(".", "")) > MAX_MULTIPLE:
            raise Refusal(f"multipleOf {float(self.multiple)!r} has too many digits: use a rounder one")
        try:
            schema: dict[str, Any] = {"type": "number", "multipleOf": _json_number(self.multiple)}
        except Refusal:
            raise Refusal(f"multipleOf {float(self.multiple)!r} has too many digits: use a rounder one") from None
        if self.multiple.denominator == 1:
            schema["type"] = "integer"
        if self.low is not None:
            schema["exclusiveMinimum" if self.low_open else "minimum"] = _json_number(self.low)
        if self.high is not None:
            schema["exclusiveMaximum" if self.high_open else "maximum"] = _json_number(self.high)
        return schema

    def _listed(self, keyword: str) -> Language:
        """Return the numbers one by one, where they are few."""
        if self.low is not None and self.high is not None and self.multiple is not None and not self.is_empty:
            number = self._first_multiple()
            found: list[Language] = []
            while number is not None and len(found) < MAX_LISTED:
                if not any((number / other).denominator == 1 for other in self.not_multiples):
                    found.append(literal(_decimal_text(number)))
                number = NumberSet(number, self.high, True, self.high_open, self.multiple)._first_multiple()
            if number is None:
                return alt(*found)
        raise Refusal(f"{keyword} has no grammar: list the numbers in an enum")


def to_fraction(value: int | float) -> Fraction:
    """Return a number of a schema as it is written. Raises Refusal for what is none, or too long."""
    try:
        number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if number.is_finite() and abs(number.adjusted()) < MAX_DIGITS:
            return Fraction(number)
    except (InvalidOperation, OverflowError):
        pass
    raise Refusal(f"a number of the schema has more than {MAX_DIGITS} digits: use a smaller one")


def _tighter(
    one: Fraction | None, one_open: bool, two: Fraction | None, two_open: bool, sign: int
) -> tuple[Fraction | None, bool]:
    if one is None or two is None:
        return (two, two_open) if one is None else (one, one_open)
    if one == two:
        return one, one_open or two_open
    return (one, one_open) if sign * (one - two) > 0 else (two, two_open)


def _common_multiple(one: Fraction, two: Fraction) -> Fraction:
    bottom = one.denominator * two.denominator
    return Fraction(math.lcm(one.numerator * two.denominator, two.numerator * one.denominator), bottom)


def _digits(value: Fraction) -> tuple[str, str]:
    """Return the digits before and after the point of the absolute value."""
    whole, _, fraction = _decimal_text(abs(value)).partition(".")
    return whole, fraction


def _decimal_text(value: Fraction) -> str:
    """Write a fraction of a decimal number, without exponent."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
        if places > 2 * MAX_DIGITS:
            raise Refusal("a number of the schema has too many digits: use a rounder one")
    number = abs(int(value * 10**places))
    text = str(number).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{text[:-places]}.{text[-places:]}" if places else f"{sign}{text}"


def _json_number(value: Fraction) -> int | float:
    number: int | float = int(value) if value.denominator == 1 else float(value)
    if len(_decimal_text(value)) > SIGNIFICANT_DIGITS:
        raise Refusal("a bound beside multipleOf has too many digits: use a rounder one")
    return number


def _above(bound: Fraction, is_open: bool) -> Language:
    """Return the texts, without sign, of numbers at or above `bound`, which is not negative; above it where
    `is_open`."""
    whole, fraction = _digits(bound)
    choices = [cat(_NONZERO, repeat(_DIGIT, len(whole), None), _SOME_FRACTION)]
    for place, digit in enumerate(whole):
        if digit != "9":
            higher = chars([(ord(digit) + 1, 0x39)])
            choices.append(
                cat(literal(whole[:place]), higher, repeat(_DIGIT, *[len(whole) - place - 1] * 2), _SOME_FRACTION)
            )
    if not fraction:
        choices.append(cat(literal(whole), cat(_POINT, _NONZERO_DIGITS) if is_open else _SOME_FRACTION))
        return alt(*choices)
    for place, digit in enumerate(fraction):
        if digit != "9":
            higher = chars([(ord(digit) + 1, 0x39)])
            choices.append(cat(literal(f"{whole}.{fraction[:place]}"), higher, _DIGITS))
    choices.append(cat(literal(f"{whole}.{fraction}"), _NONZERO_DIGITS if is_open else _DIGITS))
    return alt(*choices)


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


# -- values of all types -----------------------------------------------------------------------------------------------


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


class PropertyRule(NamedTuple):
    """The values of properties whose names are in `keys`."""

    keys: Language
    value: Expr


class ObjectShape(NamedTuple):
    """Objects in which each property keeps all rules for its name. `order` are the names in the order of the schema;
    `exists`: there is a property with such a name and such a value."""

    order: tuple[str, ...] = ()
    rules: tuple[PropertyRule, ...] = ()
    required: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None
    exists: tuple[PropertyRule, ...] = ()

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
    """Return whether no type is left. Contents of arrays and objects are not looked at."""
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
        return ObjectShape(tuple(names), (PropertyRule(literal(names[0]), value),), frozenset(names))
    return ObjectShape(exists=(PropertyRule(keys, value),))


def other_objects(shape: ObjectShape, negate: Negate) -> list[ObjectShape]:
    """Return shapes that together have every object that `shape` has not."""
    found = [with_property(rule.keys, negate(rule.value)) for rule in shape.rules if rule.value != TRUE]
    found += [
        ObjectShape((name,), (PropertyRule(literal(name), FALSE),)) for name in shape.order if name in shape.required
    ]
    found += [ObjectShape(most=shape.least - 1)] if shape.least else []
    found += [ObjectShape(least=shape.most + 1)] if shape.most is not None else []
    return found + [ObjectShape(rules=(PropertyRule(rule.keys, negate(rule.value)),)) for rule in shape.exists]


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
    """Return the shapes without repetitions. `whole`: the shape that has all the others."""
    kept = tuple(dict.fromkeys(shapes))
    if whole is not None and whole in kept:
        return (whole,)
    if len(kept) > MAX_ALTERNATIVES:
        raise Refusal(TOO_MANY)
    return kept
