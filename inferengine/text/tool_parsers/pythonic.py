"""Llama 3.2 and 4: a list of Python calls, `[weather(city="Paris"), now()]`, also between `<|python_start|>` and
`<|python_end|>`. A message that begins otherwise is text. A call leaves when its closing bracket is written.

Parameters may have names that Python's have not: `mail(from="Ann", my-key=1)`. Those that cannot stand before = at all
are written as `**{"it's": 1}`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from inferengine.text.tool_parsers.base import CallDelta, Content, Part

START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.-][\w.-]{0,127}")  # of a function; 2d-plot too
_BEGIN = re.compile(rf"\s*\[\s*({_NAME.pattern})\s*\(")
_MAY_BEGIN = re.compile(rf"\s*(\[\s*({_NAME.pattern}\s*)?)?")
BARE_NAME = re.compile(r"[\w$@](?:[\w$@.:/ -]*[\w$@])?")  # of a parameter that is written before =
_ARGUMENT = re.compile(rf"\s*({BARE_NAME.pattern})\s*=(?!=)")
_SIGN = re.compile(r""""(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?|[()\[\]{},]""", re.DOTALL)  # a text or a sign between
_OPENS, _CLOSES = "([{", ")]}"
_NAMES = {"true": True, "false": False, "null": None}
MOST, MOST_BETWEEN = 1 << 20, 512  # characters of one call; before, between and after calls


class PythonicParser:
    """Decides by the first characters: a bracket, a name, a bracket."""

    def __init__(self) -> None:
        self._state = "start"
        self._held: list[str] = []  # characters that may be a call
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._size = self._num_calls = 0

    def push(self, text: str, final: bool = False, *, cut: bool = False) -> list[Part]:
        """Take more text; `final`, `cut`: as of ToolParser. Returns the parts that it completes."""
        parts: list[Part] = []
        for place, character in enumerate(text):
            if self._state == "text":
                parts.append(Content(text[place:]))
                return parts
            self._read(character, parts)
        if final and self._state != "text":
            self._finish(parts, cut=cut)
        return parts

    def _read(self, character: str, parts: list[Part]) -> None:
        if self._state == "over":
            self._held.append(character)
            rest = "".join(self._held)
            if not END.startswith(rest.strip()) or len(rest) > MOST_BETWEEN:
                self._show(parts, rest.removeprefix(END).lstrip() if self._num_calls else rest)
            return
        self._held.append(character)
        if self._state == "start":
            self._begin("".join(self._held), parts)
        elif self._state == "between":
            self._read_between(character, parts)
        else:
            self._read_call(character, parts)

    def _begin(self, text: str, parts: list[Part]) -> None:
        body = text.lstrip()
        if START.startswith(body) and len(text) <= MOST_BETWEEN:
            return
        body = body.removeprefix(START)
        if (found := _BEGIN.fullmatch(body)) is not None:
            self._state, self._depth, self._size = "call", 1, 0
            self._held = [f"{found.group(1)}("]
            self._first = text
        elif not _MAY_BEGIN.fullmatch(body) or len(text) > MOST_BETWEEN:
            self._show(parts, text)

    def _read_call(self, character: str, parts: list[Part]) -> None:
        self._size += 1
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            if character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _OPENS:
            self._depth += 1
        elif character in _CLOSES:
            self._depth -= 1
            if not self._depth:
                self._end("".join(self._held), parts)
                return
        if self._size > MOST:
            self._show(parts, self._unread())

    def _end(self, text: str, parts: list[Part]) -> None:
        call = _call(text)
        if call is None:
            self._show(parts, self._unread())
            return
        parts.append(CallDelta(self._num_calls, *call))
        self._num_calls += 1
        self._state, self._held = "between", []

    def _read_between(self, character: str, parts: list[Part]) -> None:
        text = "".join(self._held).strip(" \t\r\n,")
        if character == "]" and text == "]":
            self._state, self._held = "over", []
        elif character == "(" and _NAME.fullmatch(text[:-1].rstrip()):
            self._state, self._depth, self._size, self._held = "call", 1, 0, [f"{text[:-1].rstrip()}("]
        elif (text and not _NAME.fullmatch(text.rstrip())) or len(self._held) > MOST_BETWEEN:
            self._show(parts, text)

    def _unread(self) -> str:
        """Return the text of what was taken for a call."""
        held = "".join(self._held)
        return held if self._num_calls else self._first + held.partition("(")[2]

    def _show(self, parts: list[Part], text: str) -> None:
        self._state, self._held = "text", []
        if text:
            parts.append(Content(text))

    def _finish(self, parts: list[Part], *, cut: bool) -> None:
        if cut and self._state == "call" and (self._num_calls or _is_begun(self._first, "".join(self._held))):
            parts.append(CallDelta(self._num_calls, "".join(self._held).partition("(")[0], ""))
        elif cut and (self._state == "between" or _is_marked("".join(self._held).lstrip())):
            return  # a call was to come
        elif self._state == "call":
            self._show(parts, self._unread())
        elif self._state == "start" or (self._state == "between" and "".join(self._held).strip(" \t\r\n,")):
            self._show(parts, "".join(self._held))
        elif self._state == "over":
            self._show(parts, "".join(self._held).strip().removeprefix(END))


