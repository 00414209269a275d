"""Builder: compiles a GrammarSpec into llguidance's matcher, in the engine and in the process that tries grammars out.

`translate` writes the spec in llguidance's own form, in time proportional to the source.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, regex_to_lark

from inferengine.errors import InvalidRequest
from inferengine.structured_output.ebnf import is_ebnf, to_lark
from inferengine.structured_output.matcher import (
    MATCHES_NOTHING,
    Budget,
    GrammarUsage,
    TokenMatcher,
    first_lines,
    reason,
)
from inferengine.structured_output.spec import GrammarSpec

# Between JSON tokens: a little of any space. Without a bound a model may print spaces until its length is used up.
WHITESPACE = r"[ \n\t]{0,12}"
MAX_RULES = 2000  # of a grammar: with 10,000 that name each other in turn llguidance is busy for minutes
_RULE = re.compile(r"(?m)^[ \t]*[?!]?[A-Za-z_]\w*[^:\n\"/]{0,80}:", re.ASCII)


# llguidance follows references by recursion: a schema of 1,000 that name each other in turn overruns the 8 MiB that a
# thread usually has, which ends the process. Measured: up to 20 KiB a reference, so 64 MiB for 256 KiB of schema. Only
# what is touched takes memory.
STACK_BYTES = 256 * 1024 * 1024
MAX_SOURCE_BYTES = 1024 * 1024  # as far as that stack reaches, whatever limits.max_grammar_bytes says
# Four for each optional property that may come next: 1,500 of them. The largest of 2,000 takes 60 ms for a mask.
MAX_ITEMS_IN_ROW = 6000
STEP_LEXER_FUEL = 100_000  # 7 to 12 ms for one mask; what people write needs a tenth
MAX_LEXER_STATES = 100_000  # of all outputs of a compiled grammar together, 250 to 2,000 bytes each
NUM_WALKS = 4
WALK_TOKENS = 8
T = TypeVar("T")


def translate(spec: GrammarSpec) -> str:
    """Return a spec in llguidance's own form. Raises InvalidRequest saying what cannot be read."""
    try:
        return str(TRANSLATIONS[spec.kind](spec))
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise InvalidRequest("grammar", f"cannot be read: {first_lines(str(error))}") from None


def _json_schema(spec: GrammarSpec) -> str:
    whitespace = WHITESPACE if spec.whitespace is None else spec.whitespace
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(spec.source, overrides=options))


def _regex(spec: GrammarSpec) -> str:
    """Translate a regular expression. \\d means 0-9 alone."""
    return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.source, 'd')}/\n"))


def _lark(spec: GrammarSpec) -> str:
    """Translate a grammar in Lark, or in the EBNF that llama.cpp and xgrammar read."""
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


TRANSLATIONS: dict[str, Callable[[GrammarSpec], str]] = {
    "json_schema": _json_schema,
    "json_object": lambda spec: _json_schema(spec._replace(source='{"type": "object"}')),
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "structural_tag": _structural_tag,
}


class Vocabulary(NamedTuple):
    """The tokens that grammars are compiled for."""

    tokenizer_json: str
    size: int
    eos_token_ids: list[int]

    @property
    def mask_bytes(self) -> int:
        """Size of a token mask: one bit a token, whole 32-bit words."""
        return 4 * -(-self.size // 32)


class Builder:
    """Compiles for one vocabulary, without limits of time and memory: those are CompileProcess's."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._limits = LLParserLimits(
            verbose_errors=False,
            step_lexer_fuel=STEP_LEXER_FUEL,
            max_items_in_row=MAX_ITEMS_IN_ROW,
            max_lexer_states=MAX_LEXER_STATES,
        )
        self._lock = Lock()

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer. Making it, once, holds the interpreter's lock: a second for a large
        vocabulary."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        vocabulary = self.vocabulary
        ends = vocabulary.eos_token_ids or None  # None: the tokenizer's own
        return LLTokenizer(vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=ends)

    def build(self, spec: GrammarSpec) -> LLMatcher:
        """Compile `spec`: return a matcher at its beginning. Call it on a stack of STACK_BYTES; the interpreter's lock
        is free most of the time. Raises InvalidRequest saying what is wrong."""
        if len(spec.source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest("grammar", f"has more than {MAX_SOURCE_BYTES} bytes")
        matcher = LLMatcher(self.tokenizer(), translate(spec), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest("grammar", reason(matcher.get_error()))
        return matcher

    def try_out(self, matcher: LLMatcher, token_s: float) -> None:
        """Follow a grammar by a few random tokens, as an output would. Raises InvalidRequest when each of the walks
        fails or exceeds the budget: a mistake in hundreds of optional properties shows at the first of them."""
        refusal: InvalidRequest | None = None
        for walk in range(NUM_WALKS):
            try:
                self._walk(TokenMatcher(matcher.deep_copy(), Budget(token_s, GrammarUsage())), random.Random(walk))
                return
            except InvalidRequest as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _walk(self, matcher: TokenMatcher, draw: random.Random) -> None:
        mask = bytearray(self.vocabulary.mask_bytes)
        for step in range(WALK_TOKENS):
            matcher.fill_bitmask(memoryview(mask))
            token = _some_token(mask, draw)
            if token is None:
                raise InvalidRequest("grammar", MATCHES_NOTHING)
            if step and token in self.vocabulary.eos_token_ids:
                return
            if not matcher.accept(token) or matcher.is_terminated():
                return
            matcher.forced()


def on_large_stack(work: Callable[[], T]) -> T:
    """Call `work` in a thread with a stack of STACK_BYTES. Returns its result, or raises its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="grammar-compile")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _some_token(mask: bytearray, draw: random.Random) -> int | None:
    """A random token that the mask allows; None: it allows none."""
    start = draw.randrange(len(mask))
    for offset in range(len(mask)):
        place = (start + offset) % len(mask)
        bits = [bit for bit in range(8) if mask[place] >> bit & 1]
        if bits:
            return 8 * place + bits[draw.randrange(len(bits))]
    return None
