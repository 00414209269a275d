"""What sampling costs: the same steps drawn greedily and with features on, in turn, in one process.

python benchmarks/sampling.py --shape llama-3.1-8b --device cuda [--batch 256] [--features all ...] [--json FILE]

`ratio` is tokens per second over greedy's. `all` has every feature at once for every request. On a CPU, where nothing
of it is a kernel, this only shows that it runs: use a small `--batch`.
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
from inferengine.config import parse_flags
from inferengine.sampling_params import SamplingParams

FILTERS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
WORDS: dict[str, Any] = {
    "logit_bias": tuple((token, 1.5) for token in range(100, 116)),
    "bad_words_ids": ((200, 201), (300,)),
    "stop_token_ids": (5, 6, 7),
}
FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},  # with random weights nearly the whole vocabulary is kept
    "filters": FILTERS,
    "penalties": {"temperature": 0.0, **PENALTIES},
    "words": {"temperature": 0.0, **WORDS},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "all": {**FILTERS, **PENALTIES, **WORDS, "logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    flags, rest = parse_flags(sys.argv[1:])
    arguments = parser.parse_args(rest)
    flags.setdefault("engine.max_num_seqs", str(arguments.batch))
    clock, rows = Clock(arguments.clock), []
    with ExitStack() as stack:
        # one executor: two of a large model would not fit a card; runs then follow each other instead of taking turns
        executor, capacity, environment = stack.enter_context(open_executor(arguments, flags))
        contestant = Contestant(executor, capacity, plain_options(capacity))
        draw = random.Random(0)
        prompts = [[draw.randrange(capacity.vocab_size) for _ in range(32)] for _ in range(arguments.batch)]
        greedy = _jobs(prompts, arguments.output_tokens, {"temperature": 0.0})
        for name in arguments.features:
            jobs = _jobs(prompts, arguments.output_tokens, FEATURES[name])
            contestants = {"greedy": contestant, name: contestant}
            outcomes = compete(contestants, {"greedy": greedy, name: jobs}, arguments.rounds, clock)
            row: Row = {"features": name, "batch": arguments.batch, **figures(outcomes[name])}
            row |= {"greedy_tokens_per_s": figures(outcomes["greedy"])["tokens_per_s"]}
            row |= {"ratio": round(ratio(outcomes[name], outcomes["greedy"]), 3)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.json:
        document = {"benchmark": "sampling", "environment": environment, "rounds": arguments.rounds, "rows": rows}
        write_result(arguments.json, document)


def _jobs(prompts: list[list[int]], output_tokens: int, values: dict[str, Any]) -> list[Job]:
    """Return jobs that do not end before their length."""
    lengths = {"min_tokens": output_tokens} if "stop_token_ids" in values else {}
    params = SamplingParams(**{"ignore_eos": True, **values, **lengths})
    return [Job(prompt, params, output_tokens) for prompt in prompts]


if __name__ == "__main__":
    main()
