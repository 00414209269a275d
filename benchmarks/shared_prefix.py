"""Requests that begin alike: what attending their common beginning once saves.

python -m benchmarks.shared_prefix [--rows 16x1088 4x1088 32x256] [--own 64] [--rounds 3] [--json FILE]
python -m benchmarks.shared_prefix --shape llama-3.1-8b --device cuda [--rows 16x1000 64x8000] [--json FILE]

Prefix cache on. COUNTxLENGTH: that many requests begin with the same LENGTH tokens, which are cached, and go on with
`--own` tokens of their own. Milliseconds that a decode of all rows takes, `once`, and `apart`: by turns with every row
attended by itself.

On a CPU: the embedded model on one thread, in CPU time. On CUDA: random weights of `--shape`, in time between results,
`once` whether the rule would have it or not; `by_rule` says how the rule has it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from benchmarks.offline import Bench, drain
from benchmarks.shapes import SHAPES
from inferengine.bench.environment import write_result
from inferengine.config import Config, load
from inferengine.config.model_path import EMBEDDED
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.engine.core import EngineCore
from inferengine.executor.memory import prefix_groups
from inferengine.kernels import cpu_shared_prefix

SEED = 1
ROWS = {
    "cpu": ["16x1088", "16x1600", "4x1088", "32x256"],
    "cuda": [f"{count}x{length}" for length in (1000, 8000) for count in (16, 64, 128)],
}
OWN_TOKENS = {"cpu": 64, "cuda": 100}
BLOCK_SIZE = 64  # of the cache on CUDA


def measure(bench: Bench, rows: int, shared: int, own: int, output: int) -> tuple[float, bool]:
    """Return the median milliseconds of a decode of all rows, and whether a graph of shared prefixes computed it."""
    on_cuda = bench.executor.device.type == "cuda"
    clock = time.perf_counter if on_cuda else time.process_time
    options = SchedulerOptions(bench.capacity.max_num_batched_tokens, bench.capacity.max_num_seqs)
    core = EngineCore(bench.executor, bench.capacity, options, clock=time.perf_counter)
    rng = random.Random(SEED)
    beginning = [rng.randrange(bench.capacity.vocab_size) for _ in range(shared)]
    bench.submit(core, [*beginning, 5], 1)  # fills the prefix cache
    drain(core)
    for _ in range(rows):
        bench.submit(core, [*beginning, *(rng.randrange(bench.capacity.vocab_size) for _ in range(own))], output, 1.0)
    steps_ms, last, shares = [], None, False
    while core.has_work:
        begin = clock()
        done = core.step()
        end = clock()
        is_whole = done is not None and len(done.uids) == rows and not done.finished
        if on_cuda:  # steps overlap: from one result to the next
            if is_whole and last is not None:
                steps_ms.append(1e3 * (end - last))
                shares |= "shared prefixes" in bench.executor.launched
            last = end if is_whole else None
        elif is_whole:
            steps_ms.append(1e3 * (end - begin))
    return statistics.median(steps_ms[len(steps_ms) // 4 :]), shares


def configuration(arguments: argparse.Namespace, folder: Path) -> Config:
    """Return the configuration of the measured engine. `folder` is for a model of random weights."""
    if arguments.device == "cpu":
        config = load(flags={"speculation.method": "none", "engine.threads": "1"}, environment={})
        return config.with_values(model={"path": str(EMBEDDED)})
    (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
    cases = [tuple(map(int, text.split("x"))) for text in arguments.rows]
    longest = max(shared for _, shared in cases) + arguments.own + arguments.output
    own_blocks = (arguments.own + arguments.output) // BLOCK_SIZE + 2
    num_blocks = max(count * own_blocks + shared // BLOCK_SIZE for count, shared in cases) + 16
    return load(flags={"speculation.method": "none"}, environment={}).with_values(
        model={"path": str(folder), "load_format": "dummy", "max_model_len": longest + BLOCK_SIZE},
        engine={
            "device": "cuda",
            "max_num_seqs": max(count for count, _ in cases),
            "max_num_batched_tokens": 8192,
            "tune": "0",
        },
        cache={"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "dtype": arguments.cache_dtype},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="COUNTxLENGTH")
    parser.add_argument("--own", type=int)
    parser.add_argument("--output", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="with --device cuda")
    parser.add_argument("--cache-dtype", choices=["auto", "fp8"], default="auto", help="with --device cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or ROWS[arguments.device]
    arguments.own = arguments.own or OWN_TOKENS[arguments.device]
    on_cuda = arguments.device == "cuda"
    rule: ModuleType = prefix_groups if on_cuda else cpu_shared_prefix
    least_once = 1 if on_cuda else rule.LEAST_SAVED
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(configuration(arguments, Path(folder)))
    print(f"ready after {bench.load_s + bench.warm_up_s:.1f} s", file=sys.stderr, flush=True)
    found = []
    for text in arguments.rows:
        rows, shared = map(int, text.split("x"))
        case = bench, rows, shared, arguments.own
        times: dict[str, list[float]] = {"apart": [], "once": []}
        for _ in range(arguments.rounds):
            for name, least in (("apart", sys.maxsize), ("once", least_once)):
                with patch.object(rule, "LEAST_SAVED", least):
                    step_ms, shares = measure(*case, arguments.output)
                if on_cuda and shares != (name == "once"):
                    raise RuntimeError(f"{text} {name}: launched as {bench.executor.launched}")
                times[name].append(step_ms)
        row: dict[str, Any] = {"rows": rows, "shared_tokens": shared, "own_tokens": arguments.own}
        row |= {f"{name}_step_ms": statistics.median(steps) for name, steps in times.items()}
        row["step_ratio"] = row["apart_step_ms"] / row["once_step_ms"]
        if on_cuda:
            row["by_rule"] = "once" if measure(*case, 12)[1] else "apart"
        found.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json is not None:
        document: dict[str, Any] = {"benchmark": "shared_prefix", "rows": found}
        if on_cuda:
            document |= {"model": arguments.shape, "cache_dtype": arguments.cache_dtype}
        write_result(arguments.json, document, seed=SEED)


if __name__ == "__main__":
    main()
