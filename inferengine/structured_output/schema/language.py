"""Regular languages of texts: union, concatenation, repetition, intersection and complement; and what a schema writes
as one, `pattern` and `format`.

A language is a tree of immutable nodes. `is_empty` and `matches` follow Brzozowski's derivatives ("Derivatives of
Regular Expressions", 1964). `to_terminal` writes a language as a terminal of llguidance's Lark, which has intersection
and complement itself; for JSON strings each character then has one spelling only, so both mean the same there.

`read_pattern` reads regular expressions of ECMA-262, the dialect of JSON Schema's `pattern`. Lookaround, word
boundaries and back references are refused by name: they are no matter of one character after the other, and the engine
behind has none of them. `pattern_of` has the `format` names that are enforced, as expressions of ECMA-262. Any other
name is annotation, as the specification says of all.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache


class Refusal(ValueError):
    """The keyword, what is the matter, and the remedy, as one sentence without its subject."""


# -- languages ---------------------------------------------------------------------------------------------------------


Ranges = tuple[tuple[int, int], ...]  # of code points, inclusive, ascending, apart

LAST = 0x10FFFF
ANY_RANGES: Ranges = ((0, 0xD7FF), (0xE000, LAST))  # half a surrogate pair is no character
MAX_DERIVATIVES = 20_000
MAX_WORDS = 4096
_SHORT = {0x22: '\\\\"', 0x5C: r"\\\\", 8: r"\\b", 9: r"\\t", 10: r"\\n", 12: r"\\f", 13: r"\\r"}
_PLAIN = set(map(ord, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ ,:;=@%!~<>"))


class Language:
    """A set of texts. Made by the functions below, which simplify; equal trees are equal."""

    __slots__ = ("_hash", "_listed", "has_logic", "is_nullable", "items", "kind", "least", "most", "ranges")

    def __init__(
        self,
        kind: str,
        items: tuple[Language, ...] = (),
        *,
        ranges: Ranges = (),
        least: int = 0,
        most: int | None = None,
    ) -> None:
        self.kind, self.items, self.ranges, self.least, self.most = kind, items, ranges, least, most
        self._hash = hash((kind, items, ranges, least, most))
        self._listed: frozenset[str] | bool | None = False  # not looked up yet; None: it is no list of texts
        self.has_logic: bool = kind in ("both", "not") or any(item.has_logic for item in items)
        self.is_nullable: bool = self._nullable()

    def _nullable(self) -> bool:
        if self.kind in ("cat", "both"):
            return all(item.is_nullable for item in self.items)
        if self.kind == "alt":
            return any(item.is_nullable for item in self.items)
        if self.kind == "repeat":
            return self.least == 0 or self.items[0].is_nullable
        return self.kind == "not" and not self.items[0].is_nullable

    @property
    def listed(self) -> frozenset[str] | None:
        """The texts of a language that is a list of them; None: it is not, or has too many."""
        if isinstance(self._listed, bool):
            found = words(self)
            self._listed = None if found is None else frozenset(found)
        return self._listed

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Language)
            and self._hash == other._hash
            and (self.kind, self.ranges, self.least, self.most) == (other.kind, other.ranges, other.least, other.most)
            and self.items == other.items
        )


EMPTY = Language("alt")
EPSILON = Language("cat")
START = Language("start")  # ^ and $, until `without_anchors`
END = Language("end")


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, joined where they touch."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def invert(ranges: Ranges, universe: Ranges = ANY_RANGES) -> Ranges:
    """Return what `universe` has and `ranges` has not."""
    left: list[tuple[int, int]] = []
    for low, high in universe:
        for first, last in ranges:
            if last < low or first > high:
                continue
            if first > low:
                left.append((low, first - 1))
            low = last + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)


def chars(ranges: Iterable[tuple[int, int]]) -> Language:
    """Return the language of one character of these ranges of code points."""
    merged = merge(ranges)
    kept = invert(invert(merged)) if any(low <= 0xDFFF and high >= 0xD800 for low, high in merged) else merged
    return Language("chars", ranges=kept) if kept else EMPTY


def literal(text: str) -> Language:
    """Return the language of exactly this text."""
    return cat(*(chars([(ord(character), ord(character))]) for character in text))


def cat(*items: Language) -> Language:
    """Return the concatenation of languages."""
    flat: list[Language] = []
    for item in items:
        if item is EMPTY or item == EMPTY:
            return EMPTY
        flat.extend(item.items if item.kind == "cat" else (item,))
    return flat[0] if len(flat) == 1 else Language("cat", tuple(flat))


def alt(*items: Language) -> Language:
    """Return the union of languages."""
    flat: dict[Language, None] = {}
    ranges: list[tuple[int, int]] = []
    for item in items:
        for one in item.items if item.kind == "alt" else (item,):
            if one.kind == "chars":
                ranges += one.ranges
            else:
                flat[one] = None
    if ranges:
        flat[chars(ranges)] = None
    if ALL in flat:
        return ALL
    return next(iter(flat)) if len(flat) == 1 else Language("alt", tuple(flat))


def repeat(item: Language, least: int, most: int | None) -> Language:
    """Return a language repeated `least` to `most` times; None: any number. With `most` below `least`: no text."""
    if most is not None and least > most:
        return EMPTY
    if most == 0 or (item == EMPTY and least == 0) or item == EPSILON:
        return EPSILON
    if item == EMPTY or (least, most) == (1, 1):
        return item
    if item.kind == "repeat" and item.least == 0 and item.most is None and most is None and least <= 1:
        return item
    return Language("repeat", (item,), least=least, most=most)


ANY = chars(ANY_RANGES)
ALL = repeat(ANY, 0, None)


def both(*items: Language) -> Language:
    """Return the intersection of languages."""
    flat: dict[Language, None] = {}
    for item in items:
        flat.update(dict.fromkeys(item.items if item.kind == "both" else (item,)))
    flat.pop(ALL, None)
    if EMPTY in flat or any(item.kind == "not" and item.items[0] in flat for item in flat):
        return EMPTY
    for item in flat:
        if item.listed is not None:
            rest = [other for other in flat if other is not item]
            return alt(*(literal(word) for word in words(item) or () if all(matches(other, word) for other in rest)))
    if not flat:
        return ALL
    return next(iter(flat)) if len(flat) == 1 else Language("both", tuple(flat))


def complement(item: Language) -> Language:
    """Return the language of every other text."""
    if item.kind == "not":
        return item.items[0]
    if item == EMPTY:
        return ALL
    return EMPTY if item == ALL else Language("not", (item,))


def length(least: int, most: int | None) -> Language:
    """Return the language of texts of so many characters."""
    return repeat(ANY, least, most)


def words(item: Language) -> list[str] | None:
    """Return the texts of a language that is a list of them; None: it is not, or has too many."""
    if item.kind == "alt":
        lists = [words(one) for one in item.items]
        if len(lists) > MAX_WORDS or any(listed is None for listed in lists):
            return None
        return [word for listed in lists for word in listed or ()]
    found = [""]
    for part in item.items if item.kind == "cat" else (item,):
        count = sum(high - low + 1 for low, high in part.ranges)
        if part.kind != "chars" or len(found) * count > MAX_WORDS:
            return None
        codes = [code for low, high in part.ranges for code in range(low, high + 1)]
        found = [before + chr(code) for before in found for code in codes]
    return found


def derive(item: Language, code: int) -> Language:
    """Return the derivative: what may follow the character `code`."""
    if item.kind == "chars":
        return EPSILON if any(low <= code <= high for low, high in item.ranges) else EMPTY
    if item.kind == "alt":
        return alt(*(derive(one, code) for one in item.items))
    if item.kind == "both":
        return both(*(derive(one, code) for one in item.items))
    if item.kind == "not":
        return complement(derive(item.items[0], code))
    if item.kind == "repeat":
        most = None if item.most is None else item.most - 1
        return cat(derive(item.items[0], code), repeat(item.items[0], max(0, item.least - 1), most))
    if not item.items:  # the empty text
        return EMPTY
    first, rest = item.items[0], cat(*item.items[1:])
    after = cat(derive(first, code), rest)
    return alt(after, derive(rest, code)) if first.is_nullable else after


def matches(item: Language, text: str) -> bool:
    """Return whether the language has this text."""
    if item.kind == "not":
        return not matches(item.items[0], text)
    if item.listed is not None:
        return text in item.listed
    for character in text:
        item = derive(item, ord(character))
        if item == EMPTY:
            return False
    return item.is_nullable


def is_empty(item: Language) -> bool:
    """Return whether no text is in the language. False also where that takes too long to find out."""
    if not item.has_logic:
        return item == EMPTY
    starts = _representatives(item)
    seen, queue, left = {item}, [item], MAX_DERIVATIVES
    while queue:
        state = queue.pop()
        if state.is_nullable or left < 0:
            return False
        for code in starts:
            left -= 1
            after = derive(state, code)
            if after != EMPTY and after not in seen:
                seen.add(after)
                queue.append(after)
    return True


def _representatives(item: Language) -> list[int]:
    """Return one character of each class that the language does not tell apart."""
    ends = {0, 0xE000}
    seen: set[Language] = set()
    queue = [item]
    while queue:
        one = queue.pop()
        if one in seen:
            continue
        seen.add(one)
        queue += one.items
        for low, high in one.ranges:
            ends |= {low, high + 1}
    return sorted(code for code in ends if code <= LAST and not 0xD800 <= code <= 0xDFFF)


def without_anchors(item: Language) -> Language:
    """Resolve ^ and $ of an expression that may match anywhere in a text."""
    found = cat(ALL, item, ALL)
    return _resolve(_resolve(found, START, forward=True), END, forward=False)


def _has(item: Language, anchor: Language) -> bool:
    return item is anchor or any(_has(one, anchor) for one in item.items)


def _resolve(item: Language, anchor: Language, *, forward: bool, at_edge: bool = True) -> Language:
    """Replace `anchor` by the empty text where it stands at the edge, and by nothing elsewhere."""
    if not _has(item, anchor):
        return item
    if item is anchor:
        return EPSILON if at_edge else EMPTY
    if item.kind == "alt":
        return alt(*(_resolve(one, anchor, forward=forward, at_edge=at_edge) for one in item.items))
    if item.kind == "repeat":
        inner = _resolve(item.items[0], anchor, forward=forward, at_edge=False)
        if not at_edge:
            return repeat(inner, item.least, item.most)
        edge = _resolve(item.items[0], anchor, forward=forward, at_edge=True)
        least, most = max(0, item.least - 1), None if item.most is None else item.most - 1
        rest = repeat(inner, 0 if edge.is_nullable else least, most)
        some = cat(edge, rest) if forward else cat(rest, edge)
        return alt(EPSILON, some) if item.least == 0 else some
    parts = item.items if forward else item.items[::-1]
    first, others = parts[0], parts[1:]
    rest = cat(*others) if forward else cat(*others[::-1])
    head = _resolve(first, anchor, forward=forward, at_edge=at_edge)
    tail = _resolve(rest, anchor, forward=forward, at_edge=False)
    joined = cat(head, tail) if forward else cat(tail, head)
    if at_edge and head.is_nullable:
        return alt(joined, _resolve(rest, anchor, forward=forward, at_edge=True))
    return joined


def to_terminal(item: Language, *, quoted: bool) -> str:
    """Write a language as the right side of a Lark terminal. `quoted`: as JSON strings, with their quotes. Raises
    ValueError for an intersection inside a concatenation."""
    if not item.has_logic:
        return f'/"{to_regex(item, quoted=True)}"/' if quoted else f"/{to_regex(item)}/"
    if item.kind == "not":
        rest = f"~{to_terminal(item.items[0], quoted=quoted)}"
        return f"({to_terminal(ALL, quoted=quoted)} & {rest})"
    if item.kind not in ("alt", "both"):
        raise ValueError("an intersection inside a concatenation cannot be written")
    if item.kind == "both":  # what is wanted first: complements alone would need every text beside them
        wanted = [to_terminal(one, quoted=quoted) for one in item.items if one.kind != "not"]
        unwanted = [f"~{to_terminal(one.items[0], quoted=quoted)}" for one in item.items if one.kind == "not"]
        return f"({' & '.join([*(wanted or [to_terminal(ALL, quoted=quoted)]), *unwanted])})"
    return f"({' | '.join(to_terminal(one, quoted=quoted) for one in item.items)})"


def to_regex(item: Language, *, quoted: bool = False) -> str:
    """Write a language without intersection and complement as a regular expression of the Rust crate `regex`."""
    if item.kind == "chars":
        return _chars_quoted(item.ranges) if quoted else _class(item.ranges)
    if item.kind == "cat":
        return "".join(to_regex(one, quoted=quoted) for one in item.items)
    if item.kind == "alt":
        return f"(?:{'|'.join(to_regex(one, quoted=quoted) for one in item.items)})"
    body = to_regex(item.items[0], quoted=quoted)
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    most = "" if item.most is None else item.most
    times = counts.get((item.least, item.most), f"{{{item.least},{most}}}")
    return f"(?:{body}){times}"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    parts = (_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _code(code: int) -> str:
    return chr(code) if code in _PLAIN else f"\\x{{{code:x}}}"


@lru_cache(256)
def _chars_quoted(ranges: Ranges) -> str:
    """Return the characters as JSON spells them: short escapes, and \\u only for the other control characters."""
    raw = invert(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)), ranges)
    choices = [_class(raw)] if raw else []
    for code in (*range(0x20), 0x22, 0x5C):
        if any(low <= code <= high for low, high in ranges):
            choices.append(_SHORT.get(code) or rf"\\u{code:04x}")
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


# -- patterns ----------------------------------------------------------------------------------------------------------


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
        """Read what an escape stands for, in a class or outside. The backslash has been read."""
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
    """Return the runs of characters of the same category, in order. Planes without any are left out."""
    runs: list[tuple[str, int, int]] = []
    for code in (*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200)):
        category = unicodedata.category(chr(code))
        if runs and runs[-1][0] == category and runs[-1][2] == code - 1:
            runs[-1] = category, runs[-1][1], code
        else:
            runs.append((category, code, code))
    return runs


# -- formats -----------------------------------------------------------------------------------------------------------


_MONTHS_DAYS = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = rf"(?:\d{{4}}-{_MONTHS_DAYS}|{_LEAP_YEAR}-02-29)"
_ZONE = r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?{_ZONE}"
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# No -- at the third place: such labels are encoded, and what they encode has rules of its own.
_LABEL = f"{_ALNUM}(?:(?:{_INNER}?|{_INNER}{_ALNUM}{_INNER}{{0,59}}|{_INNER}-(?:{_ALNUM}{_INNER}{{0,58}})?){_ALNUM})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{6}}{_IPV4}",
        *(f"(?:{_H}(?::{_H}){{0,{left}}})?::(?:{_H}(?::{_H}){{0,{5 - left}}})?" for left in range(6)),
        *(f"(?:{_H}(?::{_H}){{0,{left}}})?::(?:{_H}:){{0,{4 - left}}}{_IPV4}" for left in range(5)),
        f"(?:{_H}(?::{_H}){{0,6}})::",
        f"::{_H}(?::{_H}){{0,6}}",
    ]
)
_PART = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
_FIRST = r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]|[A-Za-z0-9._~!$&'()*+,;=:@?-]|%[0-9A-Fa-f]{2})"
_USER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*"
_NAME = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": rf"P(?:\d+W|{_CLOCK}|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_USER}@)?(?:{_NAME}|\[(?:{_IPV6})\])(?::\d*)?(?:[/?]{_PART}*)?"
    rf"|{_FIRST}{_PART}*)(?:#{_PART}*)?",
}


def pattern_of(name: str) -> str | None:
    """Return the expression that a whole text of this format matches; None: it is annotation."""
    found = FORMATS.get(name)
    return None if found is None else f"^(?:{found})$"
