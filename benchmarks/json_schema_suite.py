"""What of the JSON-Schema-Test-Suite is accepted, and whether anything comes out that a schema forbids.

python -m benchmarks.json_schema_suite FOLDER [--draft draft2020-12] [--samples 5] [--json FILE]

FOLDER is a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite. Every schema is compiled as that of a
request would be. The instances of the suite are followed as compact JSON: a valid one should be allowed, an invalid one
must not be. Then random outputs are drawn through the token masks and validated by the package jsonschema.

The valid instances that are not allowed differ in what a grammar fixes: the order of the properties, `1.0` for a whole
number, and texts that are not of a `format` (annotation to the specification, enforced here).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import signal
from collections import Counter
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
from llguidance import LLMatcher, LLTokenizer

from inferengine.bench.environment import revision, write_result
from inferengine.errors import InvalidRequest
from inferengine.structured_output.build import MAX_ITEMS_IN_ROW, MAX_LEXER_STATES, STEP_LEXER_FUEL, translate
from inferengine.structured_output.matcher import reason
from inferengine.structured_output.spec import GrammarSpec

BYTES = LLTokenizer("byte")
LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=STEP_LEXER_FUEL, max_items_in_row=MAX_ITEMS_IN_ROW, max_lexer_states=MAX_LEXER_STATES
)
LONGEST = 400  # characters of a random output; beyond, it is given up
COMPILE_S = 2.0  # of processor time, as limits.grammar_compile_s bounds it in the engine


class TooSlow(Exception):
    """A schema that takes longer to compile than a request may."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="draft2020-12")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tests = arguments.folder / "tests" / arguments.draft
    rows = [
        measure("required", sorted(tests.glob("*.json")), arguments.samples),
        measure("optional", sorted((tests / "optional").glob("*.json")), arguments.samples),
        measure("formats", sorted((tests / "optional" / "format").glob("*.json")), arguments.samples),
    ]
    for row in rows:
        print(json.dumps(row, indent=1, ensure_ascii=False))
    if arguments.json:
        document = {
            "benchmark": "json_schema_suite",
            "environment": environment(),
            "draft": arguments.draft,
            "rows": rows,
        }
        write_result(arguments.json, document)


def measure(name: str, files: list[Path], samples: int) -> dict[str, Any]:
    """Compile every schema of the files and count what their instances do."""
    counts: Counter[str] = Counter()
    refused: dict[str, list[str]] = {}
    forbidden: list[str] = []
    not_allowed: list[str] = []
    for file in files:
        for group in json.loads(file.read_text()):
            counts["schemas"] += 1
            title = f"{file.stem}: {group['description']}"
            matcher = compiled(group["schema"])
            if isinstance(matcher, str):
                nothing = not any(test["valid"] for test in group["tests"]) and (
                    "no value can" in matcher or "no text" in matcher
                )
                counts["of no value, refused as such" if nothing else "refused"] += 1
                if not nothing:
                    refused.setdefault(matcher[:160], []).append(title)
                continue
            counts["accepted"] += 1
            for test in group["tests"]:
                allowed = follows(matcher, test["data"])
                counts[f"{'valid' if test['valid'] else 'invalid'} instances"] += 1
                counts[f"{'valid' if test['valid'] else 'invalid'} instances allowed"] += allowed
                if allowed != test["valid"]:
                    (forbidden if allowed else not_allowed).append(f"{title}: {test['description']}")
            for seed in range(samples):
                sample(matcher, group["schema"], seed, counts, forbidden, title)
    right = counts["accepted"] + counts["of no value, refused as such"]
    return {
        "part": name,
        "accepted_percent": round(100 * counts["accepted"] / max(1, counts["schemas"]), 1),
        "handled_percent": round(100 * right / max(1, counts["schemas"]), 1),
        "counts": dict(sorted(counts.items())),
        "forbidden_but_allowed": forbidden,
        "valid_but_not_allowed": not_allowed,
        "refused": {why: len(titles) for why, titles in refused.items()},
    }


def compiled(schema: Any) -> LLMatcher | str:
    """Return the matcher of a schema, or why it is refused."""

    def too_slow(*_: Any) -> None:
        raise TooSlow

    if schema is False:
        return "no value can match it"
    signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
    try:
        grammar = translate(GrammarSpec("json_schema", json.dumps({} if schema is True else schema))).grammar
        matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LIMITS)
        return reason(matcher.get_error()) if matcher.is_error() else matcher
    except InvalidRequest as error:
        return error.message
    except TooSlow:
        return "takes too long to compile"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def follows(matcher: LLMatcher, value: Any) -> bool:
    """Return whether an output may be this value, as compact JSON."""
    copy = matcher.deep_copy()
    tokens = list(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass"))
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def sample(matcher: LLMatcher, schema: Any, seed: int, counts: Counter[str], forbidden: list[str], title: str) -> None:
    """Draw an output and validate it."""
    text = drawn(matcher.deep_copy(), random.Random(seed))
    if text is None:
        counts["random outputs given up for their length"] += 1
        return
    counts["random outputs"] += 1
    value = json.loads(text, parse_float=Decimal)
    try:
        jsonschema.Draft202012Validator(schema).validate(value)
    except jsonschema.ValidationError as error:
        forbidden.append(f"{title}: random output {text[:200]!r}: {error.message[:200]}")
    except Exception as error:  # what the validator itself cannot do: references that it would have to load
        counts[f"random outputs that jsonschema cannot check ({type(error).__name__})"] += 1


def drawn(matcher: LLMatcher, draw: random.Random) -> str | None:
    """Draw a random text of a grammar, which ends where it may with even chances; None: it goes on and on."""
    data = bytearray()
    while len(data) < LONGEST:
        if matcher.is_accepting() and draw.random() < 0.5:
            return data.decode()
        allowed = [token for token, bit in enumerate(mask_bits(matcher)) if bit and token < 256]
        if not allowed:
            return data.decode() if matcher.is_accepting() else f'"dead end after {data!r}"'
        common = [token for token in allowed if token in b'"}]0123 ,:abfoz']  # else most of a text is rare characters
        token = draw.choice(common if common and draw.random() < 0.8 else allowed)
        assert matcher.consume_token(token), matcher.get_error()
        data.append(token)
        if matcher.is_stopped():
            return data.decode()
    return None


def mask_bits(matcher: LLMatcher) -> list[bool]:
    mask = matcher.compute_bitmask()
    return [bool(mask[place // 8] >> place % 8 & 1) for place in range(256)]


def environment() -> dict[str, Any]:
    return {
        "revision": revision(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "llguidance": version("llguidance"),
        "jsonschema": version("jsonschema"),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
