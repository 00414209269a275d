"""What speculative decoding gains: the same requests with and without it, in turn, in one process.

python benchmarks/speculation.py [--device cpu|cuda] [--methods ngram draft] [--batches 1 8 32] [--json FILE]

Workloads: `copy` (a story asked for again with the first answer in the conversation: the output repeats the prompt),
`chat` (questions, greedy), `sampled` (stories at temperature 1), `random` (random tokens
as prompts, which nothing predicts).
A row's `ratio` is tokens per second over those without speculation; `same` is the share of requests with equal tokens.
The embedded model with its draft, or `--model` and `--draft-model`. With `--clock cpu --engine.threads 1` what other
processes do on the machine is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.contest import Contestant, Entrant, Job, Row, compete, figures, ratio, same_outputs
from benchmarks.device import Clock, add_model_arguments, open_executor, plain_options
from inferengine.bench.environment import write_result
from inferengine.config import load, parse_flags
from inferengine.core.speculation import PROPOSERS
from inferengine.engine.model_info import read_model_card
from inferengine.sampling_params import SamplingParams
from inferengine.text import ChatTemplate, Tokenizer

MAX_RUNNING = 16  # where the configuration does not say
WORKLOADS = ("copy", "chat", "sampled", "random")
HEROES = (
    "robot", "fox", "train", "cat", "dragon", "rabbit", "lantern", "bear", "wizard", "owl", "turtle", "horse", "king",
    "mouse", "boat", "star",
)  # fmt: skip
QUESTIONS = (
    "What is a KV cache and why do I need it?", "explain paged attention please", "whats continuous batching",
    "how does speculative decoding work", "what can you do?", "Why is the sky blue?", "What is 17 + 25?",
    "What is the difference between latency and throughput?", "how do i start the server", "What is love?",
    "Extract name and city as JSON: \"Maria Lopez lives in Lisbon.\"", "Write a poem about the sea.",
    "how can I use curl to get a completion?", "Tell me a joke", "what does STEP carry", "Explain quantum physics.",
)  # fmt: skip


class Workloads:
    """Prompts of each kind, from the model's own answers where they repeat it."""

    def __init__(self, plain: Contestant, folder: Path | None, output_tokens: int) -> None:
        self._plain, self._output_tokens, self._folder = plain, output_tokens, folder
        config = load(environment={}).with_values(model={"path": str(folder) if folder else ""})
        card = read_model_card(config)
        self._tokenizer = Tokenizer.from_files(card.files)
        self._template = ChatTemplate.from_files(card.files)
        self._eos = frozenset(card.eos_token_ids)
        self._draw = random.Random(0)

    def jobs(self, name: str, batch: int) -> list[Job]:
        greedy = SamplingParams(temperature=0.0)
        if name == "random":
            vocab_size, ignoring = self._plain.capacity.vocab_size, greedy.replace(ignore_eos=True)
            prompts = [[self._draw.randrange(vocab_size) for _ in range(64)] for _ in range(batch)]
            return [Job(prompt, ignoring, self._output_tokens) for prompt in prompts]
        stories = [
            f"Tell me a story about a {HEROES[i % 16]} and a {HEROES[(3 + i // 16) % 16]}." for i in range(batch)
        ]
        if name == "sampled":
            draws = [SamplingParams(temperature=1.0, seed=index) for index in range(batch)]
            return [self._ask([story], params) for story, params in zip(stories, draws, strict=True)]
        if name == "chat":
            return [self._ask([QUESTIONS[i % len(QUESTIONS)]], greedy) for i in range(batch)]
        first = [self._ask([story], greedy) for story in stories]
        entrant = Entrant(self._plain, Clock("wall"))
        entrant.submit(first)
        answers = entrant.outcome().outputs
        texts = [self._tokenizer.decode(answer) for answer in answers]
        return [self._ask([story, text, story], greedy) for story, text in zip(stories, texts, strict=True)]

    def _ask(self, turns: list[str], params: SamplingParams) -> Job:
        if self._template is None:
            ids = self._tokenizer.encode("\n\n".join(turns))
        else:
            roles = ("user", "assistant")
            messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
            ids = self._tokenizer.encode(self._template.render(messages), add_special_tokens=False)
        return Job(ids, params, self._output_tokens, self._eos)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--draft-model", default="", help="checkpoint folder of the small model")
    parser.add_argument("--methods", nargs="+", default=["ngram", "draft"], choices=("ngram", "draft"))
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    flags, rest = parse_flags(sys.argv[1:])
    arguments = parser.parse_args(rest)
    if arguments.shape:
        parser.error("--shape has no tokenizer: name a --model")
    clock = Clock(arguments.clock)
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        environment: dict[str, Any] = {}
        for method in ("none", *arguments.methods):
            section = {"method": method, "draft_model": arguments.draft_model if method == "draft" else ""}
            opened = open_executor(arguments, flags, speculation=section)
            executor, capacity, about = stack.enter_context(opened)
            environment = environment or about
            speculation = load(flags=flags).speculation
            options = plain_options(
                capacity,
                max_drafts=0 if method == "none" else speculation.max_drafts,
                max_running_to_draft=speculation.max_running or MAX_RUNNING,
            )
            contestants[method] = Contestant(executor, capacity, options, PROPOSERS[method])
        workloads = Workloads(contestants["none"], arguments.model, arguments.output_tokens)
        rows = []
        for batch in arguments.batches:
            for name in arguments.workloads:
                jobs = workloads.jobs(name, batch)
                equals = [method for method in contestants if method != "draft"]
                outcomes = compete(
                    contestants, dict.fromkeys(contestants, jobs), arguments.rounds, clock, equals=equals
                )
                baseline = outcomes.pop("none")
                rows.append({"workload": name, "batch": batch, "method": "none", **figures(baseline)})
                print(json.dumps(rows[-1]), flush=True)
                for method, results in outcomes.items():
                    row: Row = {"workload": name, "batch": batch, "method": method, **figures(results)}
                    row |= {"ratio": round(ratio(results, baseline), 3), "same": same_outputs(results, baseline)}
                    row |= {"drafted": results[-1].num_drafted, "accepted": results[-1].num_accepted}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if arguments.json:
        document = {"benchmark": "speculation", "environment": environment, "rounds": arguments.rounds, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
