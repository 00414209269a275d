"""What the default of scheduler.itl_target_ms costs and gives: closed loops through the scheduler in virtual time.

python -m benchmarks.itl_target [--cost h200-llama-3.1-8b] [--targets-ms 0 40 50 60 70 80] [--json FILE]

So many requests are kept under way; a step takes as long as the cost model says. No socket and no front end takes part,
so first tokens and gaps are the scheduler's alone. Target 0: none; -1: the default.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.bench.environment import write_result
from inferengine.cli.simulate import engine_options
from inferengine.config import load
from inferengine.core.sequence import Request
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.cost_model import DeviceProfile, load_profile
from inferengine.simulation.virtual_engine import VirtualEngine

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
VOCABULARY = 1 << 19


class Load(NamedTuple):
    """Prompt and output lengths of the requests, and how many are under way at a time."""

    lengths: list[tuple[int, int]]
    concurrency: int


def loads() -> dict[str, Load]:
    draw = random.Random(0)

    def lengths(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[tuple[int, int]]:
        return [(draw.randint(*prompt), draw.randint(*output)) for _ in range(count)]

    return {
        "512 in, 128 out, 512 at a time": Load([(512, 128)] * 512, 512),
        "512 in, 128 out, 128 at a time": Load([(512, 128)] * 512, 128),
        "128-384 in, 32-96 out, 16 at a time": Load(lengths(100, (128, 384), (32, 96)), 16),
        "400 short requests at once": Load(lengths(400, (16, 128), (16, 64)), 400),
        "512 mixed requests at once": Load(lengths(512, (128, 1024), (64, 512)), 512),
        "6 prompts of 15,000 beside 32 streams": Load([(512, 256)] * 32 + [(15000, 64)] * 6, 38),
    }


def run(load_: Load, profile: DeviceProfile, target_ms: float) -> dict[str, float]:
    config = load(environment={}).with_values(scheduler={"itl_target_ms": target_ms})
    engine = VirtualEngine(engine_options(config, profile))
    waiting = list(enumerate(load_.lengths))[::-1]
    sent: dict[int, float] = {}
    first: dict[int, float] = {}
    latest: dict[int, float] = {}
    gaps: list[float] = []
    now = 0.0

    def send() -> None:
        uid, (num_prompt, num_output) = waiting.pop()
        begin = random.Random(uid).randrange(VOCABULARY)
        prompt = [(begin + 7 * place) % VOCABULARY for place in range(num_prompt)]
        engine.submit(Request(uid, prompt, PARAMS, num_output, seed=uid), now)
        sent[uid] = now

    for _ in range(min(load_.concurrency, len(waiting))):
        send()
    while engine.has_work:
        output = engine.step(now)
        now = max(now, engine.clock.now)
        if output is None:
            continue
        for uid in output.uids:
            if uid in first:
                gaps.append(now - latest[uid])
            else:
                first[uid] = now - sent[uid]
            latest[uid] = now
        for _ in output.finished[: len(waiting)]:
            send()
    return {
        "output_tokens_per_s": round(sum(count for _, count in load_.lengths) / now, 1),
        "first_token_ms_p50": _share(list(first.values()), 0.5),
        "first_token_ms_p99": _share(list(first.values()), 0.99),
        "between_tokens_ms_p50": _share(gaps, 0.5),
        "between_tokens_ms_p99": _share(gaps, 0.99),
    }


def _share(samples: list[float], share: float) -> float:
    return round(1e3 * sorted(samples)[int(share * (len(samples) - 1))], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default="h200-llama-3.1-8b")
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[0.0, 40.0, 50.0, 60.0, 70.0, 80.0, -1.0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    profile = load_profile(arguments.cost)
    rows: list[dict[str, Any]] = []
    for name, load_ in loads().items():
        for target_ms in arguments.targets_ms:
            rows.append({"load": name, "itl_target_ms": target_ms, **run(load_, profile, target_ms)})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        document = {"benchmark": "itl_target", "cost": arguments.cost, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
