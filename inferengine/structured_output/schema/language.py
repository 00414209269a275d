"""Regular languages of texts: union, concatenation, repetition, intersection and complement.

A language is a tree of immutable nodes. `is_empty` and `matches` follow Brzozowski's derivatives ("Derivatives of
Regular Expressions", 1964). `to_terminal` writes a language as a terminal of llguidance's Lark, which has intersection
and complement itself; for JSON strings each character then has one spelling only, so both mean the same there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
    """One character of these ranges of code points."""
    merged = merge(ranges)
    kept = invert(invert(merged)) if any(low <= 0xDFFF and high >= 0xD800 for low, high in merged) else merged
    return Language("chars", ranges=kept) if kept else EMPTY


def literal(text: str) -> Language:
    """Exactly this text."""
    return cat(*(chars([(ord(character), ord(character))]) for character in text))


def cat(*items: Language) -> Language:
    """One after the other."""
    flat: list[Language] = []
    for item in items:
        if item is EMPTY or item == EMPTY:
            return EMPTY
        flat.extend(item.items if item.kind == "cat" else (item,))
    return flat[0] if len(flat) == 1 else Language("cat", tuple(flat))


def alt(*items: Language) -> Language:
    """Any of these."""
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
    """`least` to `most` times; None: any number."""
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
    """All of these at once."""
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
    """Every other text."""
    if item.kind == "not":
        return item.items[0]
    if item == EMPTY:
        return ALL
    return EMPTY if item == ALL else Language("not", (item,))


def length(least: int, most: int | None) -> Language:
    """Texts of so many characters."""
    return repeat(ANY, least, most)


def words(item: Language) -> list[str] | None:
    """The texts of a language that is a list of them; None: it is not, or has too many."""
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
    """What may follow the character `code`."""
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
    """Whether the language has this text."""
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
    """Whether no text is in the language. False also where that takes too long to find out."""
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
    """One character of each class that the language does not tell apart."""
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
    """Write a language as the right side of a Lark terminal. `quoted`: as JSON strings, with their quotes."""
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
    """The characters as JSON spells them: short escapes, and \\u only for the other control characters."""
    raw = invert(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)), ranges)
    choices = [_class(raw)] if raw else []
    for code in (*range(0x20), 0x22, 0x5C):
        if any(low <= code <= high for low, high in ranges):
            choices.append(_SHORT.get(code) or rf"\\u{code:04x}")
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
