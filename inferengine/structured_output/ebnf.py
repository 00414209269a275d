"""Translate the EBNF of llama.cpp (GBNF) and xgrammar, `root ::= "a" | [0-9]+`, into llguidance's Lark.

A rule without recursion becomes a terminal (matched as one expression), the others become rules. A rule ends where the
next one begins, so rules may be written over several lines. Source of the notation: llama.cpp's grammars/README.
Everything here takes time in proportion to the grammar.

Why not `llguidance.gbnf_to_lark` (1.9.1), measured on the grammars of tests/structured_output/test_ebnf.py:
- it refuses 3 of the 9 valid ones: an alternative on a line of its own, `\\-` in a set, a name that begins with a
  digit;
- it refuses two rules whose names differ only in case and underscores (`fooBar`, `foo_bar`);
- it accepts a rule that is defined twice (the last one wins) and `"a"{99999}`;
- it reports missing rules without their line, and an unfinished escape as IndexError;
- a chain of 1,000 rules takes 0.32 s and one of 2,000 takes 1.0 s: the square of their number.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from inferengine.structured_output.spec import MAX_NESTING

NAME = "\0"  # no source has it
MAX_REPEATS = 10_000
MAX_TERMINAL = 4_000  # parts of a terminal, those of others in it counted each time
_RULE = re.compile(r"(?m)^[ \t]*\w[\w-]*[ \t]*::=", re.ASCII)
_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s|\#[^\n]*)+)
  | (?P<rule>\w[\w-]*(?=\s*::=))
  | (?P<name>\w[\w-]*)
  | (?P<defines>::=)
  | (?P<literal>"(?:[^"\\\n]|\\.)*")
  | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
  | (?P<repeat>[*+?]|\{\s*(?:\d+\s*)?(?:,\s*(?:\d+\s*)?)?\})
  | (?P<mark>[|().])
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt0"'\\\[\]^/.-])|(.))""", re.DOTALL
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class _Rule(NamedTuple):
    body: list[str]  # in Lark; NAME stands for the next one of `names`
    names: list[tuple[str, int]]  # of the rules it is made of, and the lines


def is_ebnf(source: str) -> bool:
    """Return whether a line begins as a rule of EBNF does. None of Lark's does."""
    return _RULE.search(source) is not None


def to_lark(source: str) -> str:
    """Translate the grammar to Lark. Raises ValueError saying what is wrong in which line."""
    rules = _Reader(_tokens(source)).rules()
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    for rule in rules.values():
        for name, line in rule.names:
            if name not in rules:
                raise ValueError(f"line {line}: there is no rule named {name[:40]}")
    terminals = _terminals(rules)
    written = {name: f"T{number}" if name in terminals else f"r{number}" for number, name in enumerate(rules)}
    lines = [f"start: {written['root']}"]
    for name, rule in rules.items():
        lines.append(f"{written[name]}: {''.join(written.get(part, part) for part in _parts(rule))}")
    return "\n".join(lines) + "\n"


def _parts(rule: _Rule) -> list[str]:
    """Return the body of a rule, with the names of rules as the source has them."""
    names = iter(rule.names)
    return [next(names)[0] if part == NAME else part for part in rule.body]


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the rules that are no part of themselves, nor made of such rules, up to a size. A walk without
    recursion."""
    sizes: dict[str, int] = {}  # of those that were looked at; 0: no terminal, or not done yet
    for first in rules:
        todo = [(first, False)]
        while todo:
            name, is_left = todo.pop()
            if is_left:
                parts = [sizes[other] for other, _ in rules[name].names]
                size = len(rules[name].body) + sum(parts)
                sizes[name] = size if all(parts) and size <= MAX_TERMINAL else 0
            elif name not in sizes:
                sizes[name] = 0
                todo.append((name, True))
                todo += [(other, False) for other, _ in rules[name].names if other not in sizes]
    return {name for name, size in sizes.items() if size}


class _Reader:
    """A list of tokens as rules."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        while self._kind() != "end":
            name = self._take("rule", "a rule, such as root ::= ...")
            if name.text in found:
                raise ValueError(f"line {name.line}: there are two rules named {name.text[:40]}")
            self._take("defines", "::=")
            rule = _Rule([], [])
            self._read_body(rule)
            found[name.text] = rule
        return found

    def _read_body(self, rule: _Rule) -> None:
        """Read alternatives of sequences, up to the next rule."""
        depth = 0
        is_empty, can_repeat = True, False
        while (token := self._tokens[self._place]).kind not in ("rule", "end"):
            self._place += 1
            if token.kind == "repeat":
                if not can_repeat:
                    raise ValueError(f"line {token.line}: {token.text[:40]} has nothing before it to repeat")
                rule.body.append(_repeat(token))
                can_repeat = False
                continue
            if token.text in ("|", ")") and token.kind == "mark":
                if is_empty:
                    rule.body.append('""')
                if token.text == ")":
                    depth -= 1
                    if depth < 0:
                        raise ValueError(f"line {token.line}: ) closes nothing")
                rule.body.append(f" {token.text}" if token.text == "|" else ")")
                is_empty, can_repeat = token.text == "|", token.text == ")"
            elif token.text == "(" and token.kind == "mark":
                depth += 1
                if depth > MAX_NESTING:
                    raise ValueError(f"line {token.line}: is nested deeper than {MAX_NESTING} levels")
                rule.body.append(" (")
                is_empty, can_repeat = True, False
            elif token.kind == "name":
                rule.body.extend((" ", NAME))
                rule.names.append((token.text, token.line))
                is_empty, can_repeat = False, True
            else:
                rule.body.append(f" {_terminal(token)}")
                is_empty, can_repeat = False, True
        if depth:
            raise ValueError(f"line {self._tokens[self._place].line}: {depth} ( not closed")
        if is_empty:
            rule.body.append(' ""')

    def _kind(self) -> str:
        return self._tokens[self._place].kind

    def _take(self, kind: str, wanted: str) -> _Token:
        token = self._tokens[self._place]
        if token.kind != kind:
            raise ValueError(f"line {token.line}: {wanted} is expected, not {token.text[:40] or 'the end'}")
        self._place += 1
        return token


