"""GrammarCompiler: from a GrammarSpec to a matcher, off the engine's loop, with bounded effort and a bounded cache."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, regex_to_lark

from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structure import GrammarSpec
from inferengine.structured.ebnf import is_ebnf, to_lark
from inferengine.structured.matcher import TokenMatcher

# Between JSON tokens: a little of any space. Without a bound a model may print spaces until its length is used up.
WHITESPACE = r"[ \n\t]{0,12}"
CACHE_BYTES = 64 * 1024 * 1024
BYTES_PER_GRAMMAR = 64 * 1024  # measured resident cost of a small grammar; large ones grow with their source
BYTES_PER_SOURCE_BYTE = 64
# llguidance follows references by recursion: a schema of 1,000 that name each other in turn overruns the 8 MiB that a
# thread usually has, which ends the process. Measured: up to 20 KiB a reference, so 64 MiB for 256 KiB of schema. Only
# what is touched takes memory.
STACK_BYTES = 256 * 1024 * 1024
MAX_SOURCE_BYTES = 1024 * 1024  # as far as that stack reaches, whatever limits.max_grammar_bytes says
MAX_RULES = 2000  # of a grammar: with 10,000 that name each other in turn llguidance is busy for minutes
_RULE = re.compile(r"(?m)^[ \t]*[?!]?[A-Za-z_]\w*[^:\n\"/]{0,80}:", re.ASCII)

T = TypeVar("T")
Done = Callable[[TokenMatcher | InferEngineError], None]


class GrammarCompiler:
    """Compiles for one tokenizer, in threads with a large stack. `compile` blocks; `submit` answers from such a thread.

    llguidance bounds the work by fuel (steps of its lexer and parser), so a hostile grammar ends in an error within
    tens of milliseconds; the lock of the interpreter is free while it works, but for the vocabulary, which comes first.
    """

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: list[int], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(verbose_errors=False)
        self._cache: OrderedDict[GrammarSpec, tuple[LLMatcher, int]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._lock = Lock()
        self._here = threading.local()
        self._threads = ThreadPoolExecutor(
            2, thread_name_prefix="grammar", initializer=partial(setattr, self._here, "is_worker", True)
        )
        self.num_hits = 0
        self.num_compiled = 0

    def submit(self, spec: GrammarSpec, done: Done) -> None:
        """Compile in the background; `done` gets a fresh matcher or the error, in a worker thread."""

        def work() -> None:
            try:
                done(self.compile(spec))
            except InferEngineError as error:
                done(error)
            except Exception as error:
                done(InferEngineError("engine_error", f"The grammar could not be compiled: {type(error).__name__}."))

        self._start(work)

    def compile(self, spec: GrammarSpec) -> TokenMatcher:
        """A matcher at the beginning of `spec`. Raises InvalidRequest with the compiler's own words."""
        with self._lock:
            cached = self._cache.get(spec)
            if cached is not None:
                self._cache.move_to_end(spec)
                self.num_hits += 1
                return TokenMatcher(cached[0].deep_copy())
        if getattr(self._here, "is_worker", False):
            return self._compile(spec)
        return self._start(partial(self._compile, spec)).result()

    def _start(self, work: Callable[[], T]) -> Future[T]:
        """Have a worker do it. The size of a stack is the process's to set: a thread that somebody else starts in the
        same moment gets as much, which costs it nothing."""
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(before)

    def _compile(self, spec: GrammarSpec) -> TokenMatcher:
        if len(spec.source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest("grammar", f"has more than {MAX_SOURCE_BYTES} bytes")
        matcher = LLMatcher(self._llguidance_tokenizer(), _source(spec), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest("grammar", f"cannot be compiled: {_first_line(matcher.get_error())}")
        self._remember(spec, matcher)
        return TokenMatcher(matcher.deep_copy())

    def prepare(self) -> Future[LLTokenizer]:
        """Have made, in the background, what the first grammar needs beside itself."""
        return self._start(self._llguidance_tokenizer)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:  # a second for a large vocabulary, with the interpreter's lock
                self._tokenizer = LLTokenizer(
                    self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            return self._tokenizer

    def _remember(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        size = BYTES_PER_GRAMMAR + BYTES_PER_SOURCE_BYTE * len(spec.source)
        with self._lock:
            self.num_compiled += 1
            if spec in self._cache or size > self._cache_bytes:
                return
            self._cache[spec] = (matcher, size)
            self._cached_bytes += size
            while self._cached_bytes > self._cache_bytes:
                _, (_, freed) = self._cache.popitem(last=False)
                self._cached_bytes -= freed


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form."""
    try:
        return str(_SOURCES[spec.kind](spec))
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise InvalidRequest("grammar", f"cannot be read: {_first_line(str(error))}") from None


def _json_schema(spec: GrammarSpec) -> str:
    whitespace = WHITESPACE if spec.whitespace is None else spec.whitespace
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(spec.source, overrides=options))


def _regex(spec: GrammarSpec) -> str:
    """A digit means 0-9, as everybody who writes \\d into a request means it."""
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.source, 'd')}/\n"))


def _lark(spec: GrammarSpec) -> str:
    """A grammar in Lark, or in the EBNF that llama.cpp and xgrammar read."""
    source = to_lark(spec.source) if is_ebnf(spec.source) else spec.source
    if sum(1 for _ in _RULE.finditer(source)) > MAX_RULES:
        raise ValueError(f"has more than {MAX_RULES} rules")
    return str(LLMatcher.grammar_from_lark(source))


def _choice(spec: GrammarSpec) -> str:
    items = json.loads(spec.source)
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("choices must be a list of strings, none of them empty")
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in items)
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n"))  # one expression: any number


def _structural_tag(spec: GrammarSpec) -> str:
    value = json.loads(spec.source)
    tags = []
    for item in value["structures"]:
        trigger = next((trigger for trigger in value["triggers"] if item["begin"].startswith(trigger)), "")
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item.get("end", "")))
    return str(StructTag.to_grammar(tags, assume_special=False))


_SOURCES: dict[str, Callable[[GrammarSpec], str]] = {
    "json_schema": _json_schema,
    "json_object": lambda spec: _json_schema(spec._replace(source='{"type": "object"}')),
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "structural_tag": _structural_tag,
}


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] if lines else "no reason given"
