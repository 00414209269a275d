"""Microseconds that choosing an engine takes, by policy, number of engines and length of the prompt.

    python -m benchmarks.choices [--choices 20000] [--json FILE]

Sessions of several turns behind a shared system prompt: each turn's prompt begins with the one before. An engine's
requests end at random, so that its load stays about the same. `new` counts first turns alone, `known` the others; a
choice includes hashing the prompt and the report of what was sent. Processor time of this thread, best of three.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from pathlib import Path
from typing import Any

from inferengine.bench.environment import write_result
from inferengine.client.load_balancing import POLICIES, LoadBalancer

ENGINES = (1, 8, 100, 1000)
SYSTEM_TOKENS = 600
TURN_TOKENS = 400
TURNS = 8
LOAD = 32  # requests of each engine


def prompts(count: int, generator: random.Random) -> list[tuple[bool, array[int]]]:
    """Return turns of sessions, mixed: whether it is a first one, and the prompt."""
    system = array("I", (generator.randrange(1 << 17) for _ in range(SYSTEM_TOKENS)))
    reservoir = array("I", (generator.randrange(1 << 17) for _ in range(1 << 16)))
    sessions = [system[:] for _ in range(max(1, count // TURNS))]
    made = []
    for number in range(count):
        place = generator.randrange(len(sessions))
        begin = generator.randrange(len(reservoir) - TURN_TOKENS)
        sessions[place] = sessions[place] + array("I", [number]) + reservoir[begin : begin + TURN_TOKENS - 1]
        made.append((len(sessions[place]) == SYSTEM_TOKENS + TURN_TOKENS, sessions[place]))
    return made


def measure(policy: str, num_engines: int, asked: list[tuple[bool, array[int]]]) -> dict[str, Any]:
    """Return mean microseconds of a choice."""
    generator = random.Random(1)
    balancer = LoadBalancer([f"engine-{number}" for number in range(num_engines)], policy, generator=generator)
    loads = balancer.loads
    for engine in range(num_engines):
        loads.report(engine, 0, LOAD)
    seconds, counts = [0.0, 0.0], [0, 0]
    for is_new, prompt in asked:
        begin = time.thread_time()
        choice = balancer.choose(prompt)
        assert choice is not None
        engine, num_new = choice
        loads.sent(engine, num_new)
        seconds[is_new] += time.thread_time() - begin
        counts[is_new] += 1
        ended = engine if generator.random() < 0.5 else generator.randrange(num_engines)
        loads.report(ended, 0, max(0, loads.num_requests[ended] - 1))
    return {
        "policy": policy,
        "engines": num_engines,
        "new_us": round(1e6 * seconds[1] / max(1, counts[1]), 2),
        "known_us": round(1e6 * seconds[0] / max(1, counts[0]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds that choosing an engine takes.")
    parser.add_argument("--choices", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    asked = prompts(arguments.choices, random.Random(0))
    rows = []
    for policy in POLICIES:
        for num_engines in ENGINES:
            rows.append(min((measure(policy, num_engines, asked) for _ in range(3)), key=lambda row: row["known_us"]))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json is not None:
        mean = sum(len(prompt) for _, prompt in asked) / len(asked)
        write_result(arguments.json, {"prompt_tokens_mean": round(mean), "rows": rows}, seed=0)


if __name__ == "__main__":
    main()
