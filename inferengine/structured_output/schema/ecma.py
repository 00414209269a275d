"""Reads regular expressions of ECMA-262, the dialect of JSON Schema's `pattern`, into a Language.

Lookaround, word boundaries and back references are refused by name: they are no matter of one character after the
other, and the engine behind has none of them.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

from inferengine.structured_output.schema.language import (
    END,
    EPSILON,
    START,
    Language,
    Ranges,
    alt,
    cat,
    chars,
    invert,
    merge,
    repeat,
    without_anchors,
)
from inferengine.structured_output.schema.refusal import Refusal

MAX_REPEAT = 100_000
MAX_GROUPS = 100  # one inside another
LOOKAROUND = (
    "{found} (lookaround) is not supported: write what may stand there itself, such as [a-z]+[0-9] for (?=.*[0-9]); in "
    'a JSON schema two conditions are two patterns in allOf, and what must not match is {{"not": {{"pattern": …}}}}'
)
BOUNDARY = (
    "{found} (word boundary) is not supported: write the characters that may stand beside the word, such as "
    "(^|[^A-Za-z0-9_])word([^A-Za-z0-9_]|$)"
)
BACK_REFERENCE = "{found} (back reference) is not supported: write the text again, or one alternative for each text"
EDGE = "{found} is not of ECMA-262: write ^ for the beginning and $ for the end"
FLAGS = "{found} (flags inside an expression) are not supported: write both cases, such as [Aa]"

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = merge([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACES = (0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
SPACE: Ranges = merge([(9, 13), *((code, code) for code in _SPACES)])
NEWLINE: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_SETS = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_PROPERTY = re.compile(r"[pP]\{(?:(?:General_Category|gc)=)?(\w+)\}")
_LONG_NAMES = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Titlecase_Letter": "Lt", "Mark": "M",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd",
    "Letter_Number": "Nl", "Other_Number": "No", "Punctuation": "P", "punct": "P", "Symbol": "S", "Separator": "Z",
    "Space_Separator": "Zs", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Control": "Cc",
}  # fmt: skip
_CATEGORIES = frozenset(
    {"L", "Ll", "Lu", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Ps", "Pe", "Pi"}
    | {"Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "Cc", "Cf"}
)


def read_pattern(pattern: str) -> Language:
    """Return the texts in which `pattern` matches somewhere. Raises Refusal naming what it has."""
    return without_anchors(_Reader(pattern).read())


def check_expression(pattern: str) -> None:
    """Raise Refusal where an expression of another dialect has lookaround, a word boundary or a back reference."""
    place, in_class = 0, False
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            following = pattern[place + 1 : place + 2]
            if not in_class and following in ("b", "B"):
                raise Refusal(BOUNDARY.format(found=f"\\{following}"))
            if not in_class and following in tuple("123456789k"):
                raise Refusal(BACK_REFERENCE.format(found=f"\\{following}"))
            place += 1
        elif character == "[":
            in_class = True
        elif character == "]":
            in_class = False
        elif not in_class and (found := _lookaround(pattern, place)):
            raise Refusal(LOOKAROUND.format(found=found))
        place += 1


def _lookaround(pattern: str, place: int) -> str | None:
    return next((sign for sign in ("(?=", "(?!", "(?<=", "(?<!") if pattern.startswith(sign, place)), None)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._place = 0
        self._depth = 0

    def read(self) -> Language:
        found = self._alternatives()
        if self._place < len(self._text):
            raise Refusal(f"pattern: ) without ( at character {self._place}")
        return found

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._place):
            self._place += len(text)
            return True
        return False

    def _alternatives(self) -> Language:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return alt(*found)

    def _sequence(self) -> Language:
        items: list[Language] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._quantified(self._atom()))
        return cat(*items)

    def _quantified(self, atom: Language) -> Language:
        least, most = 1, 1
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        sign = self._peek()
        if sign in bounds:
            self._place += 1
            low, high = bounds[sign]
        elif (match := _COUNT.match(self._text, self._place)) is not None:
            self._place = match.end()
            low = int(match[1])
            high = low if match[2] is None else int(match[3]) if match[3] else None
            if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
                raise Refusal(f"pattern: {match[0]} repeats too often, or less than it must")
        else:
            low, high = least, most
        self._take("?")  # lazy or not, the same texts
        if atom in (START, END):
            return EPSILON if low == 0 else atom
        return repeat(atom, low, high)

    def _atom(self) -> Language:
        if found := _lookaround(self._text, self._place):
            raise Refusal(f"pattern: {LOOKAROUND.format(found=found)}")
        character = self._peek()
        self._place += 1
        if character == "(":
            return self._group()
        if character == "[":
            return chars(self._class())
        if character == "\\":
            return self._escape()
        if character in ("*", "+", "?"):
            raise Refusal(f"pattern: {character} repeats nothing at character {self._place - 1}")
        named = {"^": START, "$": END, ".": chars(invert(NEWLINE))}
        return named.get(character) or chars([(ord(character), ord(character))])

    def _group(self) -> Language:
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise Refusal(f"pattern: has more than {MAX_GROUPS} groups inside each other")
        if self._take("?") and not self._take(":"):
            named = re.compile(r"P?<\w+>").match(self._text, self._place)
            if named is None:
                raise Refusal(f"pattern: {FLAGS.format(found='(?' + self._text[self._place : self._place + 2])}")
            self._place = named.end()
        found = self._alternatives()
        if not self._take(")"):
            raise Refusal("pattern: ( without )")
        self._depth -= 1
        return found

    def _escape(self) -> Language:
        character = self._peek()
        if character in ("b", "B"):
            raise Refusal(f"pattern: {BOUNDARY.format(found=chr(92) + character)}")
        if character == "k" or (character.isdigit() and character != "0"):
            raise Refusal(f"pattern: {BACK_REFERENCE.format(found=chr(92) + character)}")
        if character in ("A", "Z", "z", "G"):
            raise Refusal(f"pattern: {EDGE.format(found=chr(92) + character)}")
        return chars(self._escaped_set())

    def _escaped_set(self) -> Ranges:
        """What an escape stands for, in a class or outside. The backslash is read."""
        character = self._peek()
        if character == "":
            raise Refusal("pattern: ends with a backslash")
        if character.lower() in _SETS:
            self._place += 1
            found = _SETS[character.lower()]
            return found if character.islower() else invert(found)
        if character in ("p", "P"):
            match = _PROPERTY.match(self._text, self._place)
            category = _LONG_NAMES.get(match[1], match[1]) if match else None
            if match is None or category not in _CATEGORIES:
                raise Refusal("pattern: \\p knows general categories only, such as \\p{L} or \\p{Nd}: list the ranges")
            self._place = match.end()
            return _category(category) if character == "p" else invert(_category(category))
        code = self._code_point()
        return ((code, code),)

    def _code_point(self) -> int:
        character = self._peek()
        for form in (r"u\{([0-9a-fA-F]{1,6})\}", "u([0-9a-fA-F]{4})", "x([0-9a-fA-F]{2})"):
            if (match := re.compile(form).match(self._text, self._place)) is not None:
                self._place = match.end()
                return self._low_surrogate(min(int(match[1], 16), sys.maxunicode))
        if character == "c" and self._text[self._place + 1 : self._place + 2].isalpha():
            self._place += 2
            return ord(self._text[self._place - 1]) % 32
        self._place += 1
        if character == "0":
            return 0
        return _CONTROLS.get(character, ord(character))

    def _low_surrogate(self, high: int) -> int:
        """Join the halves of a pair that is written as two escapes."""
        match = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._place)
        if not 0xD800 <= high <= 0xDBFF or match is None:
            return high
        self._place = match.end()
        return 0x10000 + ((high - 0xD800) << 10) + int(match[1], 16) - 0xDC00

    def _class(self) -> Ranges:
        inverted = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._class_item()
            if self._peek() == "-" and self._text[self._place + 1 : self._place + 2] not in ("]", ""):
                self._place += 1
                high = self._class_item()
                if len(low) > 1 or len(high) > 1 or low[0][0] > high[0][1]:
                    raise Refusal("pattern: a range in a class is not in order")
                found.append((low[0][0], high[0][1]))
            else:
                found += low
        return invert(merge(found)) if inverted else merge(found)

    def _class_item(self) -> Ranges:
        character = self._peek()
        if character == "":
            raise Refusal("pattern: [ without ]")
        self._place += 1
        if character == "\\":
            if self._take("b"):
                return ((8, 8),)
            return self._escaped_set()
        return ((ord(character), ord(character)),)


@cache
def _category(name: str) -> Ranges:
    return merge((low, high) for category, low, high in _runs() if category.startswith(name))


@cache
def _runs() -> list[tuple[str, int, int]]:
    """Characters in order, joined where they have the same category. Planes without any are left out."""
    runs: list[tuple[str, int, int]] = []
    for code in (*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200)):
        category = unicodedata.category(chr(code))
        if runs and runs[-1][0] == category and runs[-1][2] == code - 1:
            runs[-1] = category, runs[-1][1], code
        else:
            runs.append((category, code, code))
    return runs
