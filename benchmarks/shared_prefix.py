"""Requests that begin alike on a CPU: what attending their common beginning once saves.

python -m benchmarks.shared_prefix [--rows 16x1088 4x1088 32x256] [--own 64] [--rounds 3] [--json FILE]

The embedded model on one thread, prefix cache on. COUNTxLENGTH: that many requests begin with the same LENGTH tokens,
which are cached, and go on with `--own` tokens of their own. Milliseconds of CPU time that a decode of all rows takes,
`once`, and `apart`: by turns with every row attended by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.offline import Bench, drain
from inferengine.bench.environment import write_result
from inferengine.config import load
from inferengine.config.model_path import EMBEDDED
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.engine.core import EngineCore
from inferengine.kernels import cpu_shared_prefix

SEED = 1


def measure(bench: Bench, rows: int, shared: int, own: int, output: int) -> float:
    """Return the median milliseconds of CPU time of a decode of all rows."""
    options = SchedulerOptions(bench.capacity.max_num_batched_tokens, bench.capacity.max_num_seqs)
    core = EngineCore(bench.executor, bench.capacity, options, clock=time.perf_counter)
    rng = random.Random(SEED)
    beginning = [rng.randrange(bench.capacity.vocab_size) for _ in range(shared)]
    bench.submit(core, [*beginning, 5], 1)  # fills the prefix cache
    drain(core)
    for _ in range(rows):
        bench.submit(core, [*beginning, *(rng.randrange(bench.capacity.vocab_size) for _ in range(own))], output, 1.0)
    steps_ms = []
    while core.has_work:
        begin = time.process_time()
        done = core.step()
        took_ms = 1e3 * (time.process_time() - begin)
        if done is not None and len(done.uids) == rows and not done.finished:
            steps_ms.append(took_ms)
    return statistics.median(steps_ms[len(steps_ms) // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["16x1088", "16x1600", "4x1088", "32x256"], metavar="COUNTxLENGTH")
    parser.add_argument("--own", type=int, default=64)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load(flags={"speculation.method": "none", "engine.threads": "1"}, environment={})
    bench = Bench(config.with_values(model={"path": str(EMBEDDED)}))
    found = []
    for text in arguments.rows:
        rows, shared = map(int, text.split("x"))
        times: dict[str, list[float]] = {"apart": [], "once": []}
        for _ in range(arguments.rounds):
            for name, least in (("apart", sys.maxsize), ("once", cpu_shared_prefix.LEAST_SAVED)):
                with patch.object(cpu_shared_prefix, "LEAST_SAVED", least):
                    times[name].append(measure(bench, rows, shared, arguments.own, arguments.output))
        row: dict[str, Any] = {"rows": rows, "shared_tokens": shared, "own_tokens": arguments.own}
        row |= {f"{name}_step_ms": statistics.median(steps) for name, steps in times.items()}
        row["step_ratio"] = row["apart_step_ms"] / row["once_step_ms"]
        found.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json is not None:
        write_result(arguments.json, {"benchmark": "shared_prefix", "rows": found}, seed=SEED)


if __name__ == "__main__":
    main()
