"""GrammarWriter: writes the sets of an Algebra as rules of llguidance's Lark. `schema_rules` does it for a JSON Schema
of draft 2020-12 (and of the older drafts, as far as they agree).

Properties come in the order of the schema, then those that it does not name. Alternatives that lead nowhere are left
out, so that an output never begins what cannot be completed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, NamedTuple

from inferengine.structured_output.schema.algebra import Algebra, Document, evaluated_values
from inferengine.structured_output.schema.language import (
    ALL,
    EMPTY,
    Language,
    Refusal,
    alt,
    both,
    complement,
    is_empty,
    literal,
    matches,
    to_regex,
    to_terminal,
    words,
)
from inferengine.structured_output.schema.value_sets import (
    ANYTHING,
    FALSE,
    TRUE,
    ArrayShape,
    Expr,
    ObjectShape,
    ValueSet,
)

MAX_RULES = 20_000
MAX_CELLS = 64
MAX_UNIQUE = 60  # values that a parameter of a rule, 64 bits, can tell apart
MAX_PLACES = 16
TOO_LARGE = "is too large once it is expanded: lower minItems, minContains and minProperties, or split it"
UNIQUE = (
    "uniqueItems is held for items of an enum (up to 60 values) or booleans, and where maxItems is 1: "
    "remove it, or give the items an enum"
)
MIN_PROPERTIES = (
    "minProperties above 1 counts properties that the schema does not name, which may come twice: name them in "
    "properties, or require some"
)
TWO_UNNAMED = "asks for two properties without names (not with patternProperties or additionalProperties): name them"


class Spacing(NamedTuple):
    """Regular expressions of the punctuation, and llguidance's options for the same."""

    comma: str
    colon: str
    before: str  # before closing brackets
    after: str  # after opening brackets
    options: dict[str, Any]


class Ref(NamedTuple):
    """A rule in the place of a symbol."""

    rule: str


class Many(NamedTuple):
    """Symbols that are repeated."""

    symbols: tuple[Any, ...]
    least: int
    most: int | None


Symbol = str | Ref | Many  # a text is a terminal, as it is written
Alternative = list[Symbol]


@dataclass
class PropertyNames:
    """The properties of an object shape, worked out: what named ones must be, and the others by classes of names."""

    names: list[str]
    values: dict[str, Expr]
    required: frozenset[str]
    cells: list[tuple[Language, Expr]]
    witness: tuple[Language, Expr] | None = None  # a property without a name that must be there; it comes last
    least: int = 0
    most: int | None = None
    pair: Alternative = field(default_factory=list)


