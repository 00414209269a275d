"""NumberSet: numbers between bounds that are, or are not, multiples of others; and how they are written in JSON.

Bounds become regular expressions over decimal digits. Multiples other than whole numbers are left to llguidance, which
counts remainders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from inferengine.structured_output.schema.language import (
    EMPTY,
    Language,
    alt,
    both,
    cat,
    chars,
    complement,
    literal,
    repeat,
)
from inferengine.structured_output.schema.refusal import Refusal

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
        """The least multiple between the bounds. There must be both, and `multiple`."""
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
        """The numbers one by one, where they are few."""
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
    """The digits before and after the point of the absolute value."""
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
    """Texts without sign of numbers at or above `bound`, which is not negative; above it where `is_open`."""
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
