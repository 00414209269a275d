"""GrammarCompiler: compiles GrammarSpecs into matchers outside of the engine's loop, within limits, with a cache.

An unknown grammar is tried out in another process first, which can be killed (compile_process.py). Only what compiled
there within its limits is compiled here, in threads with a large stack; cached grammars are copied by a thread that
does nothing else, so copies wait for no compilation.

Copies of a compiled grammar share the states of its lexer, which are made as they are needed, so an entry of the cache
grows while outputs are made under it. llguidance does not report by how much; it is estimated from processor time.
Copies also wait for each other, so a grammar that compiles quickly is compiled again once OUTPUTS_PER_LEXER outputs go
on under it: their masks are then computed at the same time (core/constraints.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from inferengine.config import LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output.build import MAX_SOURCE_BYTES, STACK_BYTES, Builder, Vocabulary
from inferengine.structured_output.compile_process import QUICK_S, CompileProcess, TrialResult
from inferengine.structured_output.matcher import Budget, GrammarUsage, TokenMatcher
from inferengine.structured_output.spec import GrammarSpec

logger = logging.getLogger(__name__)

CACHE_BYTES = 128 * 1024 * 1024
BYTES_PER_GRAMMAR = 64 * 1024  # measured resident cost of a small grammar
GROWTH_BYTES_PER_S = 256 * 1024 * 1024  # measured of one that makes new states all the time
MAX_GROWTH_BYTES = 32 * 1024 * 1024  # of MAX_LEXER_STATES small states
TRIM_S = 1.0  # between two looks at how far the grammars in use have grown
RETIRE_S = 1.0  # so much use may have made most of its states: the next request begins with fresh ones
MAX_RESULTS = 4096
OUTPUTS_PER_LEXER = 4


_LIBC = ctypes.CDLL(None)
MAX_WAITING = 1024  # grammars that are not known, being compiled or waiting for it
OnCompiled = Callable[[list[TokenMatcher] | InferEngineError], None]


class CachedGrammar(NamedTuple):
    """A matcher at the beginning of its grammar, and the processor time that its outputs have spent."""

    matcher: LLMatcher
    usage: GrammarUsage
    num_bytes: int

    @property
    def size(self) -> int:
        """Estimated bytes with the states of its lexer."""
        return self.num_bytes + min(MAX_GROWTH_BYTES, int(self.usage.seconds * GROWTH_BYTES_PER_S))

    def promise(self, ticket: Ticket) -> None:
        """Count the outputs of a ticket; each ends with its matcher."""
        self.usage.outputs.extend([None] * ticket.count)


class GrammarCache:
    """Compiled grammars, of which the least recently used is evicted first. Not thread-safe.

    Entries grow while they are used, so what is too much is evicted when one is added and, at most each TRIM_S, when
    one is used again."""

    def __init__(self, num_bytes: int = CACHE_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = num_bytes
        self._clock = clock
        self._trimmed_s = clock()
        self._entries: OrderedDict[bytes, list[CachedGrammar]] = OrderedDict()  # each with a lexer of its own
        self._results: OrderedDict[bytes, TrialResult] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Estimated bytes of all entries."""
        return sum(entry.size for entries in self._entries.values() for entry in entries)

    def entry(self, key: bytes) -> CachedGrammar | None:
        """Return the compiled grammar, of several the one with the fewest outputs. None: there is none, or the outputs
        of each have spent RETIRE_S or failed."""
        entries = self._entries.get(key, [])
        entries[:] = [entry for entry in entries if entry.usage.seconds <= RETIRE_S and entry.usage.failure is None]
        if not entries:
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        if self._clock() - self._trimmed_s >= TRIM_S:
            self.trim(fewest=1)
        return min(entries, key=lambda entry: len(entry.usage.outputs))

    def num_lexers(self, key: bytes) -> int:
        """Return how many times a grammar is there."""
        return len(self._entries.get(key, ()))

    def trial_result(self, key: bytes) -> TrialResult | None:
        """Return what compiling it took, or why it is refused; None: not tried yet."""
        trial_result = self._results.get(key)
        if trial_result is not None:
            self._results.move_to_end(key)
        return trial_result

    def keep(self, key: bytes, entry: CachedGrammar) -> bool:
        """Add a compiled grammar. Returns whether others were evicted for it."""
        self._entries.setdefault(key, []).append(entry)
        return self.trim()

    def trim(self, *, fewest: int = 0) -> bool:
        """Evict grammars until the others, or the `fewest` used last, fit. Returns whether any had to go."""
        self._trimmed_s = self._clock()
        is_full = self.size > self.max_bytes
        while len(self._entries) > fewest and self.size > self.max_bytes:
            self._entries.popitem(last=False)
        return is_full

    def clear(self) -> None:
        """Forget every grammar and every trial result."""
        self._entries.clear()
        self._results.clear()

    def remember(self, key: bytes, trial_result: TrialResult) -> None:
        """Keep what trying a grammar out gave."""
        self._results[key] = trial_result
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)


