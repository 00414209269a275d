"""Sentence patterns: `[red|blue]` is a choice, `{name}` a slot, `{a hero}` a slot with its article.

`{Name}` is the slot `name` with a capital. A brace or bracket that is neither stays as it is, so JSON and shell
commands can be written plainly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_SLOT = re.compile(r"\{([aA] )?(\w+)\}")


def spin(random: Random, pattern: str, slots: Mapping[str, str] | None = None) -> str:
    """Return one sentence of the pattern, with the slots filled in."""
    parts = _parts(pattern)
    if len(parts) == 1:
        text = parts[0][0]
    else:
        text = "".join(
            [choices[0] if len(choices) == 1 else choices[int(random.random() * len(choices))] for choices in parts]
        )
    while _CHOICE.search(text):  # what stood around an inner choice
        text = spin(random, text)
    if slots and "{" in text:
        return _SLOT.sub(lambda match: _fill(match, slots), text)
    return text


def with_article(noun: str) -> str:
    """Return `a fox` or `an owl`: by the first letter, with the exceptions that the word lists hold."""
    starts_with_vowel_sound = noun[0].lower() in "aeiou" and not noun.lower().startswith(("uni", "use", "one"))
    return f"an {noun}" if starts_with_vowel_sound or noun.lower().startswith("hour") else f"a {noun}"


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


@cache
def _parts(pattern: str) -> tuple[tuple[str, ...], ...]:
    pieces = _CHOICE.split(pattern)  # texts and choices in turn
    return tuple(tuple(piece.split("|")) if index % 2 else (piece,) for index, piece in enumerate(pieces))


def _fill(match: re.Match[str], slots: Mapping[str, str]) -> str:
    article, name = match.groups()
    value = slots.get(name)
    if value is None:
        lowered = slots.get(name[0].lower() + name[1:]) if name[0].isupper() else None
        if lowered is None:
            return match.group()
        value = capitalized(lowered)
    if article is None:
        return value
    return capitalized(with_article(value)) if article == "A " else with_article(value)