def _is_marked(text: str) -> bool:
    """Return whether an output that was cut off begins with the mark, or with its beginning."""
    return text.startswith(START) or (text != "" and START.startswith(text))


def _is_begun(before: str, held: str) -> bool:
    """Return whether the first call of an output that was cut off is one. `before`: the output up to its bracket;
    `held`: the call.

    Prose often begins with a number and a bracket: `[1 (the first`. So a name without a letter at its begin needs the
    beginning of an argument, or the mark before it."""
    name, _, arguments = held.partition("(")
    is_named = name[0].isalpha() or name[0] == "_"
    return is_named or _is_marked(before.lstrip()) or _ARGUMENT.match(arguments) is not None


def _call(text: str) -> tuple[str, str] | None:
    """Return (name, arguments as JSON) of a call of literals by name; None for any other text."""
    name, _, arguments = text.partition("(")
    arguments, names = _with_names_of_python(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(f"f({arguments}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not isinstance(tree.func, ast.Name):
            return None
        pairs = [pair for one in tree.keywords for pair in _pairs(one, names)]
        values = dict(pairs)
        if len(values) < len(pairs):
            return None
        written = json.dumps(values, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also half of a surrogate pair
        return None
    return name, written


def _with_names_of_python(arguments: str) -> tuple[str, dict[str, str]]:
    """Return arguments with names that Python's parser takes, and by these the names that were written."""
    begins, depth = [0], 0
    for found in _SIGN.finditer(arguments):
        if found[0] in _OPENS:
            depth += 1
        elif found[0] in _CLOSES:
            depth -= 1
        elif found[0] == "," and not depth:
            begins.append(found.end())
    pieces: list[str] = []
    names: dict[str, str] = {}
    place = 0
    for begin in begins:
        if (argument := _ARGUMENT.match(arguments, begin)) is not None:
            name = f"_{len(names)}"
            names[name] = argument[1]
            pieces += [arguments[place:begin], f"{name}="]
            place = argument.end()
    return "".join(pieces) + arguments[place:], names


def _pairs(keyword: ast.keyword, names: dict[str, str]) -> list[tuple[str, Any]]:
    """Return the arguments that one of a call's stands for: `name=value`, or several in `**{"name": value}`. Raises
    ValueError for any other."""
    if keyword.arg is not None:
        return [(names.get(keyword.arg, keyword.arg), _literal(keyword.value))]
    if not isinstance(keyword.value, ast.Dict):
        raise ValueError("no literal")
    return [(_key(key), _literal(value)) for key, value in zip(keyword.value.keys, keyword.value.values, strict=True)]


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no key of an object")