class GrammarWriter:
    """Collects rules. `prefix` keeps their names apart from those of other grammars."""

    def __init__(self, algebra: Algebra, spacing: Spacing, prefix: str) -> None:
        self._algebra = algebra
        self._spacing = spacing
        self._prefix = prefix
        self._rules: dict[str, list[Alternative]] = {}
        self._raw: dict[str, str] = {}  # rules that are written as they are
        self._terminals: dict[str, str] = {}
        self._queue: list[Expr] = []

    def write(self, expr: Expr, start: str) -> str:
        """Return the rules of an expression, the first of which is `start`. Raises Refusal, also where no value is
        left."""
        first = self._value(expr)
        while self._queue:
            one = self._queue.pop()
            self._rules[self._rule_of(one)] = list(self._alternatives(self._algebra.values(one)))
        productive = self._productive()
        if isinstance(first, Ref) and first.rule in self._rules and first.rule not in productive:
            raise Refusal("no value can match it: its keywords contradict each other")
        lines = [f"{start}: {_symbol(first)}"]
        for name in self._reachable(first, productive):
            bodies = (self._productive_body(body, productive) for body in self._rules[name])
            kept = dict.fromkeys(_sequence(body) for body in bodies if body is not None)
            lines.append(f"{name}: {' | '.join(kept)}")
        lines += [f"{name}{text}" for name, text in self._raw.items()]
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    # -- rules -------------------------------------------------------------------------------------------------------

    def _rule_of(self, expr: Expr) -> str:
        return f"{self._prefix}_{expr}"

    def _value(self, expr: Expr) -> Symbol:
        name = self._rule_of(expr)
        if expr == TRUE or (name not in self._rules and self._algebra.values(expr) == ANYTHING):
            self._raw[f"{self._prefix}_any"] = f": %json {json.dumps({'x-guidance': self._spacing.options})}"
            return Ref(f"{self._prefix}_any")
        if name not in self._rules:
            self._rules[name] = []
            self._queue.append(expr)
        return Ref(name)

    def _new_rule(self, alternatives: list[Alternative] | None = None) -> str:
        if len(self._rules) > MAX_RULES:
            raise Refusal(TOO_LARGE)
        name = f"{self._prefix}_x{len(self._rules)}"
        self._rules[name] = alternatives or []
        return name

    def _terminal(self, text: str) -> str:
        name = f"{self._prefix.upper()}_T{len(self._terminals)}"
        return self._terminals.setdefault(text, name)

    def _regex(self, text: str) -> str:
        return self._terminal(f"/{text}/")

    def _alternatives(self, values: ValueSet) -> Iterator[Alternative]:
        if values.constants:
            yield [self._regex("|".join(sorted(values.constants)))]
        if not is_empty(values.strings):
            yield [self._terminal(to_terminal(values.strings, quoted=True))]
        texts: list[Language] = []
        for numbers in values.numbers:
            written = numbers.write()
            if isinstance(written, Language):
                texts.append(written)
            else:
                name = f"{self._prefix}_n{len(self._raw)}"
                self._raw[name] = f": %json {json.dumps({**written, 'x-guidance': self._spacing.options})}"
                yield [Ref(name)]
        if (text := alt(*(text for text in texts if not is_empty(text)))) != EMPTY:
            yield [self._terminal(to_terminal(text, quoted=False))]
        for array in values.arrays:
            yield from self._array(array)
        for object_ in values.objects:
            yield from self._object(object_)

    # -- arrays ------------------------------------------------------------------------------------------------------

    @property
    def _comma(self) -> str:
        return self._regex(self._spacing.comma)

    def _brackets(self, opening: str, closing: str, inside: list[Alternative]) -> Iterator[Alternative]:
        first = self._regex(rf"\{opening}{self._spacing.after}")
        last = self._regex(rf"{self._spacing.before}\{closing}")
        if inside == [[]]:
            yield [first, last]
        elif inside:
            yield [first, Ref(self._new_rule(inside)), last]

    def _array(self, shape: ArrayShape) -> Iterator[Alternative]:
        if shape.has_duplicates:
            raise Refusal("not with uniqueItems has no grammar: remove it")
        if shape.rest == FALSE:
            most = len(shape.prefix) if shape.most is None else min(shape.most, len(shape.prefix))
            shape = shape._replace(most=most)
        if shape.is_unique and (shape.most is None or shape.most > 1) and not self._items_differ(shape):
            yield from self._brackets("[", "]", self._unique_items(shape))
        elif shape.contains:
            yield from self._brackets("[", "]", self._counted_items(shape))
        else:
            yield from self._brackets("[", "]", self._plain_items(shape))

    def _plain_items(self, shape: ArrayShape) -> list[Alternative]:
        """Write items of `prefix`, then any number of the others."""
        least, most, fixed = shape.least, shape.most, len(shape.prefix)
        following: list[Alternative] = []  # after all of prefix
        if most is None or most > fixed:
            rest, left = self._value(shape.rest), None if most is None else most - fixed
            need = max(0, least - fixed)
            if fixed:
                following = [[Many((self._comma, rest), need, left)]]
            else:
                more = Many((self._comma, rest), max(0, need - 1), None if left is None else left - 1)
                following = [[rest, more], *([[]] if need == 0 else [])]
        else:
            following = [[]] if least <= fixed else []
        for place in range(fixed - 1, -1, -1):
            if most is not None and place >= most:
                following = [[]] if least <= place else []
                continue
            comma = [self._comma] if place else []
            item: Alternative = [*comma, self._value(shape.prefix[place])]
            after = following[0] if len(following) == 1 else [Ref(self._new_rule(following))]
            following = [[*item, *after]] if following else []
            following += [[]] if least <= place else []
        return following

    def _counted_items(self, shape: ArrayShape) -> list[Alternative]:
        """Write items one by one, counting those that match each `contains`."""
        algebra, contains, most = self._algebra, shape.contains, shape.most
        if any(one.most is not None and one.least > one.most for one in contains):
            return []
        last = max([1, len(shape.prefix), shape.least, *(one.start for one in contains), most or 0])
        caps = [one.least if one.most is None else max(one.least, one.most) for one in contains]
        names: dict[tuple[int, ...], str] = {}
        queue: list[tuple[int, ...]] = []

        def state(place: int, counts: Iterable[int]) -> str:
            key = (place, *counts)
            if key not in names:
                names[key] = self._new_rule()
                queue.append(key)
            return names[key]

        first = state(0, (0,) * len(contains))
        while queue:
            place, *counts = key = queue.pop()
            alternatives = self._rules[names[key]]
            enough = all(count >= one.least for count, one in zip(counts, contains, strict=True))
            if place >= shape.least and enough:
                alternatives.append([])
            if most is not None and place >= most:
                continue
            # Where there is no maximum, an item that is not counted may match all the same.
            choices = [
                [False] if place < one.start or (one.most is None and count >= one.least) else [False, True]
                for one, count in zip(contains, counts, strict=True)
            ]
            for chosen in product(*choices):
                if any(hit and count >= cap for hit, count, cap in zip(chosen, counts, caps, strict=True)):
                    continue
                parts = [shape.item(place)]
                for hit, one in zip(chosen, contains, strict=True):
                    if hit:
                        parts.append(one.value)
                    elif one.most is not None and place >= one.start:
                        parts.append(algebra.negate(one.value))
                after = state(min(place + 1, last), (count + hit for count, hit in zip(counts, chosen, strict=True)))
                value = algebra.all_of(parts)
                if value == FALSE:
                    continue
                comma = [self._comma] if place else []
                alternatives.append([*comma, self._value(value), Ref(after)])
        return [[Ref(first)]]

    def _items_differ(self, shape: ArrayShape) -> bool:
        """Return whether no two items can be equal."""
        if shape.most is None or shape.most > MAX_PLACES:
            return False
        places = [shape.item(place) for place in range(shape.most)]
        return all(self._algebra.is_empty(self._algebra.all_of(pair)) for pair in combinations(places, 2))

    def _unique_items(self, shape: ArrayShape) -> list[Alternative]:
        """Write items of a list of values, each at most once: a bit of the rule's parameter says which have been."""
        values = self._listed(self._algebra.values(shape.rest))
        if values is None or shape.prefix or shape.contains or len(values) > MAX_UNIQUE:
            raise Refusal(UNIQUE)
        count = len(values)
        if shape.least > count:
            return []
        name = f"{self._prefix}_u{len(self._raw)}"
        counted = f"bit_count_ge([0:{count}], {shape.least})" if shape.least else ""
        more = f"bit_count_lt([0:{count}], {shape.most})" if shape.most is not None and shape.most < count else ""
        alternatives = [f'""{f" %if {counted}" if counted else ""}']
        first = []
        for place, value in enumerate(values):
            terminal = self._regex(value)
            is_free = f"bit_clear({place})"
            condition = f"and({is_free}, {more})" if more else is_free
            alternatives.append(f"{self._comma} {terminal} {name}::set_bit({place}) %if {condition}")
            first.append(f"{terminal} {name}::{1 << place:#x}")
        self._raw[f"{name}::_"] = f": {' | '.join(alternatives)}"
        start: list[Alternative] = [[text] for text in first] if shape.most != 0 else []
        return [*start, *([[]] if shape.least == 0 else [])]

    def _listed(self, values: ValueSet) -> list[str] | None:
        """Return the values of a finite set, as expressions of their texts; None: it is not known to be finite."""
        strings = words(values.strings)
        if values.arrays or values.objects or strings is None:
            return None
        found = sorted(values.constants)
        for numbers in values.numbers:
            if numbers.low is None or numbers.low != numbers.high:
                return None
            written = numbers.write()
            assert isinstance(written, Language)
            found.append(to_regex(written))
        texts = (to_regex(literal(text), quoted=True) for text in strings)
        return list(dict.fromkeys([*found, *(f'"{text}"' for text in texts)]))

    # -- objects -----------------------------------------------------------------------------------------------------

    def _object(self, shape: ObjectShape) -> Iterator[Alternative]:
        names = list(dict.fromkeys([*shape.order, *sorted(shape.required)]))
        values = {name: self._algebra.all_of(exprs) for name, exprs in shape.values(names).items()}
        cells = self._cells(shape, names)
        plain = PropertyNames(names, values, shape.required, cells, None, shape.least, shape.most)
        for worked_out in self._with_witnesses(plain, shape):
            yield from self._brackets("{", "}", self._properties(worked_out))

    def _cells(self, shape: ObjectShape, names: list[str]) -> list[tuple[Language, Expr]]:
        """Split the names that are not listed by which rules speak of them."""
        named = set(names)
        by_keys: dict[Language, list[Expr]] = {}
        for rule in shape.rules:
            listed = rule.keys.listed
            if rule.value != TRUE and (listed is None or not listed <= named):
                by_keys.setdefault(rule.keys, []).append(rule.value)
        cells: list[tuple[Language, list[Expr]]] = [(complement(alt(*map(literal, names))) if names else ALL, [])]
        for keys, exprs in by_keys.items():
            split: list[tuple[Language, list[Expr]]] = []
            for language, others in cells:
                inside, outside = both(language, keys), both(language, complement(keys))
                if self._algebra.all_of([*others, *exprs]) != FALSE and not is_empty(inside):
                    split.append((inside, [*others, *exprs]))
                if not is_empty(outside):
                    split.append((outside, others))
            cells = split
            if len(cells) > MAX_CELLS:
                raise Refusal("patternProperties: too many expressions overlap: make them exclude each other")
        joined: dict[Expr, Language] = {}
        for language, exprs in cells:
            value = self._algebra.all_of(exprs)
            if not self._algebra.is_empty(value):
                joined[value] = alt(joined.get(value, EMPTY), language)
        return [(language, value) for value, language in joined.items()]

    def _with_witnesses(self, plain: PropertyNames, shape: ObjectShape) -> Iterator[PropertyNames]:
        """Yield, for each property that must exist, which of the properties it is."""
        algebra = self._algebra
        options: list[list[tuple[str | None, Language, Expr]]] = []
        for keys, value in shape.exists:
            choices: list[tuple[str | None, Language, Expr]] = [
                (name, keys, value)
                for name in plain.names
                if matches(keys, name) and not algebra.is_empty(algebra.all_of((plain.values[name], value)))
            ]
            for language, held in plain.cells:
                both_names, wanted = both(language, keys), algebra.all_of((held, value))
                if not is_empty(both_names) and not algebra.is_empty(wanted):
                    choices.append((None, both_names, wanted))
            options.append(choices)
        for chosen in product(*options):
            values, required, witness = dict(plain.values), set(plain.required), None
            for name, keys, value in chosen:
                if name is not None:
                    values[name] = algebra.all_of((values[name], value))
                    required.add(name)
                elif witness is not None:
                    raise Refusal(TWO_UNNAMED)
                else:
                    witness = keys, value
            yield PropertyNames(plain.names, values, frozenset(required), plain.cells, witness, plain.least, plain.most)

    def _pair(self, keys: Language, value: Expr) -> Alternative:
        return [self._terminal(to_terminal(keys, quoted=True)), self._regex(self._spacing.colon), self._value(value)]

    def _properties(self, shape: PropertyNames) -> list[Alternative]:
        """Write the named properties in their order, with how many there are where that counts, then the others."""
        possible = [name for name in shape.names if shape.values[name] != FALSE]
        if any(name not in possible for name in shape.required):
            return []
        if shape.least > len(possible) + 1 and (shape.cells or shape.witness):
            raise Refusal(MIN_PROPERTIES)
        if shape.cells:
            shape.pair = [Ref(self._new_rule([self._pair(*cell) for cell in shape.cells]))]
        counts = shape.most is not None or shape.least > len(shape.required)
        cap = max(shape.least, shape.most or 0)
        names: dict[tuple[int, bool, int], str] = {}
        queue: list[tuple[int, bool, int]] = []

        def state(place: int, started: bool, count: int) -> Ref:
            key = place, started, min(count, cap) if counts else 0
            if key not in names:
                names[key] = self._new_rule()
                queue.append(key)
            return Ref(names[key])

        first = state(0, False, 0)
        while queue:
            place, started, count = key = queue.pop()
            alternatives = self._rules[names[key]]
            if place == len(possible):
                alternatives += self._others(shape, started, count if counts else shape.least)
                continue
            name = possible[place]
            if shape.most is None or count < shape.most:
                comma = [self._comma] if started else []
                pair = self._pair(literal(name), shape.values[name])
                alternatives.append([*comma, *pair, state(place + 1, True, count + 1)])
            if name not in shape.required:
                alternatives.append([state(place + 1, started, count)])
        return [[first]]

    def _others(self, shape: PropertyNames, started: bool, count: int) -> list[Alternative]:
        """Write what may follow the named properties. Of those without a name one counts for minProperties: another may
        have the same name."""
        need, left = max(0, shape.least - count), None if shape.most is None else shape.most - count
        pair: tuple[Symbol, ...] = tuple(shape.pair)
        comma = self._comma
        if shape.witness is not None:
            if need > 1 or left == 0:
                return []
            last = self._pair(*shape.witness)
            before = None if left is None else left - 1
            if not pair:
                return [[comma, *last] if started else last]
            if started:
                return [[Many((comma, *pair), 0, before), comma, *last]]
            return [[Many((*pair, comma), 0, before), *last]]
        if need > 1 or (need and (not pair or left == 0)):
            return []
        if not pair or left == 0:
            return [[]]
        if started:
            return [[Many((comma, *pair), need, left)]]
        some: Alternative = [*pair, Many((comma, *pair), 0, None if left is None else left - 1)]
        return [some, *([[]] if need == 0 else [])]

    # -- what leads somewhere ----------------------------------------------------------------------------------------

    def _productive(self) -> set[str]:
        """Return the rules that some text matches."""
        productive = set(self._raw)
        waiting = list(reversed(self._rules))
        while True:
            left = []
            for name in waiting:
                if any(self._productive_body(body, productive) is not None for body in self._rules[name]):
                    productive.add(name)
                else:
                    left.append(name)
            if len(left) == len(waiting):
                return productive
            waiting = left

    def _productive_body(self, body: Iterable[Symbol], productive: set[str]) -> Alternative | None:
        """Return the alternative without repetitions that can only be left out; None: no text matches it."""
        kept: Alternative = []
        for symbol in body:
            if isinstance(symbol, Ref) and symbol.rule not in productive:
                return None
            if isinstance(symbol, Many) and (
                symbol.most == 0 or self._productive_body(symbol.symbols, productive) is None
            ):
                if symbol.least:
                    return None
                continue
            kept.append(symbol)
        return kept

    def _reachable(self, first: Symbol, productive: set[str]) -> list[str]:
        found: dict[str, None] = {}
        queue: list[Symbol] = [first]
        while queue:
            symbol = queue.pop()
            if isinstance(symbol, Many):
                queue += symbol.symbols
            elif isinstance(symbol, Ref) and symbol.rule in self._rules and symbol.rule not in found:
                found[symbol.rule] = None
                for body in self._rules[symbol.rule]:
                    queue += self._productive_body(body, productive) or []
        return list(found)


