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
from inferengine.structured_output.json_grammar import (
    STYLE_KEY,
    TOOL_KEY,
    Translation,
    tools_of,
    translate_literals,
    translate_schema,
)
from inferengine.structured_output.matcher import (
    MATCHES_NOTHING,
    Budget,
    GrammarUsage,
    TokenMatcher,
    first_lines,
    reason,
)
from inferengine.structured_output.schema.language import Refusal, check_expression
from inferengine.structured_output.schema.writer import spacing_of
from inferengine.structured_output.spec import GrammarSpec

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
MAX_REASON = 600  # characters
NUM_WALKS = 4
WALK_TOKENS = 8
T = TypeVar("T")
GivenUp = Callable[[str], bool]  # whether the schema of a tool is not to be held to


def translate(spec: GrammarSpec, is_given_up: GivenUp = lambda tool: False) -> Translation:
    """Return a spec in llguidance's own form. `is_given_up`: tools whose schemas are not to be held to. Raises
    InvalidRequest saying what cannot be read."""
    try:
        return TRANSLATIONS[spec.kind](spec, is_given_up)
    except Refusal as refusal:
        raise InvalidRequest("grammar", str(refusal)[:MAX_REASON]) from None
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise InvalidRequest("grammar", f"cannot be read: {first_lines(str(error))}") from None


def _regex(spec: GrammarSpec, _: GivenUp) -> Translation:
    """Translate a regular expression. \\d means 0-9 alone."""
    check_expression(spec.source)
    return _quick(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.source, 'd')}/\n"))


def _lark(spec: GrammarSpec, is_given_up: GivenUp) -> Translation:
    """Translate a grammar in Lark, or in the EBNF that llama.cpp and xgrammar read."""
    if is_ebnf(spec.source):
        source = to_lark(spec.source)
        _check_rules(source)
        return _quick(LLMatcher.grammar_from_lark(source))
    _check_rules(spec.source)
    return translate_literals(spec.source, is_given_up)


def _check_rules(source: str) -> None:
    if sum(1 for _ in _RULE.finditer(source)) > MAX_RULES:
        raise ValueError(f"has more than {MAX_RULES} rules")


def _choice(spec: GrammarSpec, _: GivenUp) -> Translation:
    items = json.loads(spec.source)
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("choices must be a list of strings, none of them empty")
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in items)
    return _quick(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n"))  # one expression: any number


def _structural_tag(spec: GrammarSpec, _: GivenUp) -> Translation:
    value = json.loads(spec.source)
    tags = []
    for item in value["structures"]:
        trigger = next((trigger for trigger in value["triggers"] if item["begin"].startswith(trigger)), "")
        schema = item["schema"]
        if isinstance(schema, dict):
            schema = {**schema, STYLE_KEY: spacing_of(spec.whitespace).options}
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=schema, end=item.get("end", "")))
    return translate_literals(str(StructTag.to_grammar(tags, assume_special=False)))


def _quick(grammar: Any) -> Translation:
    return Translation(str(grammar), is_costly=False)


TRANSLATIONS: dict[str, Callable[[GrammarSpec, GivenUp], Translation]] = {
    "json_schema": lambda spec, _: translate_schema(spec.source, spec.whitespace),
    "json_object": lambda spec, _: translate_schema('{"type": "object"}', spec.whitespace),
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "structural_tag": _structural_tag,
}


class Built(NamedTuple):
    """A matcher at the beginning of its grammar, and what it was made from."""

    matcher: LLMatcher
    translation: Translation


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

    @cached_property
    def text_ends(self) -> tuple[int, ...]:
        """The tokens that end an output and are text to the tokenizer, not special tokens."""
        tokenizer = self.tokenizer()
        return tuple(end for end in tokenizer.eos_tokens if not tokenizer.is_special_token(end))

    def matcher(self, matcher: LLMatcher, budget: Budget) -> TokenMatcher:
        """Return the place in a compiled grammar of an output under this budget."""
        return TokenMatcher(matcher, budget, self.text_ends)

    def build(self, spec: GrammarSpec, *, gives_up_tools: bool = False) -> Built:
        """Compile `spec`. Call it on a stack of STACK_BYTES; the interpreter's lock is free most of the time.
        A tool whose schema does not compile gets any JSON object instead; `gives_up_tools`: all of them. Raises
        InvalidRequest saying what is wrong."""
        if len(spec.source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest("grammar", f"has more than {MAX_SOURCE_BYTES} bytes")
        translation = translate(spec, lambda tool: gives_up_tools)
        try:
            return Built(self.compile(translation.grammar), translation)
        except InvalidRequest:
            if gives_up_tools or not has_tools(spec):
                raise
            tools = tools_of(spec.source)
        failing = {tool for tool in tools if not self._compiles(spec, tool)} or set(tools)
        translation = translate(spec, failing.__contains__)
        return Built(self.compile(translation.grammar), translation)

    def _compiles(self, spec: GrammarSpec, tool: str) -> bool:
        """Return whether the grammar compiles when the schema of no other tool is held to."""
        try:
            self.compile(translate(spec, lambda other: other != tool).grammar)
        except InvalidRequest:
            return False
        return True

    def compile(self, grammar: str) -> LLMatcher:
        """Compile what `translate` made. Raises InvalidRequest."""
        matcher = LLMatcher(self.tokenizer(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest("grammar", reason(matcher.get_error()))
        return matcher

    def try_out(self, matcher: LLMatcher, token_s: float) -> None:
        """Follow a grammar by a few random tokens, as an output would. Raises InvalidRequest when each of the walks
        fails or exceeds the budget: a mistake in hundreds of optional properties shows at the first of them."""
        refusal: InvalidRequest | None = None
        for walk in range(NUM_WALKS):
            try:
                self._walk(self.matcher(matcher.deep_copy(), Budget(token_s, GrammarUsage())), random.Random(walk))
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


def has_tools(spec: GrammarSpec) -> bool:
    """Return whether a grammar has schemas of tools, which it can go on without."""
    return spec.kind == "lark" and f'"{TOOL_KEY}"' in spec.source and bool(tools_of(spec.source))


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
    """Draw a random token that the mask allows; None: it allows none."""
    start = draw.randrange(len(mask))
    for offset in range(len(mask)):
        place = (start + offset) % len(mask)
        bits = [bit for bit in range(8) if mask[place] >> bit & 1]
        if bits:
            return 8 * place + bits[draw.randrange(len(bits))]
    return None
