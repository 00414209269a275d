"""Random requests whose grammar is made to cost: exponential, ambiguous, endless, huge, contradictory, or broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Body = dict[str, Any]


def hostile(draw: random.Random) -> Body:
    """Return fields of a completion. The same draw gives the same."""
    return draw.choice(_KINDS)(draw)


def patterns_of_everything(draw: random.Random) -> Body:
    """Return a grammar that grows exponentially while it is compiled."""
    first, count = draw.randrange(10, 900), draw.randrange(10, 120)
    return {"guided_json": {"type": "string", "allOf": [{"pattern": f".*{first + i}.*"} for i in range(count)]}}


def exponential_states(draw: random.Random) -> Body:
    """Return a grammar with more states than memory; each token makes new ones."""
    length = draw.randrange(10, 80)
    parts = [f".*{letter}.{{{length + place}}}{letter}" for place, letter in enumerate(draw.sample("abcdefgh", 3))]
    return {"guided_regex": f"({'|'.join(parts)})+"}


def repeated_repetitions(draw: random.Random) -> Body:
    inner = "".join(draw.choices("ab.", k=draw.randrange(1, 4)))
    for _ in range(draw.randrange(1, 4)):
        inner = f"({inner}{{{draw.randrange(3)},{draw.randrange(3, 2000)}}})"
    return {"guided_regex": inner}


def ambiguous(draw: random.Random) -> Body:
    names = "pqrs"[: draw.randrange(1, 5)]
    rules = []
    for name in names:
        sides = [" ".join(draw.choices([*names, '"a"', "[a-z ]", '""'], k=draw.randrange(1, 6))) for _ in range(4)]
        rules.append(f"{name} ::= {' | '.join(sides)}")
    return {"guided_grammar": "\n".join([f"root ::= {draw.choice(names)}", *rules])}


def endless(draw: random.Random) -> Body:
    return draw.choice(
        [
            {"guided_grammar": "root ::= root"},
            {"guided_grammar": 'start: "a" start\n'},
            {"guided_json": {"$ref": "#"}},
            {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
            {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        ]
    )


def huge(draw: random.Random) -> Body:
    count = draw.choice([300, 500, 1000, 2000])
    return draw.choice(
        [
            {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}},
            {"guided_json": {"type": "array", "minItems": 100 * count, "items": {"type": "array", "minItems": count}}},
            {"guided_json": {"const": "ab cd " * 20 * count}},
            {"guided_json": {"type": "string", "minLength": 900 * count, "maxLength": 1000 * count}},
            {"guided_choice": ["".join(draw.choices("abcdef ", k=20)) for _ in range(count)]},
            {"guided_json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"pattern": f".*{i}.*x.{{9}}"}}}
                                       for i in range(count // 5)]}},
        ]
    )  # fmt: skip


def contradictory(draw: random.Random) -> Body:
    """Return fields that together leave no token, now or later."""
    word = draw.choice(["a", "b", "cat"])
    return draw.choice(
        [
            {"guided_regex": "[0-9]+", "allowed_token_ids": [draw.randrange(5, 20)]},
            {"guided_choice": [word], "bad_words": [word]},
            {"guided_regex": f"x?{word}", "bad_words": [word, "x"], "min_tokens": 3},
            {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
            {"guided_json": {"enum": []}},
        ]
    )


def noise(draw: random.Random) -> Body:
    text = "".join(draw.choices('()[]{}|*+?.\\^$ab,:"%&~/<>0123456789 \n', k=draw.randrange(1, 200)))
    return {draw.choice(["guided_regex", "guided_grammar", "guided_json"]): text}


def random_schema(draw: random.Random) -> Body:
    def schema(depth: int) -> Any:
        kinds = ["string", "integer", "number", "array", "object", "null"]
        made: dict[str, Any] = {"type": draw.choice(kinds)} if draw.random() < 0.8 else {}
        if draw.random() < 0.3:
            made["pattern"] = draw.choice(["^(a|b)*$", ".*a.{30}b", "(x{1,50}){1,50}", "[^a]*", "("])
        if draw.random() < 0.3:
            made["minLength"] = draw.choice([1, 1000, 10**6, -1])
        if draw.random() < 0.2:
            made["minItems"] = draw.choice([1, 10**5])
        if depth and draw.random() < 0.6:
            made["properties"] = {f"k{i}": schema(depth - 1) for i in range(draw.randrange(1, 5))}
            made["required"] = draw.sample(sorted(made["properties"]), 1)
        if depth and draw.random() < 0.4:
            made[draw.choice(["anyOf", "allOf", "oneOf"])] = [schema(depth - 1) for _ in range(draw.randrange(1, 5))]
        if draw.random() < 0.1:
            made["$ref"] = "#"
        return made

    return {"guided_json": json.loads(json.dumps(schema(4)))}


_KINDS: list[Callable[[random.Random], Body]] = [
    patterns_of_everything,
    exponential_states,
    repeated_repetitions,
    ambiguous,
    endless,
    huge,
    contradictory,
    noise,
    random_schema,
]
