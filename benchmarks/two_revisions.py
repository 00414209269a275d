"""Two checkouts by turns: what the same work costs before and after a change, in CPU time of one thread.

python -m benchmarks.two_revisions --before FOLDER [--rows 1 8 32] [--rounds 7] [--json FILE]

Each checkout has a process with the embedded model (or --model) on one thread of a CPU; the two take turns, so that
other programs disturb both alike. `decode` is the median of a step in which that many rows decode, `requests` a closed
loop of 8 requests at a time, of 128 prompt tokens and 64 of output: milliseconds a request. Ratios are of pairs, before
over after, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS, NUM_REQUESTS = 8, 128, 64, 24  # of `requests`
DECODED_PROMPT, DECODED_TOKENS = 64, 64  # of `decode`


class Worker:
    """A process of one checkout."""

    def __init__(self, folder: Path, model: str) -> None:
        command = [sys.executable, "-P", __file__, "--worker", "--model", model]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about: dict[str, Any] = self._read()

    def ask(self, work: str) -> float:
        """Have a piece of work done; returns its milliseconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n")
        self.process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def work(model: str) -> None:
    """Do what standard input says, in the checkout that PYTHONPATH names."""
    from benchmarks.offline import Bench
    from inferengine.bench.environment import revision
    from inferengine.config import load

    engine = {"device": "cpu", "threads": 1}
    bench = Bench(load().with_values(model={"path": model}, engine=engine, speculation={"method": "none"}))
    print(json.dumps({"revision": revision()}), flush=True)
    for line in sys.stdin:
        rows = int(line)
        print(json.dumps(_decode(bench, rows) if rows else _requests(bench)), flush=True)


def _decode(bench: Any, num_rows: int) -> float:
    core = bench.core()
    for _ in range(num_rows):
        bench.submit(core, DECODED_PROMPT, DECODED_TOKENS)
    times = []
    while core.has_work:
        begin = time.thread_time()
        output = core.step()
        if output is not None and len(output.uids) == num_rows and not output.finished:
            times.append(time.thread_time() - begin)
    return statistics.median(times[len(times) // 8 :]) * 1e3


def _requests(bench: Any) -> float:
    core, left = bench.core(), NUM_REQUESTS - AT_ONCE
    for _ in range(AT_ONCE):
        bench.submit(core, PROMPT_TOKENS, OUTPUT_TOKENS)
    begin = time.thread_time()
    while core.has_work:
        output = core.step()
        for _ in output.finished if output is not None else ():
            if left:
                bench.submit(core, PROMPT_TOKENS, OUTPUT_TOKENS)
                left -= 1
    return (time.thread_time() - begin) / NUM_REQUESTS * 1e3


def compare(before: Worker, after: Worker, piece: str, rounds: int) -> dict[str, Any]:
    """Let both do a piece of work so often, each first in every other round."""
    times: dict[Worker, list[float]] = {before: [], after: []}
    for turn in range(rounds):
        for worker in (before, after) if turn % 2 == 0 else (after, before):
            times[worker].append(worker.ask(piece))
    ratios = [old / new for old, new in zip(times[before], times[after], strict=True)]
    return {
        "work": f"decode {piece}" if int(piece) else "requests",
        "before_ms": round(statistics.median(times[before]), 3),
        "after_ms": round(statistics.median(times[after]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "interval": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="a checkout of the revision before; this one is the one after")
    parser.add_argument("--model", default="", help="checkpoint folder; none: the embedded model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.model)
        return
    if arguments.before is None:
        parser.error("--before is needed")
    from inferengine.bench.environment import write_result

    before, after = Worker(arguments.before.resolve(), arguments.model), Worker(ROOT, arguments.model)
    rows = []
    for piece in [*map(str, arguments.rows), "0"]:
        rows.append(compare(before, after, piece, arguments.rounds))
        print(json.dumps(rows[-1]), flush=True)
    revisions = {"before": before.about["revision"], "after": after.about["revision"]}
    before.close()
    after.close()
    if arguments.json:
        write_result(arguments.json, {"benchmark": "two_revisions", "revisions": revisions, "rows": rows})


if __name__ == "__main__":
    main()
