"""A model on the CPU in fp32, bf16 and low precision, alternating in one process: what a decode step costs.

python -m benchmarks.int8_cpu [--model FOLDER] [--schemes float32 bfloat16 int8 int8_w8a8] [--threads 1] [--batch 1 8]
python -m benchmarks.int8_cpu --schemes int8_w8a8 onnx onnx_int8_w8a8 --loss 100

`none` is the default: fp32, its weights read as fp16 where that holds them exactly. `float32` reads them as fp32.
`onnx` is fp32 with engine.executor = onnx. `--loss`: nats per token of the embedded model, over so many held-out
documents.

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

from benchmarks.offline import Bench
from inferengine.bench.environment import version, write_result
from inferengine.config import Config, load
from inferengine.config.model_path import EMBEDDED
from inferengine.kernels.reference import ops as reference
from scripts.embedded.quantized import FORMATS, losses

FORMAT_OF = {"none": "float32", "onnx": "onnx float32", "onnx_int8_w8a8": "onnx int8_w8a8"}  # names of FORMATS


class Timed:
    """One engine with a steady batch, stepped by hand."""

    def __init__(self, config: Config, batch: int, prompt: int, num_tokens: int) -> None:
        self.bench = Bench(config)
        self.batch, self.prompt, self.num_tokens = batch, prompt, num_tokens
        self.core = self.bench.core()
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def run(self, num_steps: int) -> None:
        """Run so many decode steps; requests are renewed when they end."""
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
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--loss", type=int, default=0, metavar="DOCUMENTS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch:
        rows += decode_rows(arguments, batch)
    document: dict[str, Any] = {"benchmark": "int8_cpu", "rows": rows}
    if arguments.loss:
        formats = {name: FORMATS[FORMAT_OF.get(name, name)] for name in ("none", *arguments.schemes)}
        document["held_out_loss"] = losses(EMBEDDED, arguments.loss, formats)
        print(json.dumps(document["held_out_loss"]), flush=True)
    if arguments.json:
        about = {"machine": platform.machine(), "threads": arguments.threads, "onnxruntime": version("onnxruntime")}
        write_result(arguments.json, {**document, "environment": about})


def decode_rows(arguments: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Return one row for each scheme."""
    engines: dict[str, Timed] = {}
    for scheme in ("none", *arguments.schemes):
        values: dict[str, Any] = {"path": arguments.model, "dtype": "float32", "quantization": "none"}
        if scheme in ("float32", "bfloat16"):
            values["dtype"] = scheme
        elif scheme != "onnx":
            values["quantization"] = scheme.removeprefix("onnx_")
        config = load().with_values(
            model=values,
            engine={
                "device": "cpu",
                "threads": arguments.threads,
                "max_num_seqs": batch,
                "executor": "onnx" if scheme.startswith("onnx") else "torch",
            },
            cache={"num_blocks": 40 * batch},
        )
        with (
            mock.patch.object(reference, "_half_is_exact", return_value=False) if scheme == "float32" else nullcontext()
        ):
            engines[scheme] = Timed(config, batch, prompt=32, num_tokens=200)
    for _ in range(arguments.rounds):
        for timed in engines.values():
            timed.run(10)
    plain = engines["none"]
    rows = []
    for scheme, timed in engines.items():
        wall, cpu = statistics.median(timed.wall_ms), statistics.median(timed.cpu_ms)
        row = {"scheme": scheme, "batch": batch, "wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3)}
        row |= {"tokens_per_cpu_s": round(batch / cpu * 1e3, 1)}
        row |= {"wall_ratio": round(statistics.median(plain.wall_ms) / wall, 2)}
        row |= {"cpu_ratio": round(statistics.median(plain.cpu_ms) / cpu, 2)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
