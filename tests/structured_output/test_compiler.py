"""Compiling: hostile grammars are refused in time, errors say why, nothing grows without end."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from inferengine.config import LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output.build import TRANSLATIONS
from inferengine.structured_output.compiler import (
    BYTES_PER_GRAMMAR,
    MAX_GROWTH_BYTES,
    TRIM_S,
    CachedGrammar,
    GrammarCache,
)
from inferengine.structured_output.matcher import GrammarUsage
from inferengine.structured_output.spec import (
    GRAMMAR_KINDS,
    GrammarSpec,
    grammar_from_list,
    grammar_to_list,
    read_grammar,
    validate_grammar,
)
from tests.structured_output.builders import Vocabulary

LIMITS = LimitsConfig()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary("byte_level")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "long string": {"type": "string", "maxLength": 10**6},
    "many items": {"type": "array", "minItems": 10**5, "items": {"type": "integer"}},
    "repetition of repetition": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "its own reference": {"$ref": "#"},
    "a circle of references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "many alternatives": {
        "anyOf": [{"type": "object", "properties": {f"k{i}": {"enum": list(range(50))}}} for i in range(300)]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_compiled_or_refused_while_others_run(vocabulary: Vocabulary, name: str) -> None:
    """Another thread keeps turning meanwhile: compiling must not hold the interpreter."""
    turns, stop = 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0.001)

    thread = threading.Thread(target=turn)
    thread.start()
    begin = time.thread_time()
    try:
        matcher = vocabulary.compiler.compile(GrammarSpec("json_schema", json.dumps(HOSTILE[name])))
        mask = bytearray(4 * -(-vocabulary.size // 32))
        matcher.fill_bitmask(memoryview(mask))
    except (InvalidRequest, RuntimeError) as error:
        refusal = str(error)
    else:
        refusal = None
    finally:
        spent = time.thread_time() - begin
        stop.set()
        thread.join()
    assert refusal != ""
    assert spent < 1.0  # far above what it takes (tens of milliseconds), far below what an explosion would
    assert turns > 0


def chained(wrap: str, length: int) -> str:
    """Return a schema of definitions each of which names the next one."""
    definitions = {f"a{number}": json.loads(wrap % f"#/$defs/a{number + 1}") for number in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "string"}}})


@pytest.mark.parametrize(
    ("wrap", "length"),
    [
        ('{"$ref": "%s"}', 7000),
        ('{"type": "object", "properties": {"x": {"$ref": "%s"}}}', 3200),
        ('{"allOf": [{"$ref": "%s"}]}', 5000),
    ],
)
def test_a_long_chain_of_references_does_not_end_the_process(vocabulary: Vocabulary, wrap: str, length: int) -> None:
    """The compiler recurses once for each: on a stack of the usual size that was the end of the engine."""
    spec = GrammarSpec("json_schema", chained(wrap, length))
    validate_grammar(spec, LIMITS)
    matcher = vocabulary.compiler.compile(spec)
    mask = bytearray(4 * -(-vocabulary.size // 32))
    matcher.fill_bitmask(memoryview(mask))
    assert any(mask)


def test_a_grammar_of_thousands_of_rules_is_refused(vocabulary: Vocabulary) -> None:
    """Terminals that name each other in turn keep the compiler busy for minutes."""
    chain = "".join(f'T{number}: T{number + 1} "b"\n' for number in range(9000))
    with pytest.raises(InvalidRequest, match="more than 2000 rules"):
        vocabulary.compiler.compile(GrammarSpec("lark", f'start: T0\n{chain}T9000: "a"\n'))


def test_a_grammar_of_thousands_of_choices_compiles(vocabulary: Vocabulary) -> None:
    choices = [f"choice {number}" for number in range(5000)]
    assert vocabulary.generate(GrammarSpec("choice", json.dumps(choices)), 1) in choices


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GrammarSpec("json_schema", json.dumps(nested(70))), "nested"),
        (GrammarSpec("json_schema", "[" * 10**5), "nested"),
        (GrammarSpec("regex", "a" * (LIMITS.max_grammar_bytes + 1)), "bytes"),
        (GrammarSpec("regex", "a\0b"), "NUL"),
        (GrammarSpec("soap", "x"), "kind"),
        (GrammarSpec("json_object", "{}", "x" * 201), "whitespace"),
    ],
)
def test_what_is_too_much_is_refused_before_compiling(spec: GrammarSpec, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        validate_grammar(spec, LIMITS)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", '{"type": "nope"}'),
        GrammarSpec("json_schema", "not json"),
        GrammarSpec("regex", "["),
        GrammarSpec("regex", "(?=a)b"),
        GrammarSpec("lark", "start: undefined_rule"),
        GrammarSpec("choice", '{"not": "a list"}'),
        GrammarSpec("structural_tag", '{"structures": [{"begin": "a", "schema": {}}], "triggers": ["b"]}'),
    ],
)
def test_what_does_not_compile_is_an_invalid_request_that_says_why(vocabulary: Vocabulary, spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vocabulary.compiler.compile(spec)
    assert caught.value.field == "grammar"
    assert len(caught.value.message) > 20


def test_every_kind_has_a_translation() -> None:
    assert set(TRANSLATIONS) == set(GRAMMAR_KINDS)


def test_a_grammar_is_compiled_once_and_each_request_starts_at_its_beginning(vocabulary: Vocabulary) -> None:
    spec = GrammarSpec("regex", "abc|abd")
    compiled = vocabulary.compiler.num_compiled
    first = vocabulary.compiler.compile(spec)
    assert first.accept(vocabulary.fast.token_to_id("a"))
    second = vocabulary.compiler.compile(spec)
    assert second.accept(vocabulary.fast.token_to_id("a"))
    assert vocabulary.compiler.num_compiled == compiled + 1


def test_the_cache_is_bounded_in_bytes() -> None:
    small = Vocabulary("byte_level", cache_bytes=2_000_000)
    for index in range(50):
        small.compiler.compile(GrammarSpec("regex", f"x{index}"))
    assert 1 <= len(small.compiler.cache) <= 2_000_000 // BYTES_PER_GRAMMAR
    assert small.compiler.cache.size <= 2_000_000


def test_grammars_that_grow_while_they_are_used_are_evicted_without_a_new_one() -> None:
    now = [0.0]
    cache = GrammarCache(3 * MAX_GROWTH_BYTES, clock=lambda: now[0])
    entries = [CachedGrammar(object(), GrammarUsage(), BYTES_PER_GRAMMAR) for _ in range(10)]  # type: ignore[arg-type]
    for index, entry in enumerate(entries):
        cache.keep(bytes([index]), entry)
    for entry in entries:  # all have made the most states that a lexer makes
        entry.usage.seconds = 0.5
    assert cache.entry(bytes([4])) is entries[4]
    assert len(cache) == 10, "not looked at for each request"
    now[0] += TRIM_S
    assert cache.entry(bytes([4])) is entries[4]
    assert cache.size <= cache.max_bytes
    assert [index for index in range(10) if cache.num_lexers(bytes([index]))] == [4, 9]


def test_a_grammar_that_is_asked_for_stays_however_large_it_is() -> None:
    now = [0.0]
    cache = GrammarCache(BYTES_PER_GRAMMAR, clock=lambda: now[0])
    entry = CachedGrammar(object(), GrammarUsage(), BYTES_PER_GRAMMAR)  # type: ignore[arg-type]
    cache.keep(b"", entry)
    entry.usage.seconds = 0.5
    now[0] += TRIM_S
    assert cache.entry(b"") is entry


def test_a_token_that_is_not_allowed_changes_nothing(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compiler.compile(GrammarSpec("regex", "xyz"))
    ids = {letter: vocabulary.fast.token_to_id(letter) for letter in "xyz"}
    assert not matcher.accept(ids["z"])
    assert matcher.validate([ids["x"], ids["y"], ids["x"]]) == 2
    assert all(matcher.accept(ids[letter]) for letter in "xy")
    matcher.rollback(1)
    assert all(matcher.accept(ids[letter]) for letter in "yz")
    assert matcher.is_terminated()


def test_compiling_in_the_background_answers_with_a_matcher_or_the_error(vocabulary: Vocabulary) -> None:
    answers: list[object] = []
    for source in ("ab", "["):
        done = threading.Event()

        def answer(result: object, done: threading.Event = done) -> None:
            answers.append(result)
            done.set()

        vocabulary.compiler.submit(GrammarSpec("regex", source), answer)
        assert done.wait(60)
    assert isinstance(answers[1], InferEngineError)
    assert answers[0][0].accept(vocabulary.fast.token_to_id("a"))  # type: ignore[index]


def test_a_spec_survives_the_wire() -> None:
    for spec in (GrammarSpec("regex", "a+"), GrammarSpec("json_object", "{}", "")):
        assert grammar_from_list(grammar_to_list(spec)) == spec


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "guided_whitespace_pattern": 1}, "guided_whitespace_pattern"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_grammar(body)
    assert caught.value.field == field


def test_text_and_nothing_ask_for_nothing() -> None:
    assert read_grammar({}) is None
    assert read_grammar({"response_format": {"type": "text"}}) is None
    assert read_grammar({"response_format": {}, "structured_outputs": {}}) is None
    assert read_grammar({"structured_outputs": {}, "guided_regex": "a+"}) == GrammarSpec("regex", "a+")
