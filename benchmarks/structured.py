"""What a grammar costs: the same number of tokens with and without one, in turn, in one process.

python benchmarks/structured.py [--device cpu|cuda] [--batch 32] [--output-tokens 96] [--json FILE]

Each grammar goes on for longer than the output, so that both sides give as many tokens; those that a grammar forces
come without a draw and are counted apart. `ratio` is tokens per second with the grammar over those without.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.contest import Contestant, Job, Row, compete, figures, ratio
from benchmarks.device import Clock, add_model_arguments, open_executor, plain_options
from inferengine.bench.environment import write_result
from inferengine.config import load, parse_flags
from inferengine.engine.model_info import read_model_card
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.compiler import GrammarCompiler
from inferengine.structured_output.spec import GrammarSpec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "city"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": GrammarSpec("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 1000})),
    "json": GrammarSpec("json_schema", json.dumps({"type": "array", "items": {}, "minItems": 1000})),
    "regex": GrammarSpec("regex", r"([a-z]{1,9}[ ,]){1000}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--grammars", nargs="+", default=list(GRAMMARS), choices=GRAMMARS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    flags, rest = parse_flags(sys.argv[1:])
    arguments = parser.parse_args(rest)
    clock, rows = Clock(arguments.clock), []
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        environment: dict[str, Any] = {}
        for name in ("free", "grammar"):
            opened = open_executor(arguments, flags)
            executor, capacity, environment = stack.enter_context(opened)
            contestants[name] = Contestant(executor, capacity, plain_options(capacity))
        capacity = contestants["free"].capacity
        folder = str(arguments.model) if arguments.model else ""
        card = read_model_card(load(environment={}).with_values(model={"path": folder}))
        compiler = GrammarCompiler(
            card.files["tokenizer.json"].decode(),
            vocab_size=capacity.vocab_size,
            eos_token_ids=list(card.eos_token_ids),
        )
        stack.callback(compiler.close)
        draw = random.Random(0)
        prompts = [[draw.randrange(capacity.vocab_size) for _ in range(16)] for _ in range(arguments.batch)]
        params = SamplingParams(temperature=arguments.temperature, ignore_eos=True)
        free = [Job(prompt, params, arguments.output_tokens) for prompt in prompts]
        for name in arguments.grammars:
            spec = GRAMMARS[name]
            bound = [job._replace(spec=spec, grammar=lambda spec=spec: compiler.compile(spec)) for job in free]
            outcomes = compete(
                contestants, {"free": free, "grammar": bound}, arguments.rounds, clock, equals=("free", "grammar")
            )
            row: Row = {"grammar": name, "batch": arguments.batch, **figures(outcomes["grammar"])}
            row |= {"free_tokens_per_s": figures(outcomes["free"])["tokens_per_s"]}
            row |= {"forced_tokens": outcomes["grammar"][-1].num_forced}
            row |= {"ratio": round(ratio(outcomes["grammar"], outcomes["free"]), 3)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.json:
        document = {"benchmark": "structured", "environment": environment, "rounds": arguments.rounds, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