def cache_key(spec: GrammarSpec) -> bytes:
    """Return the hash of a grammar, 32 bytes: equal for equal specs."""
    digest = hashlib.sha256()
    for part in (spec.kind, spec.source, "-" if spec.whitespace is None else f"={spec.whitespace}"):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class Ticket:
    """One request for matchers. `done` is called with it once, unless it is cancelled before."""

    def __init__(self, key: bytes, count: int, done: OnCompiled) -> None:
        self.key = key
        self.count = count
        self.done = done


class _UnknownGrammar:
    """A grammar that is being tried out, and who waits for it."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.trial = 0
        self.tickets: list[Ticket] = []


class GrammarCompiler:
    """Compiles for one tokenizer. `submit` returns at once and answers from a thread; `compile` waits."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: list[int],
        limits: LimitsConfig | None = None,
        cache_bytes: int = CACHE_BYTES,
        max_lexers: int = 1,
    ) -> None:
        """`max_lexers`: of one grammar, as many as threads that compute masks."""
        self._max_lexers = max_lexers
        self._limits = limits or LimitsConfig()
        self._builder = Builder(Vocabulary(tokenizer_json, vocab_size, eos_token_ids))
        self.process = CompileProcess(self._builder.vocabulary, self._limits)
        self.cache = GrammarCache(cache_bytes)
        self._lock = threading.Lock()  # of all that follows, and of the cache
        self._unknown: dict[bytes, _UnknownGrammar] = {}
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="grammar-copy")
        self._building = ThreadPoolExecutor(1, thread_name_prefix="grammar-build")
        self._building_slowly = ThreadPoolExecutor(1, thread_name_prefix="grammar-build-slow")
        self._logged: set[str] = set()
        self.num_compiled = 0

    def submit(self, spec: GrammarSpec, done: OnCompiled, *, count: int = 1, tenant: str = "") -> Ticket:
        """Have `count` matchers made, all at the beginning of `spec`; they share one budget. `done` gets them, or the
        error, in a thread of this."""
        if spec.whitespace is None:
            spec = spec._replace(whitespace=self._limits.json_whitespace)
        ticket = Ticket(cache_key(spec), count, done)
        with self._lock:
            entry, trial_result = self.cache.entry(ticket.key), self.cache.trial_result(ticket.key)
            if entry is not None and not self._wants_lexer(ticket.key, entry, trial_result):
                entry.promise(ticket)
                self._copying.submit(self._hand_out, entry, ticket)
            elif trial_result is not None:
                self._go_on(spec, trial_result, [ticket])
            elif len(spec.source.encode()) > MAX_SOURCE_BYTES:
                error = InvalidRequest("grammar", f"has more than {MAX_SOURCE_BYTES} bytes")
                self._copying.submit(_answer, [ticket], error)
            else:
                self._try_out(spec, ticket, tenant)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket. A compilation that no other ticket waits for is killed."""
        with self._lock:
            unknown = self._unknown.get(ticket.key)
            if unknown is None or ticket not in unknown.tickets:
                return
            unknown.tickets.remove(ticket)
            if not unknown.tickets:
                del self._unknown[ticket.key]
                self.process.drop(unknown.trial)

    def is_slow(self, ticket: Ticket) -> bool:
        """Return whether the grammar itself takes long, and does not merely wait its turn."""
        with self._lock:
            unknown = self._unknown.get(ticket.key)
            return unknown is not None and self.process.is_slow(unknown.trial)

    def compile(self, spec: GrammarSpec) -> TokenMatcher:
        """Return a matcher at the beginning of `spec`. Raises InvalidRequest saying what is wrong."""
        return self.compile_many(spec, 1)[0]

    def compile_many(self, spec: GrammarSpec, count: int) -> list[TokenMatcher]:
        """Return `count` matchers, for the choices of one request. Waits as long as compiling may take."""
        answer: Future[list[TokenMatcher] | InferEngineError] = Future()
        self.submit(spec, answer.set_result, count=count)
        result = answer.result()
        if isinstance(result, InferEngineError):
            raise result
        return result

    def prepare(self) -> Future[LLTokenizer]:
        """Start the process and make the tokenizer in the background, so that the first grammar need not wait for
        them."""
        self.process.start()
        return self._building.submit(self._builder.tokenizer)

    def forget(self) -> None:
        """Drop all cached grammars. Requests that use one keep it."""
        with self._lock:
            self.cache.clear()

    def close(self) -> None:
        """End the process and the threads. What waits is dropped."""
        self.process.close()
        for threads in (self._copying, self._building, self._building_slowly):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _try_out(self, spec: GrammarSpec, ticket: Ticket, tenant: str) -> None:
        unknown = self._unknown.get(ticket.key)
        if unknown is not None:
            unknown.tickets.append(ticket)
            return
        if len(self._unknown) >= MAX_WAITING:
            message = "Too many grammars wait to be compiled."
            self._copying.submit(_answer, [ticket], InferEngineError("overloaded", message, retry_after_s=2.0))
            return
        unknown = self._unknown[ticket.key] = _UnknownGrammar(spec)
        unknown.tickets.append(ticket)
        unknown.trial = self.process.submit(tenant, spec, partial(self._on_result, ticket.key, unknown))

    def _on_result(self, key: bytes, unknown: _UnknownGrammar, trial_result: TrialResult | InferEngineError) -> None:
        with self._lock:
            if self._unknown.get(key) is unknown:
                del self._unknown[key]
            tickets, unknown.tickets = unknown.tickets, []
            if isinstance(trial_result, InferEngineError):
                self._copying.submit(_answer, tickets, trial_result)
            else:
                self._log_once(trial_result.notes)
                if trial_result.grammar is None:  # else it is tried out again once it has been evicted
                    self.cache.remember(key, trial_result)
                self._go_on(unknown.spec, trial_result, tickets)

    def _log_once(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            if note not in self._logged and len(self._logged) < MAX_RESULTS:
                self._logged.add(note)
                logger.warning("%s", note)

    def _go_on(self, spec: GrammarSpec, trial_result: TrialResult, tickets: list[Ticket]) -> None:
        """Compile a grammar that compiled in its trial, quick ones not behind slow ones."""
        if trial_result.refused is not None:
            self._copying.submit(_answer, tickets, InvalidRequest("grammar", trial_result.refused))
            return
        threads = self._building if trial_result.cpu_s <= QUICK_S else self._building_slowly
        # The size of a stack is the process's to set: a thread that somebody else starts in the same moment gets as
        # much, which costs it nothing.
        before = threading.stack_size(STACK_BYTES)
        try:
            threads.submit(self._build, spec, trial_result, tickets)
        finally:
            threading.stack_size(before)

    def _wants_lexer(self, key: bytes, entry: CachedGrammar, trial_result: TrialResult | None) -> bool:
        """Return whether another output under this grammar should have a new lexer."""
        if trial_result is None or trial_result.cpu_s > QUICK_S or len(entry.usage.outputs) < OUTPUTS_PER_LEXER:
            return False
        return self.cache.num_lexers(key) < self._max_lexers

    def _build(self, spec: GrammarSpec, trial_result: TrialResult, tickets: list[Ticket]) -> None:
        for place, ticket in enumerate(tickets):
            try:
                entry = self._entry(spec, trial_result, ticket)
            except InferEngineError as error:
                return _answer(tickets[place:], error)
            except BaseException as error:  # a panic in the compiler is none of Exception
                message = f"The grammar could not be compiled: {type(error).__name__}."
                return _answer(tickets[place:], InferEngineError("engine_error", message))
            self._hand_out(entry, ticket)

    def _entry(self, spec: GrammarSpec, trial_result: TrialResult, ticket: Ticket) -> CachedGrammar:
        key = ticket.key
        with self._lock:
            known = self.cache.entry(key)
            if known is not None and not self._wants_lexer(key, known, trial_result):
                known.promise(ticket)  # compiled meanwhile for another request
                return known
        given = trial_result.grammar
        matcher = self._builder.build(spec).matcher if given is None else self._builder.compile(given)
        mask = bytearray(self._builder.vocabulary.mask_bytes)
        self._builder.matcher(matcher, Budget(1.0, GrammarUsage())).fill_bitmask(memoryview(mask))  # the slowest
        entry = CachedGrammar(
            matcher, GrammarUsage(), 2 * len(spec.source) + max(BYTES_PER_GRAMMAR, trial_result.num_bytes)
        )
        with self._lock:
            self.num_compiled += 1
            entry.promise(ticket)
            others_went = self.cache.keep(key, entry)
        if others_went or trial_result.cpu_s > QUICK_S:
            _LIBC.malloc_trim(0)  # what is free in between would stay with this process; the interpreter is free
        return entry

    def _hand_out(self, entry: CachedGrammar, ticket: Ticket) -> None:
        budget = Budget(self._limits.grammar_token_ms / 1e3, entry.usage)
        with self._lock:
            copies = [entry.matcher.deep_copy() for _ in range(ticket.count)]
        ticket.done([self._builder.matcher(copy, budget) for copy in copies])


def _answer(tickets: list[Ticket], error: InferEngineError) -> None:
    for ticket in tickets:
        ticket.done(error)
