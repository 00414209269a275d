"""Why a grammar cannot be used, in words for whoever wrote it.

llguidance's messages about limits speak of its own parts; these say what to change. Its messages about the source
itself ("line 3: unknown name") say where to look and are kept, shortened.
"""

from __future__ import annotations

MATCHES_NOTHING = "no text can match it: every alternative leads back to itself or contradicts another one"
TOO_AMBIGUOUS = (
    "has too many alternatives at one place, as hundreds of optional properties or an ambiguous rule give: "
    "mark properties as required, split it, or make rules exclude each other"
)
TOO_MANY_STATES = (
    "an expression in it needs too many states: shorten repetitions such as {0,500}, write fewer .* into one "
    "expression, or join the patterns of an allOf"
)
TOO_LARGE = "is too large once it is expanded: lower minItems, maxLength and other repetitions, or split it"
TOO_DEEP = "is nested too deep: use fewer references that lead to references"
TOO_SLOW = "takes too long to say what may come next: simplify it"

_BY_WORDS = (
    ("NoExtension", MATCHES_NOTHING),
    ("unsatisfiable", MATCHES_NOTHING),
    ("matches nothing", MATCHES_NOTHING),
    ("Too many items", TOO_AMBIGUOUS),
    ("Current row has", TOO_AMBIGUOUS),
    ("ParserTooComplex", TOO_AMBIGUOUS),
    ("too many expressions", TOO_MANY_STATES),
    ("too many states", TOO_MANY_STATES),
    ("Unable to determine if regex is empty", TOO_MANY_STATES),
    ("fuel", TOO_MANY_STATES),
    ("LexerTooComplex", TOO_MANY_STATES),
    ("relevance check", TOO_MANY_STATES),
    ("grammar too big", TOO_LARGE),
    ("grammar size", TOO_LARGE),
    ("too large", TOO_LARGE),
    ("panic", "the compiler does not know what to do with it: simplify it"),
)
_NOISE = "<non-verbose/>"


def reason(message: str) -> str:
    """What llguidance says of a grammar, as a sentence without its subject."""
    for words, meaning in _BY_WORDS:
        if words.lower() in message.lower():
            return meaning
    return f"cannot be compiled: {first_lines(message)}"


def first_lines(message: str) -> str:
    """The start of a message of several lines, in one."""
    lines = [line.strip() for line in message.replace(_NOISE, "").splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else "no reason given"