def _symbol(symbol: Symbol) -> str:
    if isinstance(symbol, Ref):
        return symbol.rule
    if isinstance(symbol, str):
        return symbol
    most = "" if symbol.most is None else symbol.most
    times = "*" if (symbol.least, symbol.most) == (0, None) else f"{{{symbol.least},{most}}}"
    return f"({_sequence(symbol.symbols)}){times}"


def _sequence(body: Iterable[Symbol]) -> str:
    return " ".join(map(_symbol, body)) or '""'


def schema_rules(schema: Any, spacing: Spacing, start: str = "start", prefix: str = "s") -> str:
    """Return rules for the JSON texts of a schema, the first of which is `start`. Raises Refusal naming the keyword
    that cannot be held to, and the remedy."""
    algebra = Algebra(Document(schema), evaluated_values)
    return GrammarWriter(algebra, spacing, prefix).write(algebra.schema(schema, "", ()), start)


# A little of any space. Without a bound a model may print spaces until its length is used up.
ANY_WHITESPACE = r"[ \n\t]{0,12}"


def spacing_of(pattern: str | None) -> Spacing:
    """Return the punctuation with white space of this expression between tokens; "": none; "any": a little of any;
    None and "compact": at most one space after commas and colons."""
    if pattern == "any":
        pattern = ANY_WHITESPACE
    if pattern in (None, "compact"):
        options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        return Spacing(", ?", ": ?", "", "", options)
    if not pattern:
        return Spacing(",", ":", "", "", {"whitespace_flexible": False})
    space = f"(?:{pattern})"
    return Spacing(f"{space},{space}", f"{space}:{space}", space, space, {"whitespace_pattern": pattern})
