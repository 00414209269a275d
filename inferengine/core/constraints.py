"""What constrains the next token of an output: a grammar, and the fields of its request that forbid tokens.

Grammar is the protocol through which the core uses a compiled grammar (`inferengine.structured_output` implements it):
the core reports which tokens came and asks for the mask of those that may come next.

TokenRules are the tokens that a request's other fields allow, as the sampler applies them. A grammar,
`allowed_token_ids`, `bad_words` and `min_tokens` each make sense alone and can still leave no token together. The
device only sees a row without a finite logit, so the rules are compared with the grammar's mask here, and the error
names the fields. Sets of tokens are bits of an int: an intersection costs microseconds for any vocabulary.

MaskThreads compute the grammar masks of a step in several threads. A mask takes microseconds where llguidance knows the
state, and milliseconds where a large vocabulary meets a state that is new, as every one is inside a counted repetition.
llguidance computes without the interpreter's lock, but matchers that share a lexer wait for each other; the grammar
compiler makes a lexer for each few outputs of a grammar.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from inferengine.sampling_params import SamplingParams


class Grammar(Protocol):
    """A compiled grammar at one point of one output. Used by one thread at a time. Every method but `validate` raises
    InvalidRequest where the grammar cannot be followed any further: its output ends, unless `restore` succeeds."""

    @property
    def lexer(self) -> object:
        """What grammars share that wait for each other: two with different ones can be followed at the same time."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token. False: the token is not allowed here; the state is unchanged."""
        ...

    def validate(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, from the first on, would be accepted. Changes nothing."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        ...

    def restore(self, output: list[int]) -> None:
        """Go back to the point after these tokens of output, after another method has raised while it followed draft
        tokens. What these have cost is not charged."""
        ...

    def fill_bitmask(self, row: memoryview) -> None:
        """Write the mask of allowed next tokens: bit t % 32 of int32 word t // 32. `row` has ceil(V / 32) words."""
        ...

    def is_terminated(self) -> bool:
        """Return whether no token can follow."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must follow whatever the model says; empty where it has a choice. Changes nothing."""
        ...


class TokenRules:
    """The rules of one request. `stop_ids` must not come before `min_tokens` tokens have."""

    __slots__ = ("_allowed", "_min_tokens", "_never", "_stops", "_words", "fields", "num_before")

    def __init__(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        self._allowed = bits(params.allowed_token_ids) if params.allowed_token_ids else None
        self._never = bits([word[0] for word in params.bad_words_ids if len(word) == 1])
        self._words = [(word[:-1], word[-1]) for word in params.bad_words_ids if len(word) > 1]
        self._min_tokens = params.min_tokens
        self._stops = bits(stop_ids) if params.min_tokens else 0
        self.fields = restricting_fields(params)
        self.num_before = max((len(before) for before, _ in self._words), default=0)  # tokens that `allowed` looks at

    def allowed(self, mask: int, num_output: int, before: SequenceOf[int]) -> int:
        """Return the tokens of `mask` that may come now, an int without a sign. `before`: the last `num_before` tokens
        of the output, or all of them if there are fewer."""
        if self._allowed is not None:
            mask &= self._allowed
        mask ^= mask & self._never  # takes what the smaller of both takes, which a complement does not
        if num_output < self._min_tokens:
            mask ^= mask & self._stops
        came = tuple(before)
        for beginning, last in self._words:
            if came[-len(beginning) :] == beginning:
                mask &= ~(1 << last)
        return mask

    def no_token_message(self, num_output: int, *, has_grammar: bool) -> str:
        """Return the error message of a request whose fields allow no token."""
        names = [*(["the grammar"] if has_grammar else []), *self.fields]
        listed = " and ".join([*([", ".join(names[:-1])] if names[:-1] else []), names[-1]])
        where = f"after {num_output} tokens of output" if num_output else "to begin with"
        verb = "leave" if len(names) > 1 else "leaves"
        return f"{listed} {verb} no token {where}: loosen one of them, or leave one out"


def restricting_fields(params: SamplingParams) -> list[str]:
    """Return the names of a request's fields that forbid tokens."""
    values = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_ids,
        "min_tokens": params.min_tokens,
    }
    return [name for name, value in values.items() if value]


def token_rules(params: SamplingParams, stop_ids: Collection[int]) -> TokenRules | None:
    """Make the rules of a request; None where no field forbids a token."""
    return TokenRules(params, stop_ids) if restricting_fields(params) else None


def bits(ids: Collection[int]) -> int:
    """Return a set of token ids as bits."""
    if not ids:
        return 0
    digits = bytearray(b"0") * (max(ids) + 1)
    one = ord("1")
    for id in ids:
        digits[-1 - id] = one
    return int(digits, 2)


# -- threads -----------------------------------------------------------------------------------------------------------


MOST_THREADS = 16
OTHER_CORES = 2  # for the loop's and the I/O thread
WORTHWHILE_S = 0.001  # of processor time; below, threads that wait for the interpreter's lock cost more than they gain

G = TypeVar("G")
R = TypeVar("R")


def num_mask_threads() -> int:
    """Return how many threads compute masks at a time on this machine, and how many lexers of a grammar are of use."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - OTHER_CORES))


class MaskThreads:
    """Runs the groups of one step at a time, in threads once they have taken WORTHWHILE_S."""

    def __init__(self, clock: Callable[[], float], num_threads: int | None = None) -> None:
        """`num_threads`: with the caller's; None: as many as the machine has use for. `clock`: the processor time of
        the thread that asks. Where other threads hold the interpreter's lock the groups take longer, and more threads
        make that worse."""
        self.num_threads = num_threads or num_mask_threads()
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None  # made when the first grammar comes
        self._latest_s = 0.0  # that the groups of the latest step took, all added up

    def begin(self, work: Callable[[], R]) -> Callable[[], R]:
        """Start `work` beside the caller. Returns what waits for its result."""
        future: Future[R] = self._pool().submit(work)
        return future.result

    def run(self, work: Callable[[G], R], groups: list[G]) -> list[R]:
        """Return `work` of each group. It must not raise; each group is worked on by one thread."""
        count = min(self.num_threads, len(groups)) if self._latest_s > WORTHWHILE_S else 1
        if count < 2:
            results, self._latest_s = self._timed(work, groups)
            return results
        others = [self._pool().submit(self._timed, work, groups[place::count]) for place in range(1, count)]
        parts = [self._timed(work, groups[::count]), *(other.result() for other in others)]
        self._latest_s = sum(seconds for _, seconds in parts)
        return [parts[place % count][0][place // count] for place in range(len(groups))]

    def _timed(self, work: Callable[[G], R], groups: list[G]) -> tuple[list[R], float]:
        begin = self._clock()
        results = [work(group) for group in groups]
        return results, self._clock() - begin

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="masks")
        return self._threads
