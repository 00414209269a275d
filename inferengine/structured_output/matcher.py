"""TokenMatcher: llguidance behind the core's grammar protocol, within a budget of processor time.

A grammar may be cheap to compile and costly to follow: a constant of 200,000 characters takes 60 ms for every token.
llguidance's limits bound one step of its lexer and parser, not their sum, and a step of the engine waits for the masks
of all its rows. So the processor time of the outputs of one request is counted, and the request ends beyond its budget.

`reason` translates llguidance's messages: those about limits speak of its own parts and are replaced by what to change;
those about the source ("line 3: unknown name") are kept, shortened.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection

from llguidance import LLMatcher

from inferengine.errors import InvalidRequest

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

LOOKAROUND = (
    "lookaround ((?=…), (?!…), (?<=…), (?<!…)) and \\b are not supported: write what may stand there itself, such as "
    "[a-z]+[0-9] for (?=.*[0-9]) and (^|[^A-Za-z0-9_])word([^A-Za-z0-9_]|$) for \\bword\\b"
)

_BY_WORDS = (
    ("look-ahead", LOOKAROUND),
    ("lookaround", LOOKAROUND),
    ("word boundar", LOOKAROUND),
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


BURST_S = 0.1  # for what is slow once: the first mask of a schema of 1,000 properties takes 30 ms


def reason(message: str) -> str:
    """Translate llguidance's message into what is wrong with a grammar: a sentence without its subject."""
    for words, meaning in _BY_WORDS:
        if words.lower() in message.lower():
            return meaning
    return f"cannot be compiled: {first_lines(message)}"


def first_lines(message: str) -> str:
    """Join the first lines of a message into one, of at most 300 characters."""
    lines = [line.strip() for line in message.replace(_NOISE, "").splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else "no reason given"


class GrammarUsage:
    """What all matchers of one compiled grammar have spent. They share a lexer: once one of them has hit a limit of it,
    the lexer takes no token of any of them, and gives no reason."""

    __slots__ = ("failure", "outputs", "seconds")

    def __init__(self) -> None:
        self.outputs: list[None] = []  # one for each that is promised or goes on: append and pop need no lock
        self.seconds = 0.0  # of processor time
        self.failure: str | None = None


class Budget:
    """Processor time for the matchers of one request: `token_s` for each mask, saved up to BURST_S.

    Counted in the thread that spends it, so a machine with other work to do changes nothing.
    """

    __slots__ = ("_left_s", "_token_s", "usage")

    def __init__(self, token_s: float, usage: GrammarUsage) -> None:
        self._token_s = token_s
        self._left_s = BURST_S
        self.usage = usage

    def spend(self, seconds: float, *, earned: bool) -> None:
        """Subtract processor time. `earned`: it was for a mask, which adds `token_s`. Raises InvalidRequest when the
        budget is exceeded."""
        left = self._left_s - seconds + (self._token_s if earned else 0.0)
        self._left_s = left if left < BURST_S else BURST_S
        self.usage.seconds += seconds
        if left < 0:
            raise InvalidRequest("grammar", TOO_SLOW)

    def refill(self) -> None:
        """Save up BURST_S again."""
        self._left_s = BURST_S


class TokenMatcher:
    """One output's place in a compiled grammar. Implements `core.constraints.Grammar`.

    llguidance's methods are looked up once: a step of many outputs makes a hundred such calls. A matcher that fails
    also reports that it has stopped, so its error is checked at every end.
    """

    __slots__ = (
        "_beginning",
        "_budget",
        "_compute_mask",
        "_consume",
        "_forced",
        "_is_error",
        "_is_stopped",
        "_matcher",
        "_text_ends",
    )

    def __init__(self, matcher: LLMatcher, budget: Budget, text_ends: Collection[int] = ()) -> None:
        """`matcher`: at the beginning of its output. `text_ends`: tokens that end an output and are text to the
        tokenizer. llguidance allows them as text, and then takes them for the end."""
        self._budget = budget
        self._text_ends = text_ends
        self._beginning = matcher.deep_copy()  # takes a microsecond here, and longer with every token
        self._use(matcher)

    def _use(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._consume, self._compute_mask = matcher.try_consume_tokens, matcher.unsafe_compute_mask_ptr
        self._forced, self._is_stopped, self._is_error = (
            matcher.compute_ff_tokens,
            matcher.is_stopped,
            matcher.is_error,
        )

    def __del__(self) -> None:
        if self._budget.usage.outputs:
            self._budget.usage.outputs.pop()

    @property
    def lexer(self) -> object:
        """The lexer that the matchers of a compiled grammar share: llguidance locks it."""
        return self._budget.usage

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False: the grammar does not allow it. Raises InvalidRequest at a limit."""
        if self._consume([token_id]) == 1:
            return True
        self._check()
        if (failure := self._budget.usage.failure) is not None:
            raise InvalidRequest("grammar", failure)
        return False

    def validate(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, from the first on, the grammar allows."""
        return int(self._matcher.validate_tokens(token_ids)) if token_ids else 0

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._check()

    def restore(self, output: list[int]) -> None:
        """Go back to the point after these tokens of output, with a full budget. Raises InvalidRequest where that is
        not possible: after a limit of the lexer, which the other outputs of the grammar share."""
        matcher = self._beginning.deep_copy()
        if output and matcher.try_consume_tokens(output) != len(output):
            self._check()
            raise InvalidRequest("grammar", self._budget.usage.failure or TOO_SLOW)
        self._use(matcher)
        self._budget.usage.failure = None
        self._budget.refill()

    def fill_bitmask(self, row: memoryview) -> None:
        """Write the mask of allowed tokens into `row`. The interpreter's lock is free meanwhile."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(row))
        begin = time.thread_time()
        self._compute_mask(address, len(row))
        seconds = time.thread_time() - begin  # of nothing else: a garbage collection may exceed the budget
        if self._is_error():
            self._check()
        if self._text_ends and not self._matcher.is_accepting():
            for token_id in self._text_ends:
                row[token_id // 8] &= ~(1 << token_id % 8)  # little-endian words: byte by byte
        self._budget.spend(seconds, earned=True)

    def is_terminated(self) -> bool:
        """Return whether the output is complete."""
        if not self._is_stopped():
            return False
        self._check()
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty where there is a choice."""
        begin = time.thread_time()
        tokens = list(self._forced())
        seconds = time.thread_time() - begin
        if self._is_error():
            self._check()
        self._budget.spend(min(seconds, BURST_S / 2), earned=False)  # the collector may have run for the list
        place = next((place for place, token_id in enumerate(tokens) if token_id in self._text_ends), None)
        return tokens[:place]

    def _check(self) -> None:
        """Raise InvalidRequest if llguidance reports an error."""
        if self._is_error():
            self._budget.usage.failure = reason(self._matcher.get_error())
            raise InvalidRequest("grammar", self._budget.usage.failure)
