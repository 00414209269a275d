"""A model on the CPU in fp32, bf16 and low precision, alternating in one process: what a decode step costs.

python benchmarks/int8_cpu.py [--model FOLDER] [--schemes float32 bfloat16 int8 int8_w8a8] [--threads 1] [--batch 1]

`none` is the default: fp32, its weights read as fp16 where that holds them exactly. `float32` reads them as fp32.

Wall time and this thread's own CPU time: with one thread the latter tells what the engine does on a core of its own
though others use the machine. Medians of steps that only decode; the ratio is tokens per second over fp32's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.offline import Bench
from inferengine.bench.environment import write_result
from inferengine.config import Config, load
from inferengine.kernels.reference import ops as reference


class Timed:
    """One engine with a steady batch, stepped by hand."""

    def __init__(self, config: Config, batch: int, prompt: int, num_tokens: int) -> None:
        self.bench = Bench(config)
        self.batch, self.prompt, self.num_tokens = batch, prompt, num_tokens
        self.core = self.bench.core()
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def run(self, num_steps: int) -> None:
        """So many decode steps, requests renewed when they end."""
        taken = 0
        while taken < num_steps:
            if not self.core.has_work:
                for _ in range(self.batch):
                    self.bench.submit(self.core, self.prompt, self.num_tokens)
            wall, cpu = time.perf_counter(), time.thread_time()
            output = self.core.step()
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            if output is not None and len(output.uids) == self.batch and not output.finished and self._decoding():
                self.wall_ms.append(wall * 1e3)
                self.cpu_ms.append(cpu * 1e3)
                taken += 1

    def _decoding(self) -> bool:
        return all(sequence.num_output > 1 for sequence in self.core.scheduler.running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="checkpoint folder; none: the embedded model")
    parser.add_argument("--schemes", nargs="+", default=["float32", "bfloat16", "int8", "int8_w8a8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engines: dict[str, Timed] = {}
    for scheme in ("none", *arguments.schemes):
        values: dict[str, Any] = {"path": arguments.model, "dtype": "float32", "quantization": scheme}
        if scheme in ("float32", "bfloat16"):
            values |= {"dtype": scheme, "quantization": "none"}
        config = load().with_values(
            model=values,
            engine={"device": "cpu", "threads": arguments.threads, "max_num_seqs": arguments.batch},
            cache={"num_blocks": 40 * arguments.batch},
        )
        with (
            mock.patch.object(reference, "_half_is_exact", return_value=False) if scheme == "float32" else nullcontext()
        ):
            engines[scheme] = Timed(config, arguments.batch, prompt=32, num_tokens=200)
    for _ in range(arguments.rounds):
        for timed in engines.values():
            timed.run(10)
    plain = engines["none"]
    rows = []
    for scheme, timed in engines.items():
        wall, cpu = statistics.median(timed.wall_ms), statistics.median(timed.cpu_ms)
        row = {"scheme": scheme, "batch": arguments.batch, "wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3)}
        row |= {"wall_ratio": round(statistics.median(plain.wall_ms) / wall, 2)}
        row |= {"cpu_ratio": round(statistics.median(plain.cpu_ms) / cpu, 2)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        about = {"machine": platform.machine(), "threads": arguments.threads, "torch": torch.__version__}
        document = {"benchmark": "int8_cpu", "environment": about, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