def _tokens(source: str) -> list[_Token]:
    tokens: list[_Token] = []
    place, line = 0, 1
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None:
            raise ValueError(f"line {line}: {source[place : place + 20].splitlines()[0]!r} cannot be read")
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, match.group(), line))
        line += match.group().count("\n")
        place = match.end()
    return [*tokens, _Token("end", "", line)]


def _terminal(token: _Token) -> str:
    """Read a literal, a set of characters or any character, as an expression of Lark's."""
    if token.kind == "set":
        return f"/{_set(token)}/"
    if token.text == ".":
        return r"/(?s:.)/"
    if token.kind != "literal":
        raise ValueError(f"line {token.line}: {token.text[:40]} is not expected here")
    characters = [character for character, _ in _characters(token.text[1:-1], token.line)]
    return f"/{''.join(map(_quoted, characters))}/" if characters else '""'


def _set(token: _Token) -> str:
    """Read a set of characters, with everything in it spelt by number, so that no sign has a meaning of its own."""
    body = token.text[1:-1]
    negated = body.startswith("^")
    characters = _characters(body[1:] if negated else body, token.line)
    if not characters:
        raise ValueError(f"line {token.line}: {token.text} has no characters")
    ranges = []
    place = 0
    while place < len(characters):
        low = high = characters[place][0]
        if place + 2 < len(characters) and characters[place + 1] == ("-", False):
            high = characters[place + 2][0]
            place += 2
        if ord(high) < ord(low):
            raise ValueError(f"line {token.line}: {token.text[:40]} has a range that ends before it begins")
        ranges.append(_quoted(low) if low == high else f"{_quoted(low)}-{_quoted(high)}")
        place += 1
    return f"[{'^' if negated else ''}{''.join(ranges)}]"


def _characters(text: str, line: int) -> list[tuple[str, bool]]:
    """Return the characters of a literal or a set, and which of them were escaped."""
    found: list[tuple[str, bool]] = []
    place = 0
    while place < len(text):
        if text[place] != "\\":
            found.append((text[place], False))
            place += 1
            continue
        match = _ESCAPE.match(text, place)
        number = match and (match.group(1) or match.group(2) or match.group(3))
        if match is None or match.group(5) is not None:
            raise ValueError(f"line {line}: {text[place : place + 2]} is no escape that is known here")
        if number:
            code = int(number, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"line {line}: {match.group()} is no character")
            found.append((chr(code), True))
        else:
            found.append((_CONTROL.get(match.group(4), match.group(4)), True))
        place = match.end()
    return found


def _quoted(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"


def _repeat(token: _Token) -> str:
    if token.text in "*+?":
        return token.text
    least, comma, most = token.text.strip("{} \t\r\n").partition(",")
    low = int(least.strip() or 0)
    high = int(most.strip()) if most.strip() else (None if comma else low)
    if not (least.strip() or most.strip()) or (high is not None and high < low) or max(low, high or 0) > MAX_REPEATS:
        raise ValueError(f"line {token.line}: {token.text[:40]} is no number of repetitions up to {MAX_REPEATS}")
    return f"{{{low},{'' if high is None else high}}}"
