"""Limits on what one step of a chat template may make, checked before the memory is taken.

The time limit of a template is checked between its steps. One call of `str.center` is a single step, during which no
other thread of the process runs. So the size of its result is computed from its arguments first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes

MOST_CHARACTERS = 8_000_000  # of a text
MOST_ENTRIES = 1_000_000  # of a list
MOST_BITS = 1 << 16  # of a product of whole numbers
WIDEST = 100_000  # field of a format
MOST_INDENT = 100  # of JSON
LONG_SEPARATOR = 1000
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*\d{6}")
_OPEN_PERCENT = re.compile(r"%[^a-zA-Z%]*\*")  # the width is an argument
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{6}[^{}]*\}")
_OPEN_BRACES = re.compile(r"\{[^{}]*\{")


class TooLarge(Exception):
    """A step would make too much. The message says what, as a predicate of the template."""


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge for a sum, product, power or formatting that would be too large."""
    if operator == "**" and not (abs(left) <= 1000 and abs(right) <= 100):
        raise TooLarge("computes a power that is too large")
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
            raise TooLarge("computes a product that is too large")
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, str | list | tuple) and isinstance(times, int):
                _check_size(len(sized) * times, "repeats a value too often", _most(sized))
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_size(len(left) + len(right), most=_most(left))
    if operator == "%" and isinstance(left, str):
        values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else (right,)
        _check_percent(left, list(values))


def check_call(function: Any, values: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise TooLarge for a method of a text that would make a text that is too large."""
    function = getattr(function, "__wrapped__", function)  # jinja2 puts str.format into a function of its own
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    given = [*values, *named.values()]
    if not isinstance(owner, str):
        return
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_size(max(_numbers(given), default=0))
    elif name == "expandtabs":
        _check_size(len(owner) + owner.count("\t") * max(_numbers(given), default=8))
    elif name == "replace":
        _check_replaced(owner, given)
    elif name == "join":
        _check_joined(given[0] if given else (), owner)
    elif name == "translate" and given and isinstance(given[0], Mapping):
        _check_size(len(owner) * max((len(item) for item in given[0].values() if isinstance(item, str)), default=1))
    elif name in ("format", "format_map"):
        flat = [*given, *(item for each in given if isinstance(each, Mapping) for item in each.values())]
        _check_widths(_WIDE_BRACES, _OPEN_BRACES, owner, flat)


def limited(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of jinja2 that checks what it would make first."""

    @functools.wraps(filter)  # with jinja2's mark of what it passes first
    def checked(*values: Any, **named: Any) -> Any:
        given = [item for item in values if not isinstance(item, jinja2.Environment | jinja2.nodes.EvalContext)]
        if given:
            _check_filter(name, given[0], [*given[1:], *named.values()])
        return filter(*values, **named)

    return checked


LIMITED_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap")


def _check_filter(name: str, value: Any, given: list[Any]) -> None:
    text = value if isinstance(value, str) else ""
    widest = max(_numbers(given), default=0)
    if name == "tojson" and widest > MOST_INDENT:
        raise TooLarge(f"indents JSON by more than {MOST_INDENT}")
    if name in ("batch", "slice", "center"):
        _check_size(widest, most=MOST_CHARACTERS if name == "center" else MOST_ENTRIES)
    elif name == "indent":
        width = max([widest, *(len(item) for item in given if isinstance(item, str))])
        _check_size(len(text) + (text.count("\n") + 1) * width)
    elif name == "wordwrap":
        length = max((len(item) for item in given if isinstance(item, str)), default=1)
        _check_size((len(text) + 1) * length)
    elif name == "replace":
        _check_replaced(str(value), given)
    elif name == "join":
        _check_joined(value, str(given[0]) if given else "")
    elif name == "format":
        _check_percent(str(value), given)


def check_text(parts: Sequence[str]) -> None:
    """Raise TooLarge for parts that would be a text that is too long."""
    _check_size(sum(map(len, parts)))


def _check_replaced(text: str, given: list[Any]) -> None:
    if len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        if len(new) > len(old):
            _check_size(len(text) + text.count(old) * len(new))


def _check_joined(items: Any, separator: str) -> None:
    if isinstance(items, str | list | tuple):
        _check_size(sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(separator))
    elif len(separator) > LONG_SEPARATOR:  # of items whose number is not known
        raise TooLarge("joins texts by one that is too long")


def _check_percent(text: str, values: list[Any]) -> None:
    _check_widths(_WIDE_PERCENT, _OPEN_PERCENT, text, values)


def _check_widths(wide: re.Pattern[str], is_open: re.Pattern[str], text: str, values: list[Any]) -> None:
    if wide.search(text) or (is_open.search(text) and max(_numbers(values), default=0) > WIDEST):
        raise TooLarge("formats a value too widely")


def _numbers(values: list[Any]) -> list[int]:
    return [abs(item) for item in values if isinstance(item, int)]


def _most(value: str | list[Any] | tuple[Any, ...]) -> int:
    return MOST_CHARACTERS if isinstance(value, str) else MOST_ENTRIES


def _check_size(size: int, message: str = "makes a text or list that is too long", most: int = MOST_CHARACTERS) -> None:
    if size > most:
        raise TooLarge(message)
