"""What is run on a card before a release: `scripts/test-gpu`. Ends in one line, PASS or FAIL and what failed.

Each part is a process of its own with a time limit, so that a hung kernel fails its part and nothing else. Parts run
beside each other: two at a time on each card.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from inferengine.bench.environment import write_result
from inferengine.config.environment import visible_cards

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
PYTEST = [
    PYTHON,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "--timeout",
    "200",
    "--tb=short",
]


class Part(NamedTuple):
    """One process: exit code 0 means that it passed. `cards`: how many it needs; with more than one it sees all."""

    name: str
    command: list[str]
    limit_s: int
    cards: int = 1


def parts(calls: int, gauntlet_s: int, processes: int) -> list[Part]:
    """Return all parts, the longest first."""
    gauntlet = [PYTHON, "-m", "tests.gauntlet", "--device", "cuda", "--seconds", str(gauntlet_s), "--seed"]
    spread = ["-n", str(processes)] if processes > 1 else []
    deterministic = [PYTHON, "-m", "benchmarks.deterministic", "--shape", "qwen3-0.6b", "--batches", "1"]
    return [
        Part("kernels", [*PYTEST, *spread, "tests/kernels", "tests/quantization", "tests/core"], 300),
        Part("stall", [PYTHON, "-m", "tests.gpu.stall", "--calls", str(calls)], 120 + calls // 500),
        Part("gauntlet-fp32", [*gauntlet, "1", "--dtype", "float32"], gauntlet_s + 120),
        Part("gauntlet-bf16", [*gauntlet, "2", "--dtype", "bfloat16"], gauntlet_s + 120),
        Part("compilations", [PYTHON, "-m", "tests.gpu.compilations"], 240),
        Part("shapes", [PYTHON, "-m", "tests.gpu.shapes"], 240),
        Part("distribution", [PYTHON, "-m", "tests.gpu.distribution"], 150),
        Part("deterministic", [*deterministic, "--cache.num_blocks", "1024"], 180),  # others run on the card beside it
        Part("formats", [PYTHON, "-m", "tests.gpu.formats"], 180),
        Part("ranks", [PYTHON, "-m", "tests.gpu.ranks"], 150, cards=2),
    ]


class Runner:
    """Takes parts from one list until it is empty, in as many threads as there are lanes."""

    def __init__(self, waiting: list[Part], logs: Path, total_s: float) -> None:
        self._waiting = waiting
        self._logs = logs
        self._end_s = time.monotonic() + total_s
        self._lock = threading.Lock()
        self.results: list[dict[str, object]] = []

    def lane(self, card: str) -> None:
        """Run parts with this value of CUDA_VISIBLE_DEVICES."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                part = self._waiting.pop(0)
            self._run(part, card)

    def _run(self, part: Part, card: str) -> None:
        begin = time.monotonic()
        limit_s = min(part.limit_s, self._end_s - begin)
        path = self._logs / f"{part.name}.log"
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _path()}
        if part.cards == 1:
            environment["CUDA_VISIBLE_DEVICES"] = card
        with path.open("w") as log:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | str = process.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                code = f"no end after {limit_s:.0f} s"
            _end(process)
        last = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        with self._lock:
            self.results.append(
                {
                    "part": part.name,
                    "passed": code == 0,
                    "exit": code,
                    "seconds": round(time.monotonic() - begin, 1),
                    "last_line": last[-1][:300] if last else "",
                }
            )
            print(f"{'passed' if code == 0 else 'FAILED':6} {part.name:14} {time.monotonic() - begin:6.1f} s", end="  ")
            print(last[-1][:140] if last else "", flush=True)
            if code != 0:
                print("\n".join("    " + line[:160] for line in last[-25:]), flush=True)


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts, comma separated")
    parser.add_argument("--without", default="", help="parts, comma separated")
    parser.add_argument("--calls", type=int, default=20_000, help="sampler calls of the stall hunt")
    parser.add_argument("--gauntlet-seconds", type=int, default=90)
    parser.add_argument("--total-seconds", type=float, default=480.0)
    parser.add_argument("--processes", type=int, default=6, help="of pytest; 1: without pytest-xdist")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/test-gpu"))
    options = parser.parse_args()
    known = parts(options.calls, options.gauntlet_seconds, options.processes)
    only, without = (set(filter(None, names.split(","))) for names in (options.only or "", options.without))
    if unknown := (only | without) - {part.name for part in known}:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; {', '.join(part.name for part in known)} are")
    chosen = [part for part in known if part.name not in without and (not only or part.name in only)]
    if not chosen:
        parser.error("--without leaves no part to run")
    import torch

    if not torch.cuda.is_available():
        print("FAIL: there is no CUDA device")
        return 1
    options.logs.mkdir(parents=True, exist_ok=True)
    cards = torch.cuda.device_count()
    if only and (short := [part.name for part in chosen if part.cards > cards]):
        parser.error(f"{', '.join(short)}: more than one card is needed")
    chosen = [part for part in chosen if part.cards <= cards]
    runner = Runner(list(chosen), options.logs, options.total_seconds)
    begin = time.monotonic()
    names = visible_cards()[:cards]
    lanes = [threading.Thread(target=runner.lane, args=(card,)) for card in 2 * names]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    failed = [str(result["part"]) for result in runner.results if not result["passed"]]
    if options.out is not None:
        document = {
            "benchmark": "test_gpu",
            "environment": {"devices": [torch.cuda.get_device_name(card) for card in range(cards)]},
            "passed": not failed,
            "seconds": round(time.monotonic() - begin, 1),
            "parts": runner.results,
        }
        write_result(options.out, document)
    what = f"{len(chosen)} parts in {time.monotonic() - begin:.0f} s on {cards} x {torch.cuda.get_device_name()}"
    print(f"FAIL: {', '.join(failed)} ({what})" if failed else f"PASS: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
