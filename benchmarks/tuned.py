"""Steps with kernels that were measured on this card, and with the fixed rules: is the table faster at every batch?

python -m benchmarks.tuned --shapes gpt-oss-20b llama-3.1-8b [--budget 40] [--rounds 2] [--tables FOLDER] [--json FILE]

Each shape is loaded with random weights in processes of their own, by turns with `engine.tune off` and with a table.
The first of them with a table measures it within `--budget` seconds, products, decode attention and experts alike. A
row has the median of the rounds' median milliseconds a step; `ratio` above 1 is in favour of the table. Tokens are
drawn at temperature 1: greedy ones of random weights soon repeat, and all rows then take the same experts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from inferengine.bench.environment import write_result

Steps = dict[int, list[float]]  # milliseconds by the number of rows, one entry for each round


def steps_of(shape: str, tune: str, cache: Path, batches: Sequence[int], output_tokens: int) -> dict[int, float]:
    """Return the milliseconds of a step at each batch, by a process of its own. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.offline", "--shape", shape, "--engine.tune", tune]
        command += ["--temperature", "1", "--output-tokens", str(output_tokens), "--json", file.name]
        command += ["--batches", *map(str, batches)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(Path(file.name).read_text())["rows"]
    return {row["batch"]: row["median_ms"] for row in rows if row["row"] == "decode"}


def compared(shape: str, rules: Steps, table: Steps) -> list[dict[str, Any]]:
    """Return a row for each batch."""
    rows = []
    for batch in sorted(rules):
        ours, fixed = statistics.median(table[batch]), statistics.median(rules[batch])
        rows.append({"shape": shape, "batch": batch, "rules_ms": fixed, "table_ms": ours, "ratio": fixed / ours})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for measuring, each shape")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--tables", type=Path, help="copy the tables to this folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory(prefix="tuned-") as folder:
            found: dict[str, Steps] = {"off": defaultdict(list), "table": defaultdict(list)}
            for number in range(arguments.rounds):
                for name, tune in (("off", "off"), ("table", "0" if number else str(arguments.budget))):
                    steps = steps_of(shape, tune, Path(folder), arguments.batches, arguments.output_tokens)
                    for batch, milliseconds in steps.items():
                        found[name][batch].append(milliseconds)
            rows += compared(shape, found["off"], found["table"])
            if arguments.tables is not None:
                copy_tables(Path(folder), arguments.tables / shape)
        for row in rows[-len(arguments.batches) :]:
            print(json.dumps(row), flush=True)
        if arguments.json is not None:  # what was measured stays if a later shape fails
            write_result(arguments.json, {"benchmark": "tuned", "budget_s": arguments.budget, "rows": rows})


def copy_tables(cache: Path, to: Path) -> None:
    """Copy every table of a cache folder."""
    to.mkdir(parents=True, exist_ok=True)
    for path in cache.glob("**/tuned/*.json"):
        shutil.copy(path, to)


if __name__ == "__main__":
    main()
